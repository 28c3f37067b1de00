"""A source that changes too early, found by the barrier while the copier comes to the seal."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from tests.support.facts import facts_of
from tierckpt.format import VersionId
from tierckpt.snapshot import BlockQueue, CopyPlan, Engine, Progress, Snapshot
from tierckpt.state import Arena, Packed, TrainingState

LONG_SECONDS = 0.01
"""Of the check: time for another thread to come to its own."""


class Hashing(BlockQueue, Engine):
    """As on a GPU: the barrier returns when the copies are ordered, and the copier still hashes the
    last blocks."""

    def __init__(self, plan: CopyPlan) -> None:
        super().__init__(plan)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def run(self, wait_seconds: float | None) -> Progress:
        self.release(None)
        self.inside.set()
        assert self.go_on.wait(60.0)
        count = len(self._plan.layout.blocks)
        if self._left:
            self._count(range(count), [bytes(8)] * count, 0.0, 0.0)
        return self._progress()

    def help(self) -> Progress:
        self.release(None)
        return Progress.ORDERED


class Slot:
    """A slot in private memory."""

    bound = None

    def __init__(self, nbytes: int) -> None:
        self.memory, self.sealed = memoryview(bytearray(nbytes)), False

    def image(self) -> memoryview:
        return self.memory

    def seal(self, manifest: bytes) -> None:
        self.sealed = True


def test_no_thread_seals_what_another_one_finds_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(30, 30)
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    plan = CopyPlan(state, state.walk(), 0, 1)
    counters = plan.counters

    def slowly() -> bytes:
        if threading.current_thread() is threading.main_thread():
            engine.go_on.set()
            time.sleep(LONG_SECONDS)
        return counters()

    monkeypatch.setattr(plan, "counters", slowly)
    for version in range(10):
        assert plan.fits(state)
        engine, slots = Hashing(plan), list[Slot]()

        def choose(blocks: int, nbytes: int, at_once: bool = False, into: Any = slots) -> Any:
            into.append(Slot(nbytes))
            return into[0]

        facts = facts_of(VersionId(1, version), 1)
        taken = (("memory",), Packed({}), Arena(), choose, lambda _: None)
        snapshot = Snapshot(facts, plan, *taken, engine)
        snapshot.submit = lambda work: threading.Thread(target=work.run).start()
        snapshot.release_all()
        assert engine.inside.wait(60.0)
        with torch.no_grad():
            model.weight.add_(1)  # the optimizer did not wait
        snapshot.barrier()
        engine.go_on.set()
        assert snapshot.wait_done(60.0)
        assert (snapshot.failed, [slot.sealed for slot in slots]) == (True, [False])
        assert "weight" in snapshot.error


def test_a_failed_version_is_not_sealed_by_a_thread_that_was_late() -> None:
    model = torch.nn.Linear(3, 3)
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    plan = CopyPlan(state, state.walk(), 0, 1)
    assert plan.fits(state)
    engine = Hashing(plan)
    engine.end(sealed=False)
    engine._count([*range(len(plan.layout.blocks))], [bytes(8)] * len(plan.layout.blocks), 0.0, 0.0)
    assert engine._progress() is Progress.ABORTED
