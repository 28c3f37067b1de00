"""Stall timeout: the wait for a slow store, and for a hanging one."""

from __future__ import annotations

from tierckpt.core import MAX_QUIET_SECONDS, QUIET_SECONDS, StallTimeout, most_quiet_seconds


def test_a_wait_with_progress_has_no_limit() -> None:
    wait = StallTimeout(10.0, now=100.0)
    for now in range(105, 1000, 5):
        wait.record_quiet(9.5, now)
        assert not wait.is_over(now)


def test_a_wait_without_progress_or_answers_ends() -> None:
    hangs, silent = StallTimeout(10.0, now=100.0), StallTimeout(10.0, now=100.0)
    over = []
    for now in range(104, 120, 2):
        hangs.record_quiet(now - 102.0, now)
        over.append((now, hangs.is_over(now), silent.is_over(now)))
    assert [now for now, _, quiet in over if quiet] == [114, 116, 118]
    assert [now for now, hung, _ in over if hung] == [116, 118]


def test_a_level_that_has_hung_for_long_is_not_waited_for_again() -> None:
    wait = StallTimeout(10.0, now=100.0)
    wait.record_quiet(1000.0, 101.0)
    assert not wait.is_over(101.0), "all of us may have been stopped"
    wait.record_quiet(1001.0, 102.0)
    assert wait.is_over(102.0)


def test_a_rank_that_was_stopped_with_all_others_waits_on() -> None:
    wait = StallTimeout(10.0, now=100.0)
    assert not wait.is_over(5000.0)
    wait.record_quiet(0.5, 5001.0)
    assert not wait.is_over(5001.0)


def test_a_large_version_may_take_longer_to_move_but_not_longer_than_a_collective() -> None:
    assert most_quiet_seconds(0) == QUIET_SECONDS
    assert most_quiet_seconds(10**9) == QUIET_SECONDS + 100
    assert most_quiet_seconds(10**13) == MAX_QUIET_SECONDS < 1800
