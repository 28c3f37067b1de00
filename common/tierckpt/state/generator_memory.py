"""Generator memory: the states of Python's and numpy's process-wide generators, read as bytes.

Their own methods make a Python integer of each of 624 words, which takes a tenth of a millisecond
at every boundary. So the words are read from the generators' memory. Where they are in it is found
once in a process, by experiments with generators of the same classes; where these do not succeed,
the generators' methods are used. Both ways give the same bytes.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from struct import Struct
from typing import Any

import numpy as np

from tierckpt.errors import UnsupportedStateError

PYTHON = Struct("<I624I?d")
"""Python's generator: position, words, whether a deviate is kept, the deviate."""
NUMPY = Struct("<2496sI?d")
"""numpy's: words, position, and the same."""
_WORDS_BYTES = 2500
"""Length of words and position."""
_KEPT, _REST = Struct("<iid"), Struct("<?d")
"""The kept deviate as in numpy's memory, where the second number is a gap; as in both forms."""


def python_state(own: random.Random | None = None) -> bytes:
    """The state of a generator, the process-wide one by default, in the form of `PYTHON`."""
    bound: Any = random.getstate
    generator: Any = bound.__self__ if own is None else own
    at, kind = _place_in_python(), type(generator)
    if at is None or kind is not random.Random:
        return _told_by_python(generator)
    words, kept = ctypes.string_at(id(generator) + at, _WORDS_BYTES), generator.gauss_next
    return words + _REST.pack(kept is not None, kept or 0.0)


def numpy_state(own: np.random.RandomState | None = None) -> bytes:
    """The state of a generator, the process-wide one by default, in the form of `NUMPY`. Raises
    UnsupportedStateError if it is not a Mersenne Twister."""
    bound: Any = np.random.get_state
    generator: Any = bound.__self__ if own is None else own
    at, bits, kind = _place_in_numpy(), generator._bit_generator, type(generator)
    if type(bits) is not np.random.MT19937:
        raise UnsupportedStateError(
            f"numpy's {'global generator' if own is None else 'RandomState'} is a "
            f"{type(bits).__name__}; let it be an MT19937, and use np.random.Generator(...) for "
            "another one"
        )
    if at is None or kind is not np.random.RandomState:
        return _told_by_numpy(generator)
    with bits.lock:
        words = ctypes.string_at(bits.ctypes.state_address, _WORDS_BYTES)
        kept, _, deviate = _KEPT.unpack(ctypes.string_at(id(generator) + at, 16))
    return words + _REST.pack(kept, deviate)


def load_python(state: bytes, own: random.Random | None = None) -> None:
    """Set a generator, the process-wide one by default."""
    place, *words, has_kept, kept = PYTHON.unpack(state)
    value = (3, (*words, place), kept if has_kept else None)
    (random.setstate if own is None else own.setstate)(value)


def load_numpy(state: bytes, own: np.random.RandomState | None = None) -> None:
    """Set a generator, the process-wide one by default."""
    keys, *rest = NUMPY.unpack(state)
    value = ("MT19937", np.frombuffer(keys, dtype=np.uint32), *rest)
    (np.random.set_state if own is None else own.set_state)(value)


def _told_by_python(generator: random.Random) -> bytes:
    _, words, kept = generator.getstate()
    return PYTHON.pack(words[-1], *words[:-1], kept is not None, kept or 0.0)


def _told_by_numpy(generator: np.random.RandomState) -> bytes:
    _, words, place, has_kept, kept = generator.get_state(legacy=True)
    return NUMPY.pack(words.tobytes(), place, has_kept, kept)  # type: ignore[union-attr]


@functools.cache
def _place_in_python() -> int | None:
    """Offset of position and words in the memory of a `random.Random`."""
    found = set()
    for seed in (1, 2):
        one = random.Random(seed)
        for _ in range(seed):
            one.random()
        found.add(_memory_of(one).find(_told_by_python(one)[:_WORDS_BYTES]))
    return _only(found)


@functools.cache
def _place_in_numpy() -> int | None:
    """Offset of the kept deviate, and of the mark before it, in a `RandomState`; None also if its
    words are not where numpy says."""
    found = set()
    for number, kept in ((1, 1), (2, 0), (3, 1)):
        one = np.random.RandomState(number)
        one.standard_normal(2 * number)
        state: Any = one.get_state(legacy=True)
        one.set_state((*state[:3], kept, number * 1.25e-200))
        pattern = _KEPT.pack(kept, 0, number * 1.25e-200)
        bits: Any = one._bit_generator
        its = ctypes.string_at(bits.ctypes.state_address, _WORDS_BYTES)
        same = its == _told_by_numpy(one)[:_WORDS_BYTES]
        found.add(_memory_of(one).find(pattern) if same else -1)
    return _only(found)


def _memory_of(obj: object) -> bytes:
    if sys.implementation.name != "cpython":
        return b""
    return ctypes.string_at(id(obj), type(obj).__basicsize__)


def _only(found: set[int]) -> int | None:
    place = found.pop() if len(found) == 1 else -1
    return None if place < 0 else place


__all__ = ["load_numpy", "load_python", "numpy_state", "python_state"]
