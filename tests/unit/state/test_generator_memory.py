"""Generators read from their memory have the state that their own methods report."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tierckpt.errors import UnsupportedStateError
from tierckpt.state import generator_memory


@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 1301])
def test_python_state_is_that_of_getstate(draws: int) -> None:
    one = random.Random(7)
    for number in range(draws):
        one.gauss(0, 1) if number % 3 == 0 else one.random()
    assert generator_memory._place_in_python() is not None, "this Python has another layout"
    assert generator_memory.python_state(one) == generator_memory._told_by_python(one)


@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 1301])
def test_numpy_state_is_that_of_get_state(draws: int) -> None:
    one = np.random.RandomState(7)
    for number in range(draws):
        one.randn() if number % 3 == 0 else one.rand()
    assert generator_memory._place_in_numpy() is not None, "this numpy has another layout"
    assert generator_memory.numpy_state(one) == generator_memory._told_by_numpy(one)


def test_the_process_wide_generators_are_read() -> None:
    random.seed(3)
    np.random.seed(3)
    assert generator_memory.python_state() == generator_memory.python_state(random.Random(3))
    assert generator_memory.numpy_state() == generator_memory.numpy_state(np.random.RandomState(3))


def test_where_the_memory_is_another_the_methods_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_memory, "_memory_of", lambda _: bytes(4000))
    assert generator_memory._place_in_python.__wrapped__() is None
    assert generator_memory._place_in_numpy.__wrapped__() is None
    one, other = random.Random(1), np.random.RandomState(1)
    expected = generator_memory.python_state(one), generator_memory.numpy_state(other)
    monkeypatch.setattr(generator_memory, "_place_in_python", lambda: None)
    monkeypatch.setattr(generator_memory, "_place_in_numpy", lambda: None)
    assert (generator_memory.python_state(one), generator_memory.numpy_state(other)) == expected


def test_a_subclass_with_a_state_of_its_own_is_asked() -> None:
    class Own(random.Random):
        def getstate(self) -> tuple[object, ...]:
            return (3, (*range(625),), None)

    state = generator_memory.python_state(Own(1))
    assert generator_memory.PYTHON.unpack(state)[:3] == (624, 0, 1)


def test_another_kind_of_global_generator_is_refused() -> None:
    other = np.random.RandomState(np.random.PCG64(1))
    with pytest.raises(UnsupportedStateError, match="is a PCG64; let it be an MT19937"):
        generator_memory.numpy_state(other)
