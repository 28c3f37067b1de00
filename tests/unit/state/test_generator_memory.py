"""Generators read from their memory have the state that their own methods report."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tierckpt.errors import UnsupportedStateError
from tierckpt.state import process_state


@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 1301])
def test_python_state_is_that_of_getstate(draws: int) -> None:
    one = random.Random(7)
    for number in range(draws):
        one.gauss(0, 1) if number % 3 == 0 else one.random()
    assert process_state._place_in_python() is not None, "this Python has another layout"
    assert process_state.python_state(one) == process_state._told_by_python(one)


@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 1301])
def test_numpy_state_is_that_of_get_state(draws: int) -> None:
    one = np.random.RandomState(7)
    for number in range(draws):
        one.randn() if number % 3 == 0 else one.rand()
    assert process_state._place_in_numpy() is not None, "this numpy has another layout"
    assert process_state.numpy_state(one) == process_state._told_by_numpy(one)


def test_the_process_wide_generators_are_read() -> None:
    random.seed(3)
    np.random.seed(3)
    assert process_state.python_state() == process_state.python_state(random.Random(3))
    assert process_state.numpy_state() == process_state.numpy_state(np.random.RandomState(3))


def test_where_the_memory_is_another_the_methods_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "_memory_of", lambda _: bytes(4000))
    assert process_state._place_in_python.__wrapped__() is None
    assert process_state._place_in_numpy.__wrapped__() is None
    one, other = random.Random(1), np.random.RandomState(1)
    expected = process_state.python_state(one), process_state.numpy_state(other)
    monkeypatch.setattr(process_state, "_place_in_python", lambda: None)
    monkeypatch.setattr(process_state, "_place_in_numpy", lambda: None)
    assert (process_state.python_state(one), process_state.numpy_state(other)) == expected


def test_a_subclass_with_a_state_of_its_own_is_asked() -> None:
    class Own(random.Random):
        def getstate(self) -> tuple[object, ...]:
            return (3, (*range(625),), None)

    state = process_state.python_state(Own(1))
    assert process_state.PYTHON.unpack(state)[:3] == (624, 0, 1)


def test_another_kind_of_global_generator_is_refused() -> None:
    other = np.random.RandomState(np.random.PCG64(1))
    with pytest.raises(UnsupportedStateError, match="is a PCG64; let it be an MT19937"):
        process_state.numpy_state(other)
