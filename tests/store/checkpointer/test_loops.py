"""Loops of one process, and their use of the model: the points where copies and boundaries
start."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.support import limits
from tests.support.tiny_course import fingerprints
from tierckpt.snapshot import Desk, Snapshot, describe_engine, find_engine
from tierckpt.testing import TinyJob


def test_the_first_released_block_wakes_the_copier_and_the_boundary_does_not(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the boundary the copier would take the interpreter from the forward pass, without any work
    yet."""
    limits.COPIER_QUIET.set(monkeypatch, 1e6)
    # Not "auto": on a busy machine that would copy early.
    with TinyJob(path, local_every_steps=0, release="backward", **settings) as job:
        checkpointer, woken = job.checkpointer, list[int]()
        checkpointer._active.release_early = False  # as where an adapter releases by layer
        submit, post = checkpointer._active._copier.submit, Desk.post

        def watched(snapshot: Snapshot) -> None:
            woken.append(snapshot.facts.id.version)
            submit(snapshot)

        def posted(self: Desk, *args: Any) -> bool:
            woken.append(checkpointer.version)
            return post(self, *args)

        monkeypatch.setattr(checkpointer._active._copier, "submit", watched)
        monkeypatch.setattr(Desk, "post", posted)
        job.run(2)
        assert woken == [1, 2]  # at once, because slots are made first, which takes longer
        job.run(3)
        assert woken == [1, 2]
        for parameter in job.model.parameters():
            checkpointer.adapter.handle.release([parameter])
            assert woken == [1, 2, 3]
        job.run(5)  # only the barrier releases blocks
        assert woken == [1, 2, 3, 4]
        assert [e.version for e in job.heard("sealed")] == [1, 2, 3, 4]


def test_a_hooked_model_can_be_copied_and_saved(tmp_path: Path, shm_dir: Path) -> None:
    """An EMA copy of the model must not copy the checkpointer, or call it."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tierckpt.Checkpointer(
        model, optimizer, path=tmp_path / "c", shm_dir=shm_dir, boundary="forward"
    ) as ckpt:
        ckpt.restore()
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "whole.pt")
        loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
        for each in (twin, loaded):
            assert torch.equal(each(torch.ones(3)), model(torch.ones(3)))
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        twin(torch.ones(3))
        assert ckpt.version == 0  # the copy's forward pass is no boundary
        model(torch.ones(3))
        assert ckpt.version == 1


@pytest.mark.parametrize("keyword", [False, True])
def test_a_loop_with_its_forward_in_the_optimizers_closure(
    keyword: bool, path: Path, settings: Any
) -> None:
    """Without a forward pass between two steps, the boundary is at the start of the next step."""
    with TinyJob(path, boundary="forward", **settings) as job:
        inputs, target = torch.randn(8, 12), torch.zeros(8, dtype=torch.int64)

        def closure() -> torch.Tensor:
            job.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(job.model(inputs), target)
            loss.backward()
            return loss

        for _ in range(5):
            job.optimizer.step(closure=closure) if keyword else job.optimizer.step(closure)
        assert job.checkpointer.version == 4
        job.checkpointer.wait()
        assert [e.version for e in job.heard("sealed")] == [1, 2, 3, 4]


@pytest.mark.parametrize("given", ["the one that steps", "another one"])
def test_an_optimizer_that_never_steps_is_reported(
    given: str,
    path: Path,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop steps another optimizer than the checkpointer's: no version would ever be stored,
    silently."""
    monkeypatch.setattr("tierckpt.hooks.iterations.STEPLESS_CALLS", 20)
    model = torch.nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    watched = optimizer if given == "the one that steps" else other
    with tierckpt.Checkpointer(model, watched, path=path, **settings) as checkpointer:
        for call in range(1, 61):
            model(torch.ones(1, 2)).sum().backward()
            if call % 20 == 0:  # the number of micro-batches without an event
                optimizer.step()
            checkpointer.step()
        version = checkpointer.version
    said = [r for r in caplog.records if "made no step" in r.getMessage()]
    if given == "the one that steps":
        assert (version, said) == (3, [])
    else:
        assert version == 0
        assert [r.levelname for r in said] == ["ERROR"], "once, and loudly"


