"""Failures of elastic states and restarts: a torn state, and the report of a loss."""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tierckpt
from tests.support import exact
from tests.support.elastic_script import BATCHES, Script, failure, lose
from tests.support.rank_pool import RankPool
from tests.support.training import Place, horovod, rank
from tierckpt.coordination import ErrorBarrier
from tierckpt.restore import VerifiedVersion, session, verification

SCRIBBLED = 12345.0
PATIENCE_SECONDS = 60.0


Instead = tuple[Any, str, Callable[..., Any]]


def lost_in(call: Callable[[], Any], instead: Instead) -> None:
    """Run `call`, in which another rank is lost: the function named `instead` is replaced and
    raises."""
    with mock.patch.object(*instead), pytest.raises(failure()):
        call()


def half_loaded(attempt: Any, load_window: Any, wants: Any) -> None:
    for name, tensor in load_window.__self__._live.items():
        if name.startswith("model/"):
            tensor.fill_(SCRIBBLED)
    raise failure()


def about_to_load(together: ErrorBarrier, *how: Any) -> None:
    """All ranks have agreed that they can load."""
    END(together, *how)
    if sys._getframe(1).f_code is session.load.__code__:
        raise failure()


class LostGroup:
    """A group with a failing next collective."""

    def all_gather_object(self, value: Any) -> list[Any]:
        raise failure()


def all_loaded(_: Any, together: ErrorBarrier) -> None:
    together._group = LostGroup()
    together.all_gather_object(None)


END = ErrorBarrier.__exit__
TORN: Instead = (VerifiedVersion, "visit", half_loaded)
BEFORE: Instead = (ErrorBarrier, "__exit__", about_to_load)
BEHIND: Instead = (verification, "all_finished", all_loaded)
SOUND = {"as it was": BEFORE, "loaded": BEHIND}


def lost_behind_a_step(place: Place, seed: int) -> tuple[Script, dict[int, Any]]:
    """Two batches are committed; a rank is lost after the step of the third."""
    script = Script(place, seed).start()
    digests = script.train_to(2)
    script.update(script.forward())
    script.state.batch = 3
    script.fail()
    return script, digests


def protected(script: Script) -> None:
    """Return when the other node can rebuild this node's shard of the newest version."""
    ckpt = script.state.checkpointer
    ckpt.save(now=True)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any((e.name, e.level) == ("committed", "peer") for e in script.told):
        assert time.monotonic() < deadline, [e.text() for e in script.told]
        time.sleep(0.01)
        ckpt._levels.collect()


def a_node_is_lost(place: Place) -> None:
    """Remove the node's disk and memory, and the other's memory; a new process takes its place."""
    nodes = {"node": f"node{rank()}", "peer_redundancy": "partner", "peer_interface": "lo"}
    often = {"local_every_steps": 100, "slots": 3, "when_busy": "wait", "agent": "process"}
    script = Script(place, seed=1, **nodes, **often).start()
    digests = script.train_to(3)
    protected(script)
    script.fail()
    lose(place.shm, place.path.format(node="node1"))
    if rank() == 1:
        script = Script(place, seed=2, **nodes, **often)
    script.start()
    assert script.state.restored.levels == {"local": 1, "peer": 1}
    assert script.digests() == digests[3]
    script.train_to(BATCHES)
    script.end()


def torn_everywhere(place: Place) -> None:
    script, digests = lost_behind_a_step(place, seed=1)
    for _ in range(2):  # the levels have it, so no step is lost
        lost_in(script.state.sync, TORN)
        script.fail()
    script.state.sync()
    assert script.digests() == digests[2]

    script.state.batch = 99
    lost_in(script.state.restore, TORN if rank() else BEFORE)  # a restore() by the script
    script.fail()
    lose(place.shm, place.path)
    for _ in range(2):
        with pytest.raises(tierckpt.RestoreError, match="no rank has a whole state"):
            script.state.sync()
        assert script.state.checkpointer is None

    # Ranks that never trained did not know of it.
    script = Script(place, seed=2).start()
    digests = script.train_to(2)
    script.fail()
    script = Script(place, seed=3)
    lost_in(script.start, TORN)
    lose(place.shm, place.path)
    with pytest.raises(tierckpt.RestoreError, match="no rank has a whole state"):
        script.start()
    assert script.state.batch == 0


def torn_on_one(place: Place, sound: str) -> tuple[str, str]:
    """The bits of rank 0, which is sound, and the bits with which all continue."""
    script, _ = lost_behind_a_step(place, seed=1)
    lost_in(script.state.sync, TORN if rank() else SOUND[sound])
    script.fail()
    lose(place.shm, place.path)
    batches = 2 if sound == "loaded" else 3
    assert script.state.batch == (3 if rank() else batches)
    before = exact.digest(script.replicated())
    script.state.sync()
    assert script.said("no level has a complete version")
    assert (script.state.batch, script.state.checkpointer.version) == (batches, batches)
    found = exact.digest(script.replicated())
    after = script.train_to(5)
    script.fail()
    script.state.sync()
    assert (script.digests(), script.state.restored.version) == (after[5], 5)
    script.end()
    return before, found


