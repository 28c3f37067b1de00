"""Former nodes with running agents: a restart asks them for their shards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.dist.peer.test_peer_level import EARLIER, STEPS, protected_at
from tests.support import exact
from tests.support.training import Attached, Place, attach, make_job, rank, restored_into, train
from tests.support.waiting import until
from tierckpt.agent import AgentSettings
from tierckpt.coordination import peers
from tierckpt.peer import RemoteNode, remote_reads
from tierckpt.storage import JobDirectory, sealed_at

NODES = "abc"
SPARE = "d"
JOB = "absent"
LINGER_SECONDS = 600.0
"""Longer than any test."""
PATIENT = f"""
from tierckpt.agent import process, server
server.FIRST_CLIENT_SECONDS = {LINGER_SECONDS}
process.main()
"""


@dataclass
class Agents:
    """The nodes' agents, started by the test, so that no other process owns them."""

    shm_dir: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, node: str) -> None:
        job = JobDirectory.at(self.shm_dir, JOB, node)
        job.create()
        told = AgentSettings(str(job.root), job.path.name, linger_seconds=LINGER_SECONDS)
        command = [sys.executable, "-c", PATIENT, json.dumps(structs.asdict(told))]
        self.running[node] = agent = subprocess.Popen([*command, str(os.getpid())])
        while not told.place().address.exists():
            assert agent.poll() is None
            time.sleep(0.01)

    def kill(self, *nodes: str) -> None:
        """Kill agents by SIGKILL, with all that they know."""
        for node in nodes:
            self.running[node].kill()
            self.running.pop(node).wait()


@pytest.fixture
def agents(shm_dir: Path) -> Iterator[Agents]:
    found = Agents(shm_dir)
    for node in NODES:
        found.start(node)
    yield found
    found.kill(*found.running)


@pytest.fixture
def place(tmp_path: Path, shm_dir: Path, agents: Agents) -> Place:
    """Nodes where agents already run, and stay after the job."""
    return Place(str(tmp_path / "{node}" / "ckpts"), str(shm_dir))


