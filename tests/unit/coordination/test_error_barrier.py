"""What one rank raises in a stretch, all raise, wherever in it that is, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.errors import RestoreError
from tierckpt.group import SingleGroup
from tierckpt.testing import GroupAbortedError, ThreadGroup, run_ranks

RANKS = 3
POINTS = 7


def course(error_barrier: ErrorBarrier, point: Callable[[int], None]) -> list[int]:
    """Some collectives, and what a rank does between them."""
    found = []
    with error_barrier:
        point(0)
        found += error_barrier.all_gather_object(error_barrier.rank)
        point(1)
        found += error_barrier.all_gather_object(10 + error_barrier.rank)
        buffer = torch.full((3,), error_barrier.rank, dtype=torch.uint8)
        error_barrier.broadcast(buffer, 1)
        point(2)
        found += buffer.tolist()
    point(3)
    with error_barrier:
        point(4)
    with error_barrier:
        point(5)
        found += error_barrier.all_gather_object(0)
        point(6)
    return found


@pytest.mark.parametrize("raisers", [(1,), (0, 2), (2,)])
@pytest.mark.parametrize("at", sorted({*range(POINTS)} - {3}))
def test_one_error_for_all(at: int, raisers: tuple[int, ...]) -> None:
    def program(group: ThreadGroup) -> str:
        def point(number: int) -> None:
            if number == at and group.rank in raisers:
                raise MemoryError(f"none at {at}")

        with pytest.raises(RestoreError) as caught:
            course(ErrorBarrier(group), point)
        return str(caught.value)

    (told,) = set(run_ranks(RANKS, program))
    assert f"rank {raisers[0]}: MemoryError: none at {at}" in told


def test_what_all_raise_is_each_ones_own() -> None:
    def program(group: ThreadGroup) -> str:
        with pytest.raises(KeyError) as caught, ErrorBarrier(group):
            raise KeyError(group.rank)
        return str(caught.value)

    assert run_ranks(RANKS, program) == ["0", "1", "2"]


def test_where_nothing_is_raised_it_is_the_group() -> None:
    found = run_ranks(RANKS, lambda group: course(ErrorBarrier(group), lambda number: None))
    assert found == [[0, 1, 2, 10, 11, 12, 1, 1, 1, 0, 0, 0]] * RANKS


def fail() -> None:
    raise OSError(5, "the disk fails")


def pass_by() -> None:
    """All is well."""


def test_it_is_good_for_another_stretch() -> None:
    def program(group: ThreadGroup) -> list[int]:
        error_barrier = ErrorBarrier(group)
        for raiser in range(RANKS):
            point = fail if group.rank == raiser else pass_by
            with pytest.raises(RestoreError), error_barrier:
                point()
        with error_barrier:
            return error_barrier.all_gather_object(group.rank)

    assert run_ranks(RANKS, program) == [[0, 1, 2]] * RANKS


def test_what_the_group_raises_goes_through_and_an_interrupt_tells_nobody() -> None:
    """The others could not be told; who asked once more would wait."""

    class Broken(SingleGroup):
        size, asked = 2, 0

        def all_gather_object(self, value: object) -> list[object]:
            self.asked += 1
            raise GroupAbortedError("a rank is gone")

    group = Broken()
    with pytest.raises(GroupAbortedError), ErrorBarrier(group) as error_barrier:
        error_barrier.all_gather_object(1)
    assert group.asked == 1
    with pytest.raises(KeyboardInterrupt), ErrorBarrier(group):
        raise KeyboardInterrupt
    assert group.asked == 1