@pytest.mark.parametrize("end", ["save", "close"])
def test_a_version_on_demand_counts_its_iteration_until_the_loop_does(
    end: str, path: Path, settings: Any
) -> None:
    """Between the optimizer's step and `step()`, a second save is of the same iteration."""
    settings = {**settings, "local_every_steps": 1}
    with TinyJob(path, **settings) as job:
        job.run(1)
        job.train_one()
        job.checkpointer.save(now=True)
        if end == "save":
            job.checkpointer.save(now=True)
            job.checkpointer.abandon()
    with TinyJob(path, seed=9, **settings) as job:
        restored = job.restore()
        assert (int(restored), restored.version) == (2, 2)
        job.run(3)
        assert job.fingerprint() == fingerprints()[3]


def test_an_optimizer_that_stops_to_step_is_reported(
    path: Path, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Boundaries at which it stepped came before, and nothing was to be done at them."""
    model = torch.nn.Linear(3, 3)
    given, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with tierckpt.Checkpointer(model, given, path=path, **settings) as ckpt:
        ckpt.restore()
        for turn in range(12):
            for each in [given] * (turn < 5) + [other] * (turn >= 5):
                each.zero_grad()
                model(torch.ones(3)).sum().backward()
                each.step()
            ckpt.step()
            told = [r for r in caplog.records if "made no step" in r.getMessage()]
            assert len(told) == (turn >= 8)


STEPS_COUNTED = 16


def calls_of(path: Path, settings: dict[str, Any]) -> Counter[tuple[str, str, str]]:
    """Calls of this library's Python functions in some steps: thread, module, function.

    Each one costs the training more than its instructions: a step of the training came between, so
    it is in no core's cache.
    """
    called, is_on = Counter[tuple[str, str, str]](), [False]

    def count(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and is_on[0] and f"{os.sep}tierckpt{os.sep}" in code.co_filename:
            thread = threading.current_thread().name
            called[thread, code.co_filename, code.co_qualname] += 1

    monkeypatch = pytest.MonkeyPatch()
    # The profiler, and other work, make steps so slow that many would look.
    monkeypatch.setattr("tierckpt.checkpointer.loop.LOOK_SECONDS", 1000.0)
    monkeypatch.setattr("tierckpt.storage.slot_pool.SEEN_SECONDS", 1000.0)
    before = sys.getprofile()
    threading.setprofile(count)  # for the copier, which the job starts
    try:
        with TinyJob(path, **settings) as job:
            job.run(80)  # a few parts look for something in the first boundaries only
            sys.setprofile(count)
            is_on[0] = True
            job.run(80 + STEPS_COUNTED)
            is_on[0] = False
            sys.setprofile(before)
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        monkeypatch.undo()
    # Messages of the agent, and looks for them at certain times, are not a part of each step.
    return Counter({each: calls for each, calls in called.items() if calls > STEPS_COUNTED // 4})


MAX_FUNCTIONS, MAX_CALLS = 31, 32
"""In a step that takes nothing."""


def test_a_step_that_takes_nothing_calls_few_functions(path: Path, settings: Any) -> None:
    off = {**settings, "memory_every_steps": 0, "local_every_steps": 0, "local_every_seconds": 0}
    called = calls_of(path, off)
    assert 0 < len(called) <= MAX_FUNCTIONS
    assert called.total() / STEPS_COUNTED <= MAX_CALLS


MAX_FUNCTIONS_OF_VERSION, MAX_CALLS_OF_VERSION = 142, 172
"""In a step with a version to memory."""


def test_a_version_calls_few_functions_and_the_copier_none(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_engine() is None:
        pytest.skip(describe_engine())
    # However slow the machine is, the copier has nothing else to do.
    limits.COPIER_LINGERS.set(monkeypatch, 1e6)
    limits.COPIER_QUIET.set(monkeypatch, 1e6)
    called = calls_of(path, {**settings, "local_every_steps": 0, "local_every_seconds": 0})
    assert 0 < len(called) <= MAX_FUNCTIONS_OF_VERSION
    assert called.total() / STEPS_COUNTED <= MAX_CALLS_OF_VERSION
    assert not {each for each in called if "snapshot" in each[1] and each[0] == "tierckpt-copier"}
