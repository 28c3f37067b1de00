"""Decisions after the end of a script."""

from __future__ import annotations

import signal

import pytest

from tierckpt.run import Coordinator, End, Finish, Leave, Start, describe_end

KILLED = End(signal.SIGKILL, "boundary", passed_boundary=True)
FAILED = End(1 << 8, "attach")
GOOD = End(0, "boundary", passed_boundary=True)


def begun(size: int = 2, max_restarts: int = 3) -> Coordinator:
    job = Coordinator(size, max_restarts)
    assert job.start() == Start(1)
    return job


def test_a_failure_of_one_rank_starts_the_next_attempt_of_all() -> None:
    job = begun()
    order = job.ended(1, 1, KILLED)
    assert order == Start(2, "rank 1 was killed by SIGKILL; attempt 2 of 4 starts")
    assert job.ended(0, 1, FAILED) is None  # its peer had gone
    assert job.ended(0, 2, KILLED) == Start(
        3, "rank 0 was killed by SIGKILL; attempt 3 of 4 starts"
    )


def test_the_job_ends_when_all_have_ended_well() -> None:
    job = begun()
    assert job.ended(1, 1, GOOD) is None
    assert job.ended(0, 1, GOOD) == Finish()
    assert job.ended(0, 1, KILLED) is None


def test_a_rank_that_ended_well_starts_again_with_the_others() -> None:
    job = begun()
    assert job.ended(1, 1, GOOD) is None
    assert isinstance(job.ended(0, 1, KILLED), Start)
    assert job.ended(0, 2, GOOD) is None
    assert job.ended(1, 2, GOOD) == Finish()


def test_the_launcher_takes_over_after_the_last_attempt() -> None:
    job = begun(max_restarts=1)
    assert isinstance(job.ended(0, 1, KILLED), Start)
    order = job.ended(1, 2, KILLED)
    assert isinstance(order, Leave)
    assert order.text == (
        "rank 1 was killed by SIGKILL; --max-restarts 1 leaves no attempt. The launcher takes over"
    )
    assert job.ended(0, 2, KILLED) is None


def test_a_refused_start_is_not_repeated() -> None:
    """The next attempt would not be: the training that it waited for has gone."""
    order = begun().ended(1, 1, End(1 << 8, "refused"))
    assert isinstance(order, Leave)
    assert "refused at its start" in order.text


def test_the_same_failure_twice_before_a_boundary_is_not_repeated() -> None:
    job = begun(max_restarts=100)
    assert isinstance(job.ended(0, 1, FAILED), Start)
    order = job.ended(0, 2, FAILED)
    assert isinstance(order, Leave)
    assert "for the second time in a row before its first boundary" in order.text


@pytest.mark.parametrize(
    "between", [KILLED, End(2 << 8, "attach"), End(1 << 8, "script"), End(9, "attach")]
)
def test_other_failures_between_them_count(between: End) -> None:
    job = begun(max_restarts=100)
    for attempt, end in enumerate([FAILED, between, FAILED], 1):
        assert isinstance(job.ended(0, attempt, end), Start)


@pytest.mark.parametrize(
    "end",
    [
        End(75 << 8, "halting", True, is_final=True),
        End(signal.SIGTERM, "boundary", True),
        End(signal.SIGINT, "boundary", True),
        End(signal.SIGHUP, "boundary", True),
    ],
)
def test_an_end_that_somebody_asked_for_is_the_launchers(end: End) -> None:
    assert begun().ended(0, 1, end) == Leave("")


def test_no_restart_over_mpi() -> None:
    order = begun().ended(0, 1, End(9, "boundary", True, uses_mpi=True))
    assert isinstance(order, Leave)
    assert "a process that uses MPI cannot be started again under one mpirun" in order.text


def test_a_lost_shim_leaves_the_job_to_the_launcher_once() -> None:
    job = begun()
    assert job.leave("the shim of rank 1 has ended") == Leave(
        "the shim of rank 1 has ended. The launcher takes over"
    )
    assert job.leave("the shim of rank 2 has ended") is None
    assert job.ended(0, 1, KILLED) is None


def test_a_spare_takes_the_ranks_of_a_lost_node() -> None:
    job = begun(3, max_restarts=1)
    assert job.ended(1, 1, GOOD) is None
    assert job.lost("b", "c", [1, 2]) == Start(
        2, "node b is lost; spare c takes ranks 1, 2; attempt 2 of 2 starts"
    )
    assert job.ended(0, 1, FAILED) is None  # its peers had gone
    assert [job.ended(rank, 2, GOOD) for rank in range(3)] == [None, None, Finish()]
    assert job.lost("c", "d", [1, 2]) is None


def test_a_lost_node_uses_up_an_attempt() -> None:
    order = begun(max_restarts=0).lost("b", "c", [1])
    assert isinstance(order, Leave)
    assert order.text.startswith("node b is lost; --max-restarts 0 leaves no attempt")


def test_ends_as_text() -> None:
    assert describe_end(9) == "was killed by SIGKILL"
    assert describe_end(3 << 8) == "ended with status 3"
    assert describe_end(int(signal.SIGRTMIN) + 5).startswith("was killed by signal")
