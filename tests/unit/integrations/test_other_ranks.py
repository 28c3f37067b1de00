"""Places in an epoch for other numbers of ranks."""

from __future__ import annotations

from fractions import Fraction

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch import arange
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from tierckpt.errors import RestoreError
from tierckpt.integrations import PlaceOfAnyRanks, StepSize, order_batch_of

NAMES = ("batch_size", "accumulate")


def loader(batch: int) -> PlaceOfAnyRanks[list[int]]:
    data = DataLoader(TensorDataset(arange(20)), batch, collate_fn=lambda x: [int(i) for (i,) in x])
    return PlaceOfAnyRanks(_NoBatchSize(data))


class _NoBatchSize:
    """A framework's loader without a visible batch size."""

    def __init__(self, data: DataLoader[object]) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> object:
        return iter(self._data)


@pytest.mark.parametrize(
    ("now", "saved", "factor"),
    [
        (StepSize(2, 4, 3), StepSize(2, 4, 3), Fraction(1)),
        (StepSize(1, 4, 6), StepSize(2, 4, 3), Fraction(2)),
        (StepSize(4, 2, 3), StepSize(2, 4, 3), Fraction(1)),
        (StepSize(3, 4, 2), StepSize(2, 4, 3), Fraction(2, 3)),
        (StepSize(2, 0, 1), StepSize(2, 0, 1), Fraction(1)),
        (StepSize(4, 2, 3, 6), StepSize(2, 2, 6, 6), Fraction(1, 2)),
    ],
)
def test_the_same_samples_a_step_are_accepted(
    now: StepSize, saved: StepSize, factor: Fraction
) -> None:
    now.require(saved, 9, NAMES)
    assert now.batches_for_one_of(saved) == factor


@pytest.mark.parametrize(
    ("now", "saved", "words"),
    [
        (StepSize(1, 4, 3), StepSize(2, 4, 3), r"v9 .* 24 samples .*Set accumulate=6, or start 2"),
        (StepSize(5, 4, 3), StepSize(2, 4, 3), r"Start 2 ranks with the former sizes"),
        (StepSize(1, 0, 1), StepSize(2, 0, 1), r"the loader's batch size is unknown"),
        (
            StepSize(2, 0, 1),
            StepSize(2, 0, 3),
            r"accumulate=3, and this job has accumulate=1: .*Set",
        ),
        (StepSize(1, 8, 1, 8), StepSize(2, 4, 1, 4), r"order .* was 4 and is 8 .*Start 2 ranks"),
        (StepSize(2, 4, 1), StepSize(1, 4, 1), r"\(1 rank, batch_size=4, .*former sizes"),
    ],
)
def test_other_samples_are_refused_with_numbers_that_fit(
    now: StepSize, saved: StepSize, words: str
) -> None:
    with pytest.raises(RestoreError, match=words):
        now.require(saved, 9, NAMES)


@pytest.mark.parametrize(("taken", "left"), [(1, [8, 9]), (2, [16, 17]), (3, [])])
def test_a_place_continues_with_the_next_samples(taken: int, left: list[int]) -> None:
    """Batches of 8 by one rank become batches of 2: the last one was filled up."""
    saved, now = loader(8), loader(2)
    batches = iter(saved)
    for _ in range(taken):
        next(batches)
    now.load_of_other_ranks(saved.state_dict(), 2)
    now.convert(Fraction(8, 2))
    assert next(iter(now), []) == left


def test_a_prefetched_batch_is_loaded_again() -> None:
    saved = PlaceOfAnyRanks(_NoBatchSize(loader(4).loader._data), ahead=1)
    batches = iter(saved)
    assert [next(batches), next(batches)] == [[0, 1, 2, 3], [4, 5, 6, 7]]  # the second is held
    now = loader(2)
    now.load_of_other_ranks(saved.state_dict(), 2)
    now.convert(Fraction(2))
    assert now.start == 2
    assert next(iter(now)) == [4, 5]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_pass_without_a_batch_starts_again(ahead: int) -> None:
    saved, now = PlaceOfAnyRanks(_NoBatchSize(loader(4).loader._data), ahead=ahead), loader(2)
    iter(saved)
    now.load_of_other_ranks(saved.state_dict(), 2)
    now.convert(Fraction(2))
    assert now.start == 0
    assert next(iter(now)) == [0, 1]


class _NoLength:
    """A loader of an iterable data set."""

    def __iter__(self) -> object:
        return iter(range(10))


def test_a_loader_without_a_length() -> None:
    saved, now = PlaceOfAnyRanks(_NoLength()), PlaceOfAnyRanks(_NoLength())
    batches = iter(saved)
    assert [next(batches), next(batches)] == [0, 1]
    now.load_of_other_ranks(saved.state_dict(), 2)
    now.convert(Fraction(3))
    assert [*now] == [6, 7, 8, 9]


def sampler_over(kind: str) -> Sampler[int]:
    data = TensorDataset(arange(20))
    if kind == "by length":
        return LengthGroupedSampler(6, lengths=[*range(20)])
    return RandomSampler(data) if kind == "random" else DistributedSampler(data, 2, 0)


@pytest.mark.parametrize(("kind", "size"), [("random", 0), ("distributed", 0), ("by length", 6)])
def test_samplers_with_an_order_that_depends_on_a_batch_size(kind: str, size: int) -> None:
    batches = BatchSampler(sampler_over(kind), 4, drop_last=False)
    data = TensorDataset(arange(20))
    for each in (batches, BatchSamplerShard(batches, 2, 0)):
        assert order_batch_of(DataLoader(data, batch_sampler=each)) == size


class Alike(BatchSampler):
    """Fills batches with alike samples."""


def test_batch_samplers_of_other_kinds_depend_on_their_size() -> None:
    batches = Alike(RandomSampler(range(20)), 4, drop_last=False)
    assert order_batch_of(DataLoader(TensorDataset(arange(20)), batch_sampler=batches)) == 4
