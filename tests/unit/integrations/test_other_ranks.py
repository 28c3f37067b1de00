"""Places in an epoch for other numbers of ranks."""

from __future__ import annotations

from fractions import Fraction

import pytest
from torch import arange
from torch.utils.data import DataLoader, TensorDataset

from tierckpt.errors import RestoreError
from tierckpt.integrations.other_ranks import PlaceOfAnyRanks, StepSize

NAMES = ("batch_size", "accumulate")


def loader(batch: int) -> PlaceOfAnyRanks[list[int]]:
    data = DataLoader(TensorDataset(arange(20)), batch, collate_fn=lambda x: [int(i) for (i,) in x])
    return PlaceOfAnyRanks(_NoBatchSize(data))


class _NoBatchSize:
    """A framework's loader, whose batch size is not visible."""

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
        (StepSize(2, 4, 1), StepSize(1, 4, 1), r"\(1 rank, batch_size=4, .*former sizes"),
    ],
)
def test_other_samples_are_refused_with_numbers_that_fit(
    now: StepSize, saved: StepSize, words: str
) -> None:
    with pytest.raises(RestoreError, match=words):
        now.require(saved, 9, NAMES)


@pytest.mark.parametrize(("taken", "left"), [(1, [8, 9]), (2, [16, 17]), (3, [])])
def test_a_place_goes_on_with_the_next_samples(taken: int, left: list[int]) -> None:
    """Batches of 8 by one rank become batches of 2: the last one was filled up."""
    saved, now = loader(8), loader(2)
    batches = iter(saved)
    for _ in range(taken):
        next(batches)
    now.load_of_other_ranks(saved.state_dict(), 2)
    now.convert(Fraction(8, 2))
    assert next(iter(now), []) == left
