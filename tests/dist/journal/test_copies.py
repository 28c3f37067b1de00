"""Copies of journals on other nodes, which take part in a restart, and never stop a training."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.parts import journal_of
from tests.support.training import Attached, Place, attach, make_job, rank, train
from tierckpt.journal import FOLDER, names_in
from tierckpt.journal import copies as small_state_link
from tierckpt.net import HELLO_SECONDS

EARLIER, STEPS = 5, 9
PATIENCE_SECONDS = 60.0


def of_two_nodes(place: Place, swapped: bool = False) -> tuple[Any, Attached]:
    """A job of two nodes, with the ranks 0 and 1 on the first one, or `swapped` the others."""
    node = rank() // 2 if not swapped else 1 - rank() // 2
    settings: dict[str, Any] = {"node": f"node{node}"}
    settings |= {"peer_redundancy": "xor", "peer_interface": "lo"}
    settings |= {"memory_every_steps": 0, "local_journal_steps": 100, "when_busy": "wait"}
    job = make_job()
    return job, attach(job, place, **settings)


def protect(attached: Attached) -> None:
    """Save, and wait for the agents."""
    attached.ckpt.save(now=True)
    deadline = time.monotonic() + PATIENCE_SECONDS
    found: list[Any] = [False]
    while not all(found):
        assert time.monotonic() < deadline, [e.text() for e in attached.events]
        time.sleep(0.01)
        attached.ckpt._levels.collect()
        found = [None] * dist.get_world_size()
        first = rank() % 2 == 0  # of its node
        here = not first or EARLIER in attached.versions("committed", "peer")
        dist.all_gather_object(found, here)


def leave_behind(place: Place, slow: bool) -> tuple[dict[int, str], list[str]]:
    """Train, and end as in a crash; returns digests by step, and warnings. With `slow` the peer
    level never protects later versions, which are complete on local."""
    job, attached = of_two_nodes(place)
    course = train(job, attached.ckpt, range(EARLIER))
    protect(attached)
    for iteration in range(EARLIER, STEPS):
        if slow:
            attached.ckpt._levels.peers.protect = lambda _: True  # type: ignore[method-assign]
            attached.ckpt.save(now=True)
        course |= train(job, attached.ckpt, [iteration])
    assert attached.ckpt.wait()
    dist.barrier()
    attached.ckpt.abandon()
    return course, warnings(attached)


def come_back(place: Place, swapped: bool) -> tuple[int, int, str, list[Any]]:
    job, attached = of_two_nodes(place, swapped)
    restored = attached.ckpt.restore()
    found = restored.version, restored.replayed, job.digest(), attached.said("going back to")
    train(job, attached.ckpt, range(STEPS, STEPS + 2))
    assert attached.ckpt.wait()
    journal: Any = journal_of(attached.ckpt)
    copies = [n for n in names_in(journal.folder) if n.keeper == rank() and n.writer > 1]
    assert copies, "of the new run, too"
    attached.ckpt.close()
    return found


def warnings(attached: Attached) -> list[str]:
    return [e.message for e in attached.events if e.name == "notice" and e.severity >= 30]


def lose(place: Place, tmp_path: Path, node: int) -> None:
    """Remove the node's disk, and the memory of all."""
    shutil.rmtree(tmp_path / f"node{node}")
    shutil.rmtree(place.shm)
    Path(place.shm).mkdir()


@pytest.mark.parametrize(("swapped", "slow"), [(True, False), (False, True)])
def test_a_lost_node_costs_no_step(
    swapped: bool, slow: bool, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Also if the ranks are on other nodes afterwards, so that all files are other ranks', or if
    the version that can be rebuilt is not one of the newest."""
    place = Place(str(tmp_path / "{node}" / "ckpts"), str(shm_dir))
    before = ranks(4).run(leave_behind, place, slow)
    assert [said for _, said in before] == [[]] * 4
    lose(place, tmp_path, 1)
    after = ranks(4).run(come_back, place, swapped)
    for (course, _), found in zip(before, after, strict=True):
        assert found == (STEPS, STEPS - EARLIER, course[STEPS], [])
    left = [names_in(tmp_path / f"node{node}" / "ckpts" / FOLDER) for node in range(2)]
    assert left == [[], []]


def silent(place: Place) -> tuple[list[str], int, bool]:
    """Rank 0 sends no small state after the first steps. Returns warnings, the number of files with
    a copy, and whether the own journal leads to the last step."""
    job, attached = of_two_nodes(place)
    train(job, attached.ckpt, range(EARLIER))
    assert attached.ckpt.wait()
    journal: Any = journal_of(attached.ckpt)
    if rank() == 0:
        journal._copies._sender.send = lambda *_: None
    with pytest.MonkeyPatch.context() as patch:
        if journal._copies._ward == 0:
            patch.setattr(small_state_link, "PATIENCE_SECONDS", 0.3)
        train(job, attached.ckpt, range(EARLIER, STEPS - 1))
        if journal._copies._ward == 0:  # too many records wait: no second warning
            patch.setattr(journal._copies._writer, "keeps_up", lambda _: False)
        train(job, attached.ckpt, range(STEPS - 1, STEPS))
        assert attached.ckpt.wait()
    dist.barrier()
    copies = [n for n in names_in(journal.folder) if n.keeper == rank()]
    attached.ckpt._reports.say()
    attached.ckpt.abandon()
    return warnings(attached), len(copies), journal._writer.failed is None


def test_a_silent_rank_ends_its_copy_and_nothing_else(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place(str(tmp_path / "{node}" / "ckpts"), str(shm_dir))
    found = ranks(4).run(silent, place)
    said = [text for texts, _, _ in found for text in texts]
    assert len(said) == 1
    assert "the copy of rank 0's journal ends at v5: rank 0 sent nothing for 0.3 s" in said[0]
    assert [copies for _, copies, _ in found] == [1, 1, 1, 1]
    assert all(whole for _, _, whole in found)


def visited(place: Place) -> tuple[list[str], bool]:
    """Other programs are at the ports before the wards: they say nothing, start a message, or send
    anything. Returns warnings, and whether all records were copied in time."""
    job, attached = of_two_nodes(place)
    journal: Any = journal_of(attached.ckpt)
    train(job, attached.ckpt, range(1))
    with contextlib.ExitStack() as stack:
        if rank() == 0:
            for address in attached.ckpt._levels.peers.addresses:
                assert address is not None
                for said in (b"", (200).to_bytes(4, "big"), bytes(range(256))) * 2:
                    where = address.host, address.port
                    caller = stack.enter_context(socket.create_connection(where))
                    caller.sendall(said)
        dist.barrier()
        train(job, attached.ckpt, range(1, 3))
        done = journal.drain(HELLO_SECONDS)
        dist.barrier()
    attached.ckpt._reports.say()
    attached.ckpt.abandon()
    return warnings(attached), done and journal._copies._last.version == 3


def test_other_programs_do_not_keep_the_ward_waiting(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place(str(tmp_path / "{node}" / "ckpts"), str(shm_dir))
    assert ranks(4).run(visited, place) == [([], True)] * 4
