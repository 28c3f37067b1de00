"""A shard in parts: whatever windows it comes in, any range of it is read back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.storage.persistent import shards

PART = 100
PATH = "v1/00000of00001/s00000.parts"


class Objects:
    """Objects in memory; the put of a name in `fails` raises OSError."""

    def __init__(self, *fails: str) -> None:
        self.held: dict[str, bytes] = {}
        self.fails, self.under_way, self.most = fails, 0, 0
        self._lock = threading.Lock()

    def put(self, name: str, content: Any, nbytes: int, exclusive: bool = False) -> None:
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        data = b"".join(content())
        assert len(data) == nbytes
        if name.endswith(self.fails):
            self.under_way -= 1
            raise OSError(f"cannot put {name}")
        with self._lock:
            self.held[name] = data
            self.under_way -= 1

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        data = self.held[name][offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def sizes(self, folder: str = "") -> dict[str, int]:
        return {name.rpartition("/")[2]: len(data) for name, data in self.held.items()}


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    with patch.object(shards, "PART_BYTES", PART):
        yield


def windows(data: bytes, cuts: list[int]) -> Iterator[memoryview]:
    low = 0
    for length in cuts:
        yield memoryview(data)[low : low + length]
        low += length
    yield memoryview(data)[low:]


@given(
    st.binary(max_size=20 * PART),
    st.lists(st.integers(0, 3 * PART), max_size=12),
    st.integers(0, 22 * PART),
    st.integers(0, 5 * PART),
)
def test_any_range_is_read_back(data: bytes, cuts: list[int], offset: int, nbytes: int) -> None:
    objects: Any = Objects()
    shards.write_parts(objects, PATH, windows(data, cuts))
    assert shards.stored_bytes(objects, PATH) == len(data)
    sizes = [len(objects.held[name]) for name in sorted(objects.held)]
    assert all(size == PART for size in sizes[:-1])
    offset = min(offset, len(data))
    nbytes = min(nbytes, len(data) - offset)
    assert shards.read_parts(objects, PATH, offset, nbytes) == data[offset : offset + nbytes]
    assert objects.most <= shards.PARTS_AT_ONCE


def test_a_part_that_fails_ends_the_write_and_nothing_is_under_way_then() -> None:
    objects: Any = Objects("00003")
    with pytest.raises(OSError, match=r"cannot put .*00003"):
        shards.write_parts(objects, PATH, windows(bytes(30 * PART), []))
    assert objects.under_way == 0
    assert shards.stored_bytes(objects, PATH) == 3 * PART, "a gap ends the shard"


def test_an_error_of_the_windows_comes_out() -> None:
    def broken() -> Iterator[memoryview]:
        yield memoryview(bytes(2 * PART))
        raise RuntimeError("the slot was refilled")

    objects: Any = Objects()
    with pytest.raises(RuntimeError, match="refilled"):
        shards.write_parts(objects, PATH, broken())
    assert objects.under_way == 0
