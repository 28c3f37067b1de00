"""Engines for a CPU: both do what the protocol says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tierckpt.format.manifest import digest
from tierckpt.snapshot import (
    Binding,
    CopyPlan,
    Desk,
    NativeEngine,
    TorchEngine,
    Watch,
    describe_engine,
    find_engine,
)
from tierckpt.snapshot.copy_engine import Progress
from tierckpt.snapshot.engine import Engine
from tierckpt.state import TrainingState

START = 64
"""Length of the header."""


class Memory:
    """Stands for a slot."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = bytearray(nbytes)

    def image(self) -> memoryview:
        return memoryview(self.bytes)


@pytest.fixture
def plan() -> CopyPlan:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(700, 400) for _ in range(3)])
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    made = CopyPlan(state, state.walk(), 0, 1)
    assert len(made.layout.blocks) > 5
    return made


@pytest.fixture(params=["C", "torch"])
def engine(plan: CopyPlan, request: pytest.FixtureRequest) -> Engine:
    if request.param == "torch":
        return TorchEngine(plan)
    library, table = find_engine(), plan.table()
    if library is None:
        pytest.skip(describe_engine())
    assert table is not None
    return NativeEngine(library, plan, table, Desk(library))


@pytest.fixture
def slot(plan: CopyPlan) -> Memory:
    return Memory(START + plan.layout.nbytes)


def filled(engine: Engine, plan: CopyPlan, slot: Any, seen: Callable[[int], object]) -> Watch:
    """Bind the engine to the slot; `seen` is called with the number of each copied block."""

    class Seen:
        def copied(self, _version: int, _plan: Any, blocks: Any, *_seconds: float) -> None:
            for block in blocks:
                seen(block)

    watch = Watch(1, plan, Seen())  # type: ignore[arg-type]
    engine.fill(Binding(slot), START, watch)
    return watch


def blocks_of(plan: CopyPlan) -> list[bytes]:
    return [
        b"".join(p.numpy().tobytes() for p in plan.source(number)[0])
        for number in range(len(plan.layout.blocks))
    ]


def test_released_blocks_are_copied_once_in_their_order(
    engine: Engine, plan: CopyPlan, slot: Memory
) -> None:
    seen: list[int] = []
    count = len(plan.layout.blocks)
    assert engine.held() == {*range(count)}
    engine.release([3, 1, 3])
    engine.release([1])
    filled(engine, plan, slot, seen.append)
    while engine.run(0.0) is not Progress.IDLE:
        pass
    assert seen == [3, 1]
    assert engine.held() == {*range(count)} - {1, 3}
    assert engine.help() is Progress.COMPLETE
    assert seen == [3, 1, *sorted({*range(count)} - {1, 3})]
    assert engine.held() == set()


def test_the_bytes_and_the_digests_are_those_of_the_sources(
    engine: Engine, plan: CopyPlan, slot: Memory
) -> None:
    filled(engine, plan, slot, lambda _: None)
    assert engine.help() is Progress.COMPLETE
    expected = blocks_of(plan)
    found = bytes(slot.bytes)
    for block, data in zip(plan.layout.blocks, expected, strict=True):
        assert found[START + block.offset :][: block.nbytes] == data
    assert found[:START] == bytes(START)
    copying, hashing, digests = engine.results()
    assert copying > 0.0
    assert hashing > 0.0
    assert digests == b"".join(map(digest, expected))


def test_nothing_is_copied_without_a_slot_or_after_the_end(
    engine: Engine, plan: CopyPlan, slot: Memory
) -> None:
    engine.release(None)
    assert engine.run(0.0) in (Progress.IDLE, Progress.ABORTED)
    engine.end(sealed=False)
    filled(engine, plan, slot, lambda _: None)
    assert engine.run(0.0) is Progress.ABORTED
    assert engine.help() is Progress.ABORTED
    assert not any(slot.bytes)


@pytest.mark.parametrize("ends", [True, False])
def test_the_barrier_waits_for_the_block_of_another_thread(
    ends: bool, engine: Engine, plan: CopyPlan, slot: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns when that block is copied, or when the version is given up."""
    inside, go_on = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        if threading.current_thread() is copier:
            inside.set()
            assert go_on.wait(60.0)

    copier = threading.Thread(target=lambda: engine.run(60.0))
    watch = filled(engine, plan, slot, lambda _: None)
    monkeypatch.setattr(watch, "copies", hold)
    engine.release([0])
    copier.start()
    assert inside.wait(60.0)
    returned: list[Progress] = []
    barrier = threading.Thread(target=lambda: returned.append(engine.help()))
    barrier.start()
    barrier.join(0.2)
    assert returned == []
    if ends:
        engine.end(sealed=False)
        barrier.join(60.0)
        assert returned == [Progress.ABORTED]
    go_on.set()
    barrier.join(60.0)
    copier.join(60.0)
    assert returned == [Progress.ABORTED if ends else Progress.COMPLETE]


def test_a_waiting_copier_copies_what_is_released_later(
    engine: Engine, plan: CopyPlan, slot: Memory
) -> None:
    filled(engine, plan, slot, lambda _: None)
    done: list[Progress] = []

    def run() -> None:
        while (progress := engine.run(60.0)) is Progress.UNFINISHED:
            pass
        done.append(progress)

    copier = threading.Thread(target=run)
    copier.start()
    engine.release([2])
    engine.release(None)
    copier.join(60.0)
    assert done == [Progress.COMPLETE]
    assert engine.help() is Progress.COMPLETE
