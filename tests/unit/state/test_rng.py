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
    for rank in range(1, 500):
        take_up(saved, 9, rank, everyone)
        seeds.add(torch.initial_seed() % 2**32)
    assert len(seeds) == 499


# --- saved and loaded ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "devices", "set_"),
    [
        (3, 3, 4, {3: 3, 0: 0, 1: 1, 2: 2}),
        (3, 1, 4, {1: 3, 0: 0, 2: 1, 3: 2}),
        (0, 1, 2, {1: 0, 0: 1}),
        (None, None, 1, {0: 2}),
    ],
)
def test_the_stream_of_the_device_that_trains_goes_along(
    saved_on: int | None,
    loaded_on: int | None,
    devices: int,
    set_: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that restarts as another one of its node has a device with another number."""
    found: dict[int, int] = {}

    def put(stream: torch.Tensor, index: int) -> None:
        found[index] = int(stream)

    def device(index: int | None) -> torch.device | None:
        return None if index is None else torch.device("cuda", index)

    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda i: torch.tensor([i], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", put)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4 if saved_on is None else devices)
    saved = pack_rng(device(saved_on))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    problems = load_rng(saved, device(loaded_on))
    assert found == set_
    assert problems == (
        ["RNG of 4 CUDA devices was saved, this process has 1"] if saved_on is None else []
    )


def test_looking_does_not_draw() -> None:
    np.random.seed(5)
    expected = [np.random.rand() for _ in range(4)]
    np.random.seed(5)
    found = []
    for _ in range(4):
        pack_rng()
        found.append(np.random.rand())
    assert found == expected


def test_numpys_kept_deviate_is_not_lost_when_a_seed_comes_again() -> None:
    np.random.seed(5)
    np.random.randn()
    np.random.randn()
    pack_rng()  # none is kept now
    np.random.seed(5)
    np.random.randn()  # one is kept, with the generator where it was before
    saved = pack_rng()
    expected = np.random.randn()
    load_rng(saved)
    assert np.random.randn() == expected