def torn_by_a_broadcast(place: Place) -> None:
    """Rank 0 has the live state, and is lost while rank 1, which is new, receives it."""
    script, _ = lost_behind_a_step(place, seed=1)
    lose(place.shm, place.path)
    if rank() == 1:
        script = Script(place, seed=2)

    def sent_half(held: Any, root: int, buffers: bool) -> None:
        horovod().broadcast_parameters(held.model.state_dict(), root_rank=root)
        raise failure()

    attributes = importlib.import_module("horovod_ckpt.elastic").Attributes
    lost_in(script.state.sync, (attributes, "broadcast", sent_half))
    if rank() == 0:
        script = Script(place, seed=3)
    with pytest.raises(tierckpt.RestoreError, match="no rank has a whole state"):
        script.state.sync()


def unseen(place: Place) -> None:
    """Only the models have the state, and the versions on the persistent level are not visible."""
    persistent = Path(place.path).parent / "persistent"
    script = Script(place, seed=1, persistent_path=str(persistent)).start()
    digests = script.train_to(3)
    script.fail()
    lose(place.shm, place.path)
    if rank() == 0:
        shutil.rmtree(persistent, ignore_errors=True)
        persistent.write_text("in its place")
    horovod().barrier()
    script.state.sync()
    assert script.digests() == digests[3]
    (told,) = [e for e in script.told if "no level has a complete version" in e.message]
    assert told.severity >= 40
    assert str(persistent) in told.message
    digests.update(script.train_to(BATCHES))
    script.fail()
    script.state.sync()
    assert script.state.restored.levels == {"memory": 2}
    assert script.digests() == digests[BATCHES]
    script.state.checkpointer.abandon()
    script.state.checkpointer = None
    lose(place.shm, place.path)

    script = Script(place, seed=1, persistent_path=str(persistent))
    with pytest.raises(tierckpt.RestoreError, match="could not be read"):
        script.start()  # without a live state this is no fresh start


def test_a_lost_node_is_made_again_by_its_peer(
    tmp_path: Path, pool: RankPool, losable: Place
) -> None:
    path = str(tmp_path / "{node}" / "ckpts")
    pool.run(a_node_is_lost, Place(path, losable.shm))


def test_a_rank_is_lost_while_all_load(pool: RankPool, losable: Place) -> None:
    """A partly loaded state is loaded again, or refused: no step is made from it."""
    pool.run(torn_everywhere, losable)


@pytest.mark.parametrize("sound", SOUND)
def test_a_sound_state_wins_over_a_torn_one(sound: str, pool: RankPool, losable: Place) -> None:
    """Rank 0 is stopped before it has changed anything, or after the last byte."""
    one, other = pool.run(torn_on_one, losable, sound)
    assert one[0] == one[1] == other[1] != other[0]


def test_a_rank_is_lost_while_it_sends(pool: RankPool, losable: Place) -> None:
    pool.run(torn_by_a_broadcast, losable)


def test_a_live_state_wins_over_versions_that_cannot_be_seen(
    pool: RankPool, losable: Place
) -> None:
    pool.run(unseen, losable)


# --- how far back it goes ------------------------------------------------------------------------


def going_back_past_a_skip(place: Place) -> tuple[int, bool]:
    script = Script(place, seed=1).start()
    script.train_to(2)
    with mock.patch.object(script.state.checkpointer._schedule, "decide", skips):
        script.train_to(3)
    script.state.restore()
    told = script.state.batch, bool(script.said("the last commit, v3, was skipped"))
    script.end()
    return told


def skips(version: int, agreed: Any) -> Any:
    return importlib.import_module("tierckpt.core.decisions").Decision()


def test_going_back_farther_than_the_last_commit_is_reported(pool: RankPool, place: Place) -> None:
    assert pool.run(going_back_past_a_skip, place) == [(2, True)] * 2


def going_back_at_a_failure(place: Place) -> list[list[tuple[int, str]]]:
    """The event and its severity if a step after the last commit is lost; if commits that no level
    has are lost; and if nothing is lost."""
    found = []
    for last_taken, last_commit, steps in ((2, 2, 1), (2, 4, 0), (4, 4, 0)):
        script = Script(place, seed=1).start()
        script.train_to(last_taken)
        with mock.patch.object(script.state.checkpointer._schedule, "decide", skips):
            script.train_to(last_commit)
        for _ in range(steps):
            script.update(script.forward())
        script.fail()
        script.state.sync()
        assert script.state.batch == last_taken
        found.append([(e.severity, e.message) for e in script.said("the job goes back to")])
        script.end()
    return found


def test_going_back_at_a_failure_is_reported(pool: RankPool, place: Place) -> None:
    """By one rank; as a warning if commits are lost."""
    told, other = pool.run(going_back_at_a_failure, place)
    ((said,), (warned,), nothing) = told
    assert said == (logging.INFO, "the job goes back to v2 from v3")
    assert warned[0] == logging.WARNING
    assert "back to v2 from v4: later commits, up to v4," in warned[1]
    assert nothing == []
    assert other == [[], [], []]
