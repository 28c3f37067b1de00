"""Random streams of new ranks: new ones by the documented rule, or shared where all ranks share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tierckpt.state import process_state


@pytest.fixture(autouse=True)
def streams_put_back() -> Iterator[None]:
    saved = process_state.pack_rng()
    yield
    process_state.load_rng(saved)


def seeded(python: int, numpy: int, cpu: int) -> dict[str, Any]:
    """A rank's saved state, some draws after this seed."""
    random.seed(python)
    np.random.seed(numpy)
    torch.manual_seed(cpu)
    draws()
    return process_state.pack_rng()


def draws() -> dict[str, Any]:
    return {
        "python": (random.random(), random.gauss(0, 1)),
        "numpy": (np.random.rand(), np.random.randn()),
        "torch": torch.rand(3).tolist(),
    }


def after_restore(rank: int, size: int, saved: list[dict[str, Any]], version: int = 9) -> Any:
    everyone = [process_state.digests_of(each) for each in saved]
    assert process_state.take_up(saved[rank % len(saved)], version, rank, everyone) == []
    return draws()


def undisturbed(saved: dict[str, Any]) -> dict[str, Any]:
    process_state.load_rng(saved)
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


def test_the_seed_depends_on_kind_version_states_and_rank() -> None:
    base = process_state.seed_of("torch", 9, ["a", "b"], 5)
    assert base is not None
    others = [
        process_state.seed_of("numpy", 9, ["a", "b"], 5),
        process_state.seed_of("torch", 10, ["a", "b"], 5),
        process_state.seed_of("torch", 9, ["b", "a"], 5),
        process_state.seed_of("torch", 9, ["a"], 5),
        process_state.seed_of("torch", 9, ["a", "b"], 6),
    ]
    assert len({base, *others}) == 6
    assert process_state.seed_of("torch", 9, ["a", "a"], 5) is None
    assert process_state.seed_of("torch", 9, ["a"], 5) is not None


def test_the_rule_is_the_documented_one() -> None:
    """Computed by hand: a restart of an old checkpoint must draw the same numbers as before."""
    text = b"tierckpt stream torch v9 a b"
    expected = (int(hashlib.sha256(text).hexdigest(), 16) + 5) % 2**256
    assert process_state.seed_of("torch", 9, ["a", "b"], 5) == expected


def test_thirty_two_bits_of_the_seeds_distinguish_the_ranks() -> None:
    """torch's generator on the CPU takes no more of them."""
    seeds = [process_state.seed_of("torch", 9, ["a"], rank) for rank in range(1, 20_000)]
    assert len({(seed or 0) % 2**32 for seed in seeds}) == len(seeds)