@contextlib.contextmanager
def however_long_they_take() -> Iterator[None]:
    """An agent without an answer in two seconds, as on a busy machine, would count as lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_reads, "REACH_SECONDS", LINGER_SECONDS)
        patch.setattr(peers, "ROSTER_SECONDS", LINGER_SECONDS)
        yield


def forget_memory(place: Place) -> None:
    """Lose the versions that are in memory alone."""
    for slot in Path(place.shm).glob("*/*/r*"):
        slot.unlink()


def fail(attached: Attached) -> None:
    """End the training by an exception, as on all ranks."""
    with contextlib.suppress(RuntimeError), attached.ckpt:
        raise RuntimeError("the training failed")


def settings(node: str, **more: Any) -> dict[str, Any]:
    return {
        "node": node,
        "job_id": JOB,
        "peer_redundancy": "partner",
        "peer_interface": "lo",
        "local_every_steps": 100,
        "agent_linger_seconds": LINGER_SECONDS,
        "slots": 3,
        "when_busy": "wait",
        **more,
    }


def leave_behind(place: Place, **more: Any) -> str:
    """Train on all nodes, and end by an exception: v3 is protected, v7 is in memory alone."""
    job = make_job()
    attached = attach(job, place, **settings(NODES[rank()], **more))
    train(job, attached.ckpt, range(EARLIER))
    protected_at(EARLIER, attached)
    train(job, attached.ckpt, range(EARLIER, STEPS))
    fail(attached)
    return exact.digest(job.replicated())


@however_long_they_take()
def come_back(place: Place, nodes: str, steps: int = 0, **more: Any) -> dict[str, Any]:
    """Resume on these nodes; then train for several steps, and end by an exception."""
    job = make_job(seed=2)
    attached = attach(job, place, **settings(nodes[rank()], memory_every_steps=0, **more))
    told = restored_into(job, attached)
    told["silent"] = [event.message for event in attached.said("count as lost")]
    train(job, attached.ckpt, range(STEPS, STEPS + steps))
    fail(attached)
    return told


def test_a_job_that_shrank_reads_the_memory_of_the_nodes_it_left(
    place: Place, agents: Agents, ranks: Any
) -> None:
    """The run takes its own version at the first boundary: those nodes may be gone soon."""
    before = ranks(3).run(leave_behind, place)
    (told,) = ranks(1).run(come_back, place, "b", steps=2)
    assert told["restored"] == (STEPS, {"memory": 1, "agent": 2})
    assert told["replicated"] == before[0]
    assert told["rejected"] == ()
    assert told["silent"] == []
    agents.kill("a", "c")
    (later,) = ranks(1).run(come_back, place, "b")
    assert later["restored"][0] == STEPS + 1
    assert [text.partition(",")[0] for text in later["silent"]] == ["node a", "node c"]


def test_a_job_that_shrank_reads_the_disks_of_the_nodes_it_left(place: Place, ranks: Any) -> None:
    """Encoded, too; the version that was only in their memory is lost with it."""
    ranks(3).run(leave_behind, place, local_codecs="zstd")
    forget_memory(place)
    (told,) = ranks(1).run(come_back, place, "a", local_codecs="zstd")
    (again,) = ranks(1).run(come_back, place, "b", local_codecs="zstd")
    assert told["restored"][0] == again["restored"][0] == EARLIER
    assert told["restored"][1] == {"local": 1, "agent": 2}
    assert told["replicated"] == again["replicated"]


def save_and_leave(place: Place) -> str:
    """v7 is in memory and on disk, without protection."""
    job = make_job()
    attached = attach(job, place, **settings(NODES[rank()]))
    train(job, attached.ckpt, range(STEPS))
    attached.ckpt.save(now=True)
    fail(attached)
    return exact.digest(job.replicated())


def test_a_damaged_file_on_a_former_node_does_not_hide_a_sound_copy_in_memory(
    place: Place, ranks: Any, tmp_path: Path
) -> None:
    """Nor in the other direction."""
    before = ranks(3).run(save_and_leave, place)
    until(lambda: not [*tmp_path.glob("*/ckpts/.*.p0*.tmp")])  # agents still make it
    for parity in tmp_path.glob("*/ckpts/*.p0*"):
        parity.unlink()
    (file,) = tmp_path.glob("a/ckpts/*.safetensors")
    file.write_bytes(bytes(file.stat().st_size))
    for slot in filter(sealed_at, Path(place.shm).glob("*/absent@c/r*.?")):
        data = slot.read_bytes()
        half = len(data) // 2
        slot.write_bytes(data[:half] + bytes(byte ^ 1 for byte in data[half:]))
    (told,) = ranks(1).run(come_back, place, "b")
    assert told["restored"] == (STEPS, {"memory": 1, "agent": 2})
    assert told["replicated"] == before[0]
    (why,) = told["rejected"]
    assert "agent of node c" in why


def leave_in_memory(place: Place) -> str:
    """A version without protection so far."""
    job = make_job()
    attached = attach(job, place, **settings(NODES[rank()]))
    train(job, attached.ckpt, range(STEPS))
    fail(attached)
    return exact.digest(job.replicated())


def come_back_apart(place: Place, port: int) -> dict[str, Any]:
    """The first node's agent cannot have its port."""
    return come_back(place, "ab", **({"peer_interface": f"lo:{port}"} if rank() == 0 else {}))


def test_former_nodes_are_found_after_a_run_of_agents_that_did_not_meet(
    place: Place, ranks: Any
) -> None:
    """They know each other from the run before. One node is too few for the scheme, which had
    protected nothing yet."""
    before = ranks(2).run(leave_in_memory, place)
    with socket.create_server(("127.0.0.1", 0)) as other:
        ranks(2).run(come_back_apart, place, other.getsockname()[1])
    for left in "ab":
        (told,) = ranks(1).run(come_back, place, left)
        assert told["restored"] == (STEPS, {"memory": 1, "agent": 1})
        assert told["replicated"] == before[0]


