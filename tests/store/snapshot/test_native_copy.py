"""The copy engine in a training process: it writes the same shards as torch, and a kill or an
interrupt in the middle of a call leaves only exact versions."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.store.checkpointer.test_interrupts import Interrupt
from tests.support import limits
from tests.support.late_copies import without_the_engine
from tests.support.thorough import points
from tests.support.tiny_course import STEPS, versions_on_disk
from tierckpt.coordination import Agreement
from tierckpt.snapshot import (
    NativeEngine,
    Snapshot,
    TorchEngine,
    describe_engine,
    find_engine,
)
from tierckpt.testing import TinyJob, run_in_child, train

pytestmark = pytest.mark.usefixtures("inline_agent")

Hash = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
STRIDE = int(points(["1", "11"], "11")[0])


@pytest.fixture(autouse=True)
def _engine() -> None:
    if find_engine() is None:
        pytest.skip(describe_engine())


def kinds_of_copies(job: TinyJob, monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Classes of the engines of the snapshots that are sealed from now on."""
    seen: list[type] = []
    seal = Snapshot._seal

    def noted(self: Snapshot) -> None:
        seen.append(type(self.engine))
        seal(self)

    monkeypatch.setattr(Snapshot, "_seal", noted)
    return seen


def test_both_ways_write_the_same_bytes(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = []
    for with_torch in (False, True):
        folder = path / str(with_torch)
        with monkeypatch.context() as patch, TinyJob(folder, **settings) as job:
            if with_torch:
                without_the_engine(patch)
            seen = kinds_of_copies(job, patch)
            job.run(STEPS)
            job.checkpointer.wait()
        assert set(seen) == {TorchEngine if with_torch else NativeEngine}
        (shard,) = folder.rglob(f"*{STEPS}*.safetensors")
        shards.append(shard.read_bytes())
    assert shards[0] == shards[1]


def test_a_state_with_gaps_is_copied_by_torch(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TinyJob(path, **settings) as job:
        seen = kinds_of_copies(job, monkeypatch)
        job.run(2)
        job.checkpointer.wait()
        weight = next(job.model.parameters())
        gaps = torch.empty(weight.shape[0], 2 * weight.shape[1])[:, ::2]
        weight.data = gaps.copy_(weight.data)
        job.run(4)
        job.checkpointer.wait()
        found = job.fingerprint()
    assert (seen[0], seen[-1]) == (NativeEngine, TorchEngine)
    with TinyJob(path, seed=99, **settings) as job:
        job.restore()
        assert job.fingerprint() == found


# --- killed --------------------------------------------------------------------------------------


def train_and_die(path: str, settings: dict[str, Any], call: int) -> None:
    """Die in the given call of the hash function, in the middle of a block."""
    engine = find_engine()
    assert engine is not None
    hashed = Hash(engine.hash_address or 0)
    calls = 0

    def deadly(address: int, nbytes: int) -> int:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return int(hashed(address, nbytes))

    kept = Hash(deadly)
    engine.hash_address = ctypes.cast(kept, ctypes.c_void_p).value
    train(path, STEPS, settings)


@pytest.mark.parametrize("release", ["auto", "backward"], ids=["at the boundary", "by layer"])
@pytest.mark.parametrize("call", [2, 8])
def test_killed_in_a_native_copy_it_resumes_bit_for_bit(
    call: int, release: str, path: Path, settings: Any, course: dict[int, str]
) -> None:
    settings |= {"local_every_steps": 0, "local_every_seconds": 0.0, "release": release}
    assert run_in_child(train_and_die, str(path), settings, call) == -signal.SIGKILL
    with TinyJob(path, seed=99, **settings) as job:
        restored = job.restore()
        assert 0 <= restored < STEPS
        assert restored.rejected == ()
        if restored == 0:
            assert call <= 2
            return
        assert job.fingerprint() == course[int(restored)]
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]


def test_a_slot_stays_mapped_and_is_not_given_back_while_the_engine_writes(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, inside, resume = find_engine(), threading.Event(), threading.Event()
    assert engine is not None

    def hold(_address: int, _nbytes: int) -> int:
        inside.set()
        resume.wait(60.0)
        return 0

    kept = Hash(hold)
    with TinyJob(path, **settings) as job:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "hash_address", ctypes.cast(kept, ctypes.c_void_p).value)
            job.run(1)
            taken = job.checkpointer._active.snapshot
            assert taken is not None
            assert inside.wait(60.0)
            taken.fail(RuntimeError("given up"))
            assert not taken.wait_done(0.0)
            assert taken.slot is not None
            with pytest.raises(BufferError):
                taken.slot._map.close()
            resume.set()
            assert taken.wait_done(60.0)
        job.run(STEPS)
    assert {event.version for event in job.heard("failed")} == {1}
    assert versions_on_disk(path)[-1] == STEPS


def be_killed_without_a_barrier(path: str, settings: dict[str, Any]) -> None:
    with TinyJob(path, **settings) as job:
        job.run(4)
        taken = job.checkpointer._active.snapshot
        assert taken is not None
        assert taken.engine.posted
        assert taken.wait_done(60.0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_posted_version_is_sealed_though_no_barrier_comes(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    settings |= {"local_every_steps": 0, "local_every_seconds": 0.0, "release": "forward"}
    assert run_in_child(be_killed_without_a_barrier, str(path), settings) == -signal.SIGKILL
    with TinyJob(path, seed=99, **settings) as job:
        assert job.restore() == 4
        assert job.fingerprint() == course[4]


def test_a_step_as_short_as_that_leaves_the_interpreter_to_the_training(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copier executes no Python, and the training thread seals, in the barrier."""
    settings |= {"local_every_steps": 0, "local_every_seconds": 0.0}
    sealed_by: list[str] = []
    seal = Snapshot._seal

    def noted(self: Snapshot) -> None:
        sealed_by.append(threading.current_thread().name)
        seal(self)

    monkeypatch.setattr(Snapshot, "_seal", noted)
    limits.COPIER_LINGERS.set(monkeypatch, 1e6)
    limits.COPIER_QUIET.set(monkeypatch, 1e6)
    with TinyJob(path, **settings) as job:
        job.run(4)  # slots are made by the copier
        job.train_one()
        del sealed_by[:]
        copier, submitted = job.checkpointer._active._copier, list[object]()
        with monkeypatch.context() as patch:
            patch.setattr(copier, "submit", submitted.append)
            for _ in range(4):
                job.checkpointer.step()
                job.train_one()
    assert submitted == []
    assert sealed_by[:4] == [threading.main_thread().name] * 4


def without_last_word(patch: pytest.MonkeyPatch, has: Callable[[], bool]) -> None:
    """The votes come when `has` says so."""
    word = Agreement.last_word_now
    patch.setattr(Agreement, "last_word_now", lambda *given: word(*given) if has() else None)


# --- interrupted ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("early", "with_torch"), [(False, True), (True, False)], ids=["torch", "engine, early"]
)
def test_an_interrupt_in_an_iteration_leaves_only_exact_versions(
    early: bool, with_torch: bool, path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes, no optimizer changes a block that counts as copied."""
    if with_torch:
        without_the_engine(monkeypatch)
    states: dict[int, str] = {}
    settings |= {"agent": "inline", "local_every_steps": 1, "local_keep": 1000}
    with TinyJob(path, when_busy="wait", **settings) as job:
        job.checkpointer._active.release_early = early
        number, came = 0, True
        while came:
            interrupt = Interrupt(number)
            with interrupt.awaited():
                job.train_one()
            came, number = bool(interrupt.came), number + STRIDE
            if came:
                job.train_one()
            for _ in range(2):
                at_boundary(job, states)
                job.train_one()
        at_boundary(job, states)
    assert number > 3 * STRIDE
    stored = versions_on_disk(path)
    assert len(stored) >= len(states) // 2
    with TinyJob(path, seed=99, **settings) as job:
        for version in stored:
            assert job.restore(version=version).version == version
            assert job.fingerprint() == states[version], version


def at_boundary(job: TinyJob, states: dict[int, str]) -> None:
    found = job.fingerprint()
    job.checkpointer.step()
    states[job.checkpointer.version] = found
