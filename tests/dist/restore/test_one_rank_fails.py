"""One rank raises anywhere during a restore: all ranks know it, none waits, and nothing is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tierckpt
from tests.dist.peer import test_peer_level as peer
from tests.dist.storage import test_persistent_level as persistent
from tests.support.thorough import points
from tests.support.training import Attached, Job, Place, attach, make_job, rank, train
from tierckpt.checkpointer import Restart
from tierckpt.restore import verification

PACKAGE = Path(tierckpt.__file__).parent
FILES = {
    str(PACKAGE / f"{name}.py")
    for name in (
        *("checkpointer/levels", "coordination/job_history", "coordination/peers"),
        *("core/restore_plan", "erasure/kernels", "erasure/parity_manifest"),
        *("format/manifest", "format/shard_file", "peer/parity_file", "peer/windows"),
        *(
            "restore/loader",
            "restore/rebuild",
            "restore/search",
            "restore/session",
            "restore/shards",
            "restore/verification",
        ),
        *("state/process_state", "state/tree_codec", "storage/inventory"),
    )
}
assert all(map(os.path.exists, FILES)), FILES
BETWEEN_BROADCASTS = {
    *("read_together", "broadcast", "_as_buffer", "run", "_outputs", "rebuild"),
    *("visit", "show", "nbytes", "_wants", "_window", "_room", "_visit", "trouble_of_any"),
}
"""Functions where other ranks wait in a broadcast; calls inside these may fail."""
FIRST = {"VersionSearch.find", "load_found", "load"}
"""Functions that are entered between two blocks of an error barrier."""
AFTERWARDS = {"close", "forget", "drop_kept", "touch", "<lambda>"}
FAILING = 1


class Calls:
    """Counts calls of the restart path's functions in the training thread; call number `at` fails,
    as it does if memory is short."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count, self.failed = at, 0, ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename not in FILES or code.co_name.startswith("<"):
            return
        if code.co_name in BETWEEN_BROADCASTS | AFTERWARDS or code.co_qualname in FIRST:
            return
        self.count += 1
        if self.count == self.at:
            self.failed = f"{Path(code.co_filename).stem}.{code.co_qualname}"
            raise MemoryError(f"in {self.failed}")

    @contextmanager
    def on_the_way_back(self) -> Iterator[None]:
        """From the inventory to the last report."""
        plain = Restart.restore

        def counted(*args: Any) -> Any:
            sys.setprofile(self)
            try:
                return plain(*args)
            finally:
                sys.setprofile(None)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Restart, "restore", counted)
            yield


def fail_everywhere(place: Place, more: dict[str, Any], part: tuple[int, int]) -> dict[str, Any]:
    """Restore as often as one call of it can fail on one rank, and once with no fault each time."""
    job = make_job(seed=2)
    node = {"node": f"node{rank()}"} if "node" in more else {}
    attached = attach(job, place, memory_every_steps=0, **more | node)
    group = attached.ckpt.group
    attached.ckpt.restore()  # some calls are made once in a process
    most = group.all_gather_object(calls_of_one(attached))[FAILING]
    told = []
    first, step = part
    for at in range(1 + first, most, step):
        told.append((at, *fail_at(job, attached, at if rank() == FAILING else None)))
    restored = attached.ckpt.restore()
    attached.ckpt.abandon()
    return {"version": restored.version, "digest": job.digest(), "told": told, "calls": most}


def calls_of_one(attached: Attached) -> int:
    calls = Calls()
    with calls.on_the_way_back():
        attached.ckpt.restore()
    return calls.count


def fail_at(job: Job, attached: Attached, at: int | None) -> tuple[str, str, str]:
    """The failed call and its result, on this rank."""
    calls = Calls(at)
    try:
        with calls.on_the_way_back():
            version = attached.ckpt.restore().version
    except tierckpt.TierckptError as error:
        return calls.failed, type(error).__name__, str(error)
    return calls.failed, f"v{version}", job.digest()


def judge(told: list[dict[str, Any]], version: int, digests: list[str]) -> None:
    assert [each["version"] for each in told] == [version] * len(told)
    assert [each["digest"] for each in told] == digests
    assert told[0]["calls"] > 100
    for one in zip(*(each["told"] for each in told), strict=True):
        at, where = one[FAILING][:2]
        said = (at, where, one)
        assert where, said
        assert len({outcome for *_, outcome, _ in one}) == 1, said
        *_, outcome, text = one[0]
        if outcome.startswith("v"):
            assert outcome == f"v{version}", said
            assert [digest for *_, digest in one] == digests, said
        else:
            assert outcome in ("RestoreError", "StateTornError"), said
            assert f"rank {FAILING}" in text, said
            assert where in text or "MemoryError" in text, said
            assert all(text == theirs for *_, theirs in one), said


PARTS = [f"{part} of 20" for part in range(20)]


@pytest.mark.parametrize("part", points(PARTS, "3 of 20"))
@pytest.mark.parametrize("level", ["local", "persistent"])
def test_nobody_waits_for_a_rank_that_fails(
    level: str, part: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    before = ranks(2).run(persistent.train_and_close, place, shared, {})
    if level == "persistent":
        persistent.lose_the_nodes(place)
    more = persistent.settings(shared)
    told = ranks(2).run(fail_everywhere, place, more, (PARTS.index(part), len(PARTS)))
    judge(told, persistent.STEPS, [each["course"][persistent.STEPS] for each in before])


@pytest.mark.parametrize("part", points(PARTS, "7 of 20"))
def test_nobody_waits_where_shards_are_rebuilt(
    part: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = peer.place_of(tmp_path, shm_dir)
    before = ranks(3).run(peer.leave_behind, place, "xor")
    peer.lose(place, tmp_path, 1)
    more = peer.settings("xor", 0)
    told = ranks(3).run(fail_everywhere, place, more, (PARTS.index(part), len(PARTS)))
    judge(told, peer.STEPS, [each["course"][peer.STEPS] for each in before])


def fail_between_reading_and_verifying(place: Place) -> tuple[str, int]:
    """The images of slots are open then, and nothing closes a slot but its owner."""
    job = make_job()
    attached = attach(job, place, memory_every_steps=1)
    train(job, attached.ckpt, range(3))
    attached.ckpt.complete()

    def short_of_memory(*_: Any) -> None:
        raise MemoryError("to begin with")

    with pytest.MonkeyPatch.context() as patch:
        if rank() == FAILING:
            patch.setattr(verification, "verify", short_of_memory)
        with pytest.raises(tierckpt.RestoreError) as error:
            attached.ckpt.restore()
    restored = attached.ckpt.restore()
    attached.ckpt.abandon()
    return str(error.value), restored.version


def test_slots_are_closed_if_a_rank_cannot_start_to_verify(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    told = ranks(2).run(fail_between_reading_and_verifying, Place.under(tmp_path, shm_dir))
    ((text, version),) = set(told)
    assert f"rank {FAILING}: MemoryError: to begin with" in text
    assert version == 3
