"""Engines for a CPU: both do what the protocol says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tierckpt.format import digest
from tierckpt.snapshot import (
    Binding,
    CopyPlan,
    Desk,
    Engine,
    NativeEngine,
    Progress,
    TorchEngine,
    Watch,
    describe_engine,
    find_engine,
)
from tierckpt.state import TrainingState

START = 64
"""Length of the header."""


@pytest.fixture
def plan() -> CopyPlan:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(700, 400) for _ in range(3)])
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    return CopyPlan(state, state.walk(), 0, 1)


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
def slot(plan: CopyPlan) -> Any:
    memory = bytearray(START + plan.layout.nbytes)
    return SimpleNamespace(image=lambda: memoryview(memory))


def fill(engine: Engine, plan: CopyPlan, slot: Any, before: Callable[[int], Any] | None) -> None:
    """Bind the engine to the slot; `before` is called with the number of each block."""
    watch = Watch(1, plan)
    if before is not None:
        watch.each, watch.copies = lambda: True, before  # type: ignore[method-assign]
    engine.fill(Binding(slot), START, watch)


def test_released_blocks_are_copied_once_in_their_order(
    engine: Engine, plan: CopyPlan, slot: Any
) -> None:
    seen: list[int] = []
    count = len(plan.layout.blocks)
    assert engine.held() == {*range(count)}
    engine.release([3, 1, 3])
    engine.release([1])
    fill(engine, plan, slot, seen.append)
    while engine.run(0.0) is not Progress.IDLE:
        pass
    assert seen == [3, 1]
    assert engine.held() == {*range(count)} - {1, 3}
    assert engine.help() is Progress.COMPLETE
    assert seen == [3, 1, *sorted({*range(count)} - {1, 3})]
    assert engine.held() == set()


def test_the_bytes_and_the_digests_are_those_of_the_sources(
    engine: Engine, plan: CopyPlan, slot: Any
) -> None:
    fill(engine, plan, slot, None)
    assert engine.help() is Progress.COMPLETE
    sources = (plan.source(number)[0] for number in range(len(plan.layout.blocks)))
    expected = [b"".join(p.numpy().tobytes() for p in parts) for parts in sources]
    found = bytes(slot.image())
    for block, data in zip(plan.layout.blocks, expected, strict=True):
        assert found[START + block.offset :][: block.nbytes] == data
    assert found[:START] == bytes(START)
    *seconds, digests = engine.results()
    assert min(seconds) > 0.0
    assert digests == b"".join(map(digest, expected))


def test_nothing_is_copied_without_a_slot_or_after_the_end(
    engine: Engine, plan: CopyPlan, slot: Any
) -> None:
    engine.release(None)
    assert engine.run(0.0) in (Progress.IDLE, Progress.ABORTED)
    engine.end(sealed=False)
    fill(engine, plan, slot, None)
    assert engine.run(0.0) is Progress.ABORTED
    assert engine.help() is Progress.ABORTED
    assert not any(slot.image())


@pytest.mark.parametrize("ends", [True, False])
def test_the_barrier_waits_for_the_block_of_another_thread(
    ends: bool, engine: Engine, plan: CopyPlan, slot: Any
) -> None:
    """It returns when that block is copied, or when the version is given up."""
    inside, go_on = threading.Event(), threading.Event()

    helped: list[int] = []

    def hold(block: int) -> None:
        if threading.current_thread() is copier:
            inside.set()
            assert go_on.wait(60.0)
        else:
            helped.append(block)

    copier = threading.Thread(target=lambda: engine.run(60.0))
    fill(engine, plan, slot, hold)
    engine.release([0])
    copier.start()
    assert inside.wait(60.0)
    returned: list[Progress] = []
    barrier = threading.Thread(target=lambda: returned.append(engine.help()))
    barrier.start()
    barrier.join(0.5)
    assert returned == []
    assert helped == [*range(1, len(plan.layout.blocks))]
    if ends:
        engine.end(sealed=False)
        barrier.join(60.0)
        assert returned == [Progress.ABORTED]
    go_on.set()
    barrier.join(60.0)
    copier.join(60.0)
    assert returned == [Progress.ABORTED if ends else Progress.COMPLETE]


def test_a_waiting_copier_copies_what_is_released_later(
    engine: Engine, plan: CopyPlan, slot: Any
) -> None:
    fill(engine, plan, slot, None)
    done: list[Progress] = []
    copier = threading.Thread(target=lambda: done.append(engine.run(60.0)))
    copier.start()
    engine.release([2])
    engine.release(None)
    copier.join(60.0)
    assert done == [Progress.COMPLETE]
    assert engine.help() is Progress.COMPLETE
