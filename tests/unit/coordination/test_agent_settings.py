"""The job's settings that a node's agent receives, and the messages of a start about the node."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierckpt.agent import Agent
from tierckpt.checkpointer import Tiers, agent_client
from tierckpt.config import load_config
from tierckpt.coordination import JobTopology, redundancy_groups
from tierckpt.erasure import ISAL_MISSING
from tierckpt.group import Node, SingleGroup
from tierckpt.storage import directory_of_job


def test_the_flusher_knows_its_node_and_what_the_level_keeps(tmp_path: Path, shm_dir: Path) -> None:
    given = {"path": tmp_path / "ckpts", "shm_dir": shm_dir}
    shared = {"persistent_path": tmp_path / "shared", "persistent_keep": "2, best 1 highest"}
    config = load_config({**given, **shared}, {})
    node = Node(index=3, count=5, ranks=(0,))
    client = agent_client(config, SingleGroup(), directory_of_job(config), node, "")
    with contextlib.closing(Agent(linger_seconds=0.0)) as agent:
        flusher = agent.flusher(client.session)
        assert flusher is not None
        settings = flusher.settings
    assert settings.node == 3
    policy = settings.retention
    assert (policy.keep_best, policy.best_is_low) == (1, False)


class Said:
    """Reports of which only notices are used."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str, severity: int) -> None:
        self.notices.append(text)

    def passed_over(self, *what: Any) -> None:
        raise AssertionError(what)


@pytest.mark.parametrize(
    ("redundancy", "rank", "there", "told"),
    [
        ("rs 2+2", 0, False, True),
        ("rs 2+2", 0, True, False),
        ("rs 2+2", 1, False, False),
        ("xor", 0, False, False),
    ],
    ids=["missing", "found", "another rank", "not needed"],
)
def test_a_start_says_once_that_parity_will_be_slow(
    redundancy: str,
    rank: int,
    there: bool,
    told: bool,
    tmp_path: Path,
    shm_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tierckpt.erasure.kernels.find_isal", lambda: "a library" if there else None
    )
    given = {"path": tmp_path / "ckpts", "shm_dir": shm_dir, "agent": "inline"}
    config = load_config({**given, "peer_redundancy": redundancy}, {})
    hosts = ("a", "b", "c", "d")
    topology, group = JobTopology(hosts, hosts, hosts, hosts), SingleGroup()
    group.rank, group.size = rank, len(hosts)
    groups, problem = redundancy_groups(config, topology, group)
    assert (len(groups), problem) == (1, "")
    directory = {"directory_is_new": False, "directory_is_another": False}
    resources: Any = SimpleNamespace(job=directory_of_job(config), pool=None, **directory)
    agreement: Any = None
    said: Any = Said()
    levels = Tiers(config, group, topology, groups, resources, agreement, said)
    with contextlib.closing(levels.agent):
        levels.open()
    assert said.notices == [ISAL_MISSING] * told
