"""Random streams of new ranks: new ones by the documented rule, or shared where all ranks share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tierckpt.state import digests_of, load_rng, pack_rng, take_up


@pytest.fixture(autouse=True)
def streams_put_back() -> Iterator[None]:
    saved = pack_rng()
    yield
    load_rng(saved)


def seeded(python: int, numpy: int, cpu: int) -> dict[str, Any]:
    """A rank's saved state, some draws after this seed."""
    random.seed(python)
    np.random.seed(numpy)
    torch.manual_seed(cpu)
    draws()
    return pack_rng()


def draws() -> dict[str, Any]:
    return {
        "python": (random.random(), random.gauss(0, 1)),
        "numpy": (np.random.rand(), np.random.randn()),
        "torch": torch.rand(3).tolist(),
    }


def after_restore(rank: int, size: int, saved: list[dict[str, Any]], version: int = 9) -> Any:
    everyone = [digests_of(each) for each in saved]
    assert take_up(saved[rank % len(saved)], version, rank, everyone) == []
    return draws()


def undisturbed(saved: dict[str, Any]) -> dict[str, Any]:
    load_rng(saved)
    return draws()


def test_ranks_that_were_there_continue_where_they_were() -> None:
    saved = [seeded(1, 2, 3), seeded(4, 5, 6)]
    expected = [undisturbed(each) for each in saved]
    for size in (1, 2, 5):
        found = [after_restore(rank, size, saved) for rank in range(min(size, 2))]
        assert found == expected[:size]


@pytest.mark.parametrize("before", [1, 2])
def test_no_two_ranks_draw_the_same(before: int) -> None:
    saved = [seeded(10 + rank, 20 + rank, 30 + rank) for rank in range(before)]
    drawn = [after_restore(rank, 7, saved) for rank in range(7)]
    for kind in ("python", "numpy", "torch"):
        assert len({str(each[kind]) for each in drawn}) == 7
    assert drawn == [after_restore(rank, 7, saved) for rank in range(7)], "nor at another time"


def test_ranks_with_equal_random_streams_keep_them_equal() -> None:
    """Decisions that all ranks make together, with Python's stream."""
    saved = [seeded(1, 20 + rank, 30 + rank) for rank in range(2)]
    drawn = [after_restore(rank, 4, saved) for rank in range(4)]
    assert len({each["python"] for each in drawn}) == 1
    assert len({each["numpy"] for each in drawn}) == 4


def states(*digests: str) -> list[dict[str, str]]:
    """The digests of all saved ranks, the same for each kind of stream."""
    return [dict.fromkeys(digests_of(pack_rng()), digest) for digest in digests]


@pytest.mark.parametrize(
    ("version", "digests", "rank"),
    [
        (9, ("a", "b"), 5),
        (10, ("a", "b"), 5),
        (9, ("b", "a"), 5),
        (9, ("a",), 5),
        (9, ("a", "b"), 6),
    ],
)
def test_the_rule_is_the_documented_one(version: int, digests: tuple[str, ...], rank: int) -> None:
    """Computed by hand: a restart of an old checkpoint must draw the same numbers as before."""

    def seed(kind: str) -> int:
        text = " ".join([f"tierckpt stream {kind} v{version}", *digests])
        return (int(hashlib.sha256(text.encode()).hexdigest(), 16) + rank) % 2**256

    words = np.frombuffer(seed("numpy").to_bytes(32, "little"), dtype="<u4")
    numpy, drawn = (
        np.random.RandomState(words),
        torch.Generator().manual_seed(seed("torch") % 2**64),
    )
    python = random.Random(seed("python"))
    assert take_up(pack_rng(), version, rank, states(*digests)) == []
    assert draws() == {
        "python": (python.random(), python.gauss(0, 1)),
        "numpy": (numpy.rand(), numpy.randn()),
        "torch": torch.rand(3, generator=drawn).tolist(),
    }


def test_thirty_two_bits_of_the_seeds_distinguish_the_ranks() -> None:
    """torch's generator on the CPU takes no more of them."""
    saved, everyone = pack_rng(), states("a")
    seeds = set()
    for rank in range(1, 2000):
        take_up(saved, 9, rank, everyone)
        seeds.add(torch.initial_seed() % 2**32)
    assert len(seeds) == 1999
