"""Settings of the persistent level have the same effect in a job as in the level's own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierckpt.checkpointer import agent_client
from tierckpt.config import load_config
from tierckpt.group import Node, SingleGroup
from tierckpt.storage import JobDirectory
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import TinyJob

STEPS = 7


@pytest.fixture
def job(tmp_path: Path, shm_dir: Path) -> Any:
    """`job(**settings)`: every version goes there."""

    def start(**settings: Any) -> TinyJob:
        given = {
            "shm_dir": str(shm_dir),
            "agent": "inline",
            "persistent_path": str(tmp_path / "shared"),
            "persistent_every_steps": 1,
            "persistent_keep": 1,
        }
        return TinyJob(tmp_path / "ckpts", **given | settings)

    return start


def versions(tmp_path: Path) -> list[int]:
    return [name.id.version for name in PersistentStore(str(tmp_path / "shared")).versions()]


@pytest.mark.parametrize(("keep", "kept"), [("1", [7]), ("1, every 3", [3, 6, 7])])
def test_every_so_many_stay(keep: str, kept: list[int], job: Any, tmp_path: Path) -> None:
    with job(persistent_keep=keep) as found:
        found.run(STEPS)
    assert versions(tmp_path) == kept


def test_a_level_without_a_place_is_reported(tmp_path: Path, shm_dir: Path) -> None:
    settings = {"shm_dir": str(shm_dir), "agent": "inline", "persistent_every_steps": 2}
    with TinyJob(tmp_path / "ckpts", **settings) as job:
        (said,) = job.heard("notice")
    assert "without persistent_path" in said.message
    assert said.message.endswith("persistent_every_steps")


def test_an_agent_receives_the_number_of_its_node(tmp_path: Path) -> None:
    """The first one creates the place; they look for unfinished versions one after the other."""
    config = load_config({"path": str(tmp_path), "persistent_path": "/shared"}, {})
    hosts = ("a", "b", "a", "c")
    job = JobDirectory.at(tmp_path, "job")
    for index, host in enumerate("abc"):
        group, node = SingleGroup(), Node.of(host, hosts)
        group.rank, group.size = node.first, len(hosts)
        told = agent_client(config, group, job, node, "").session.persistent
        assert told is not None
        assert told.node == index
