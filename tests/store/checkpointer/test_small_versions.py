"""A small version is copied and sealed at its boundary, and is the same as one copied by layer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.late_copies import copy_by_layer, without_the_engine
from tests.support.tiny_course import STEPS
from tierckpt.format import Manifest
from tierckpt.snapshot import Job, SmallVersions, at_boundary
from tierckpt.storage import NoSlotError, Slot, SlotPool
from tierckpt.testing import TinyJob

pytestmark = pytest.mark.usefixtures("inline_agent")


@pytest.fixture
def settings(shm_dir: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir), "memory_every_steps": 1, "local_every_steps": 0}


def sealed(job: TinyJob) -> dict[int, Manifest]:
    """The versions in slots, by number."""
    slots = [slot for slot in job.checkpointer._pool.slots if slot is not None]
    found = [manifest for slot in slots if (manifest := slot.manifest()) is not None]
    return {manifest.id.version: manifest for manifest in found}


def images(path: Path, settings: dict[str, Any]) -> dict[int, tuple[bytes, bytes]]:
    """Of each version of a course: its digests, and the image."""
    found: dict[int, tuple[bytes, bytes]] = {}

    def look(job: TinyJob) -> None:
        if (snapshot := job.checkpointer._active.snapshot) is not None:
            snapshot.barrier()
        newest, pool = job.iteration, job.checkpointer._pool
        manifest = sealed(job)[newest]
        slot = next(s for s in pool.slots if s is not None and s.manifest() == manifest)
        image = bytes(slot.image()[: manifest.image_bytes])
        found[newest] = manifest.digests, image

    with TinyJob(path, on_step=look, **settings) as job:
        job.run(STEPS)
    return found


@pytest.mark.parametrize("other", [copy_by_layer, without_the_engine])
def test_its_bytes_are_those_of_other_ways(
    other: Any, path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = images(path / "one", settings)
    with monkeypatch.context() as patch:
        other(patch)
        assert images(path / "two", settings) == at_once


def test_it_is_complete_before_the_next_step(
    path: Path, settings: dict[str, Any], course: dict[int, str]
) -> None:
    with TinyJob(path, **settings) as job:
        job.run(1)
        for version in range(2, STEPS + 1):
            job.run(version)
            assert job.checkpointer._active.snapshot is None
            assert version in sealed(job)
            assert len(sealed(job)) == min(version, at_boundary.SLOTS)
        job.checkpointer.abandon()
    with TinyJob(path, seed=1, **settings) as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == course[STEPS]


def test_a_metric_is_in_it(path: Path, settings: dict[str, Any]) -> None:
    with TinyJob(path, **settings) as job:
        job.run(1)
        job.train_one()
        job.checkpointer.step(metric=0.25)
        assert sealed(job)[2].facts.metric == 0.25


def test_where_ranks_may_be_apart_it_is_copied_by_layer(
    path: Path, settings: dict[str, Any]
) -> None:
    """A rank that skips a step makes its version of that number an iteration later. It must not be
    complete there before it is void on the others."""
    with TinyJob(path, **settings) as job:
        by_layer = []
        for version in range(1, 8):
            if version == 4:
                job.checkpointer.step()  # without a step of the optimizer
            job.run(version)
            by_layer.append(job.checkpointer._active.snapshot is not None)
        assert by_layer == [True, False, False, True, True, False, False]
        assert job.heard("failed") == []


def test_a_larger_state_and_one_of_many_tensors_are_copied_by_layer(
    path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with TinyJob(path, **settings) as job:
        job.run(2)
        plan = job.checkpointer._active.capture.plan
        assert plan is not None
        monkeypatch.setattr(at_boundary, "MOST_BYTES", plan.layout.nbytes - 1)
        job.run(3)
        assert job.checkpointer._active.snapshot is not None
        monkeypatch.setattr(at_boundary, "MOST_BYTES", plan.layout.nbytes)
        monkeypatch.setattr(at_boundary, "MOST_TENSORS", len(plan.sources) - 1)
        job.run(4)
        assert job.checkpointer._active.snapshot is not None
        monkeypatch.setattr(at_boundary, "MOST_TENSORS", len(plan.sources))
        job.run(5)
        assert job.checkpointer._active.snapshot is None
        assert job.heard("failed") == []


@pytest.mark.parametrize("given", [{"release": "backward"}, {"release": "forward"}, {"slots": 2}])
def test_a_setting_decides(given: Any, path: Path, settings: dict[str, Any]) -> None:
    with TinyJob(path, **given, **settings) as job:
        job.run(3)
        assert job.checkpointer._active.snapshot is not None


def test_without_a_slot_it_is_copied_by_layer(
    path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with TinyJob(path, **settings) as job:
        job.run(4)
        copy = SmallVersions.copy

        def with_none(self: SmallVersions, *given: Any) -> Any:
            def choose(*_: Any) -> Slot:
                raise NoSlotError("none")

            return copy(self, *given[:-1], choose)

        with monkeypatch.context() as patch:
            patch.setattr(SmallVersions, "copy", with_none)
            job.run(6)
            assert job.checkpointer._active.snapshot is not None
        job.run(STEPS)
        job.settle()
        assert [e.version for e in job.heard("sealed")] == [*range(1, STEPS)]
        assert job.heard("failed") == []


@pytest.mark.parametrize(("owner", "name"), [(Job, "fill_at_once"), (Slot, "seal")])
@pytest.mark.parametrize("error", [OSError("no memory"), KeyboardInterrupt()])
def test_after_a_failure_no_slot_is_lost(
    error: BaseException,
    owner: Any,
    name: str,
    path: Path,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise error

    with TinyJob(path, **settings) as job:
        job.run(4)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            with contextlib.suppress(KeyboardInterrupt):
                job.run(5)
        assert sealed(job).keys() == {3, 4}, "others stay"
        job.iteration = 5
        job.run(STEPS)
        job.checkpointer.complete()
        assert not job.checkpointer._pool.filling
        assert len(sealed(job)) >= at_boundary.SLOTS
        assert {e.version for e in job.heard("failed", "memory")} == {5}


def test_an_interrupt_before_it_is_told_loses_no_slot(
    path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with TinyJob(path, **settings) as job:
        job.run(4)
        handoff = job.checkpointer._levels.slot_handoff
        with monkeypatch.context() as patch:
            patch.setattr(handoff, "done", interrupted)
            with pytest.raises(KeyboardInterrupt):
                job.run(5)
        assert job.checkpointer._pool.filling
        job.iteration = 5
        job.run(STEPS)
        job.checkpointer.complete()
        assert not job.checkpointer._pool.filling
        assert {e.version for e in job.heard("failed", "memory")} == {5}


def test_the_third_slot_comes_with_the_first_small_version(
    path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        copy_by_layer(patch)
        with TinyJob(path / "one", **settings) as job:
            job.run(4)
            assert job.checkpointer._pool.count == 2
    with TinyJob(path / "two", **settings) as job:
        job.run(2)
        assert job.checkpointer._pool.count == at_boundary.SLOTS


def test_without_memory_for_a_third_slot_it_is_copied_by_layer(
    path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotPool, "_is_memory_for", lambda self, nbytes: False)
    with TinyJob(path, **settings) as job:
        job.run(4)
        assert job.checkpointer._active.snapshot is not None
        assert job.checkpointer._pool.count == 2
        assert job.heard("failed") == []


def test_a_restart_goes_on_with_its_three_slots(path: Path, settings: dict[str, Any]) -> None:
    with TinyJob(path, **settings) as job:
        job.run(4)
        job.checkpointer.abandon()
    with TinyJob(path, **settings) as job:
        assert job.restore() == 4
        job.run(6)
        for version in (7, 8, 9):
            job.run(version)
            assert job.checkpointer._active.snapshot is None
        assert len(sealed(job)) == at_boundary.SLOTS
        assert len(job.checkpointer._pool.slots) == at_boundary.SLOTS


def test_a_slot_that_another_program_removes_is_missed(
    path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierckpt.storage.slot_pool.SEEN_SECONDS", 0.0)
    with TinyJob(path, **settings) as job:
        job.run(4)
        pool: SlotPool = job.checkpointer._pool
        slot = next(each for each in pool.slots if each is not None)
        assert slot.path is not None
        slot.path.unlink()
        job.run(8)
        (notice,) = [e for e in job.heard("notice") if "was removed" in e.message]
        assert str(slot.path) in notice.message
        assert all(each is not None and not each.is_removed for each in pool.slots)


def test_it_waits_for_no_optimizer(path: Path, settings: dict[str, Any]) -> None:
    """Weights may be changed right after the boundary."""
    with TinyJob(path, **settings) as job:
        job.run(2)
        wanted = job.fingerprint()
        with torch.no_grad():
            for param in job.model.parameters():
                param.mul_(2.0)
        job.checkpointer.abandon()
    with TinyJob(path, seed=1, **settings) as job:
        assert job.restore() == 2
        assert job.fingerprint() == wanted
