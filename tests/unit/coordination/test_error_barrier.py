"""An error that one rank raises in a block, all ranks raise, and no rank waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tierckpt.coordination import ErrorBarrier, gather_or_raise
from tierckpt.errors import ConfigError, RestoreError, TierckptError
from tierckpt.group import SingleGroup
from tierckpt.testing import GroupAbortedError, ThreadGroup, run_ranks

RANKS = 3
POINTS = 7


def course(error_barrier: ErrorBarrier, point: Callable[[int], None]) -> list[int]:
    """Several collectives, and a rank's work between them."""
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


def test_an_error_raised_on_all_ranks_is_each_ranks_own() -> None:
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
    """No rank fails."""


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


def test_an_error_of_the_group_passes_through_and_an_interrupt_is_not_shared() -> None:
    """The others cannot be informed; a rank that gathered once more would wait."""

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


# --- one function ---------------------------------------------------------------------------


def named(ranks: list[int], theirs: TierckptError) -> TierckptError:
    return RestoreError(f"{ranks}: {type(theirs).__name__}: {theirs}")


def gathered(raised: dict[int, Exception]) -> list[object]:
    """Return each rank's result or error, where these ranks raise."""

    def program(group: ThreadGroup) -> object:
        def work() -> int:
            if group.rank in raised:
                raise raised[group.rank]
            return 10 + group.rank

        if not raised:
            return gather_or_raise(group, work, named)
        with pytest.raises(RestoreError) as caught:
            gather_or_raise(group, work, named)
        assert caught.value.__cause__ is raised.get(group.rank)
        return str(caught.value)

    return run_ranks(RANKS, program)


def test_all_ranks_receive_the_result_of_each() -> None:
    assert gathered({}) == [[10, 11, 12]] * RANKS


@pytest.mark.parametrize("raisers", [{1}, {0, 2}, {0, 1, 2}])
def test_all_ranks_raise_the_first_error_with_the_ranks_that_share_it(
    raisers: set[int],
) -> None:
    told = gathered({rank: ConfigError("no such place") for rank in raisers})
    assert told == [f"{sorted(raisers)}: ConfigError: no such place"] * RANKS
    two = gathered({1: OSError(5, "the disk fails"), 2: ConfigError("no such place")})
    assert two == ["[1]: TierckptError: OSError: [Errno 5] the disk fails"] * RANKS


def test_an_error_of_a_rank_itself_is_not_raised_from_its_copy() -> None:
    def program(group: ThreadGroup) -> None:
        own = ConfigError("no such place")

        def work() -> None:
            raise own

        with pytest.raises(ConfigError) as caught:
            gather_or_raise(group, work, lambda ranks, theirs: ConfigError(str(theirs)))
        assert caught.value is own
        assert own.__cause__ is None

    run_ranks(RANKS, program)


def test_an_error_passed_on_keeps_its_cause() -> None:
    def work() -> None:
        raise ConfigError("no such place") from KeyError("cause")

    with pytest.raises(ConfigError) as caught:
        gather_or_raise(SingleGroup(), work, lambda ranks, theirs: theirs)
    assert isinstance(caught.value.__cause__, KeyError)