def test_parity_of_former_nodes_rebuilds_lost_shards(
    place: Place, agents: Agents, ranks: Any, tmp_path: Path
) -> None:
    """c has the copy of b's shard. b is lost, and a spare takes its place."""
    ranks(3).run(leave_behind, place)
    agents.kill("b")
    shutil.rmtree(tmp_path / "b")
    forget_memory(place)
    agents.start(SPARE)
    for told in ranks(2).run(come_back, place, "ad"):
        assert told["restored"] == (EARLIER, {"local": 1, "peer": 1, "agent": 1})


def test_runs_that_end_before_their_first_version_pass_former_nodes_on(
    place: Place, agents: Agents, ranks: Any
) -> None:
    """The second run has a node that the first had not, and learns of the others from it."""
    before = ranks(3).run(leave_behind, place)
    agents.start(SPARE)
    for nodes in ("ab", "ad", "da"):
        told = ranks(2).run(come_back, place, nodes)
        assert told[0]["restored"][0] == STEPS, nodes
        assert told[0]["restored"][1]["agent"] >= 1
        assert [each["replicated"] for each in told] == [before[0]] * 2


def test_no_such_run_hides_the_nodes_that_another_run_met(place: Place, ranks: Any) -> None:
    """They have one generation, as they left no data; b's list of c is older than c's from a."""
    before = ranks(3).run(leave_behind, place)
    for nodes in ("ab", "ac", "ba"):
        told = ranks(2).run(come_back, place, nodes)
        assert told[0]["restored"] == (STEPS, {"memory": 2, "agent": 1}), nodes
        assert [each["replicated"] for each in told] == [before[0]] * 2


def test_damage_on_a_former_node_is_no_reason_for_a_fresh_start(
    place: Place, ranks: Any, tmp_path: Path
) -> None:
    """Only v3's files are left, and c's manifest of it is changed."""
    ranks(3).run(leave_behind, place)
    forget_memory(place)
    for parity in tmp_path.glob("*/ckpts/*p0000*"):
        parity.unlink()
    (manifest,) = tmp_path.glob("c/ckpts/*.manifest")
    manifest.write_bytes(b"?")
    with pytest.raises(AssertionError, match=r"v3 was one.*agent of node c.*damaged"):
        ranks(2).run(come_back, place, "ab")


@however_long_they_take()
def come_back_while_one_dies(place: Place, pid: int) -> dict[str, Any]:
    """All on b. An agent dies between its answer and the first byte of its shard."""
    job = make_job(seed=2)
    attached = attach(job, place, **settings("b", memory_every_steps=0))
    lives = attached.ckpt._levels.history
    look, open_shard = lives.look, RemoteNode.open_shard
    asked: list[str] = []

    def look_and_kill(*group: Any) -> None:
        look(*group)
        os.kill(pid, signal.SIGKILL)

    def ask(node: RemoteNode, *what: Any) -> Any:
        asked.append(node.name)
        return open_shard(node, *what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lives, "look", look_and_kill)
        patch.setattr(RemoteNode, "open_shard", ask)
        told = restored_into(job, attached)
    told["asked"] = asked
    told["lost"] = [event.message for event in attached.said("going back to")]
    fail(attached)
    return told


def test_a_former_node_that_dies_during_the_restore_costs_only_its_own_copies(
    place: Place, agents: Agents, ranks: Any
) -> None:
    """v7 needs c; of v3 its shard is copied on a."""
    ranks(3).run(leave_behind, place)
    asked = []
    for told in ranks(3).run(come_back_while_one_dies, place, agents.running["c"].pid):
        assert told["restored"] == (EARLIER, {"local": 1, "peer": 1, "agent": 1})
        (why,) = told["rejected"]
        assert why.startswith("agent of node c"), "said once, of all that it had"
        (lost,) = told["lost"]
        assert f"2 of 3 shards of v{STEPS}, shard 2 missing" in lost
        asked += [name for name in told["asked"] if "node c" in name]
    assert len(asked) == 2, "one rank may be cut off from it alone, and is not waited for by all"
