"""Leases of a persistent path: one run at a time may write there, and takes over from dead ones."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierckpt.cli import run_command
from tierckpt.storage.persistent import (
    LEASE_SECONDS,
    FlushCancelledError,
    Lease,
    LeaseHeldError,
    LeaseKeeper,
    LeaseRecord,
    PersistentStore,
    RetryPolicy,
)

PATIENCE_SECONDS = 60.0


def made(place: Path) -> PersistentStore:
    return PersistentStore(str(place), retry=RetryPolicy(tries=1))


class FakeClock:
    """A clock that stands still until it is advanced. `wrong_seconds` is the error of its time of
    day."""

    def __init__(self, wrong_seconds: float = 0.0) -> None:
        self.seconds, self.wrong_seconds = 1e9, wrong_seconds

    def now(self) -> float:
        return self.seconds + self.wrong_seconds

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        raise AssertionError("a lease does not wait")


def lease(place: Path, run_id: str, clock: FakeClock) -> Lease:
    return made(place).lease(run_id, f"job of {run_id}", clock)


def test_a_lease_is_one_lifes_until_it_expires(tmp_path: Path) -> None:
    clock = FakeClock()
    first, second = lease(tmp_path, "1111", clock), lease(tmp_path, "2222", clock)
    member = lease(tmp_path, "1111", clock)
    assert first.ensure() == member.ensure() == 1
    for seconds, left in ((0, 120), (100, 20)):
        clock.seconds += seconds
        with pytest.raises(LeaseHeldError, match=f"in use by job of 1111.* {left} s"):
            second.ensure()
    member.keep()  # a quarter of the time has passed: renewed, for all of this run
    for seconds, left in ((100, 120), (100, 20)):
        clock.seconds += seconds
        with pytest.raises(LeaseHeldError, match=f" {left} s"):
            second.ensure()
    clock.seconds += 20
    assert second.ensure() == 2
    assert second.held()
    assert not first.held()
    with pytest.raises(LeaseHeldError, match="job of 2222"):
        first.ensure()
    second.release()
    assert first.ensure() == 1


def test_a_job_does_not_wait_for_its_own_dead_run(tmp_path: Path) -> None:
    clock = FakeClock()
    before, now = (made(tmp_path).lease(run_id, "us on node1", clock) for run_id in ("11", "22"))
    other = lease(tmp_path, "33", clock)
    assert before.ensure() == 1
    assert now.ensure() == 2
    with pytest.raises(LeaseHeldError):
        other.ensure()
    assert now.held()
    assert not before.held()


def test_where_a_store_overwrites_the_first_writer_finds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw a free lease, and the store ignores `exclusive`."""
    clock = FakeClock()
    first, second = lease(tmp_path, "1111", clock), lease(tmp_path, "2222", clock)
    put = first._backend.put

    def heedless(name: str, windows: Any, nbytes: int, exclusive: bool) -> None:
        put(name, windows, nbytes, False)
        second._write(1, "theirs")

    monkeypatch.setattr(first._backend, "put", heedless)
    with pytest.raises(LeaseHeldError, match="job of 2222"):
        first.ensure()
    assert second.held()


def test_a_run_with_a_successor_does_not_take_the_lease_back(tmp_path: Path) -> None:
    """It is still alive, and has a version to flush: its successor does not follow a dead run."""
    clock = FakeClock()
    before, now = (made(tmp_path).lease(run_id, "us on node1", clock) for run_id in ("11", "22"))
    before.ensure()
    now.ensure()
    for again in (before.ensure, before.keep):
        clock.seconds += 40
        with pytest.raises(LeaseHeldError, match="us on node1"):
            again()
        now.keep()
    assert now.held()
    with pytest.raises(LeaseHeldError):
        before.ensure()
    clock.seconds += LEASE_SECONDS
    before.ensure()  # it has no holder now
    assert before.held()


def test_a_lease_that_was_abandoned_is_neither_renewed_nor_taken(tmp_path: Path) -> None:
    clock = FakeClock()
    old = made(tmp_path).lease("11", "us on node1", clock)
    for _ in range(2):
        old.ensure()
        old.abandon()
        clock.seconds += 100
        for again in (old.ensure, old.renew):
            with pytest.raises(FlushCancelledError):
                again()
        old = made(tmp_path).lease("22", "us on node1", clock)


def test_a_lease_that_was_given_back_or_damaged_is_free(tmp_path: Path) -> None:
    clock = FakeClock()
    first, second = lease(tmp_path, "1111", clock), lease(tmp_path, "2222", clock)
    first.ensure()
    second.release()  # not its own
    assert first.held()
    first.release()
    assert second.ensure() == 1
    (tmp_path / "lease.000001").write_bytes(b"rubbish")
    assert first.ensure() == 2


def test_a_holder_that_wakes_up_late_and_its_follower_do_not_both_hold(tmp_path: Path) -> None:
    """Every order of the holder's renewal and the follower's steps."""
    for step in ("before", "between"):
        place = tmp_path / step
        place.mkdir()
        clock = FakeClock()
        old, new = lease(place, "1111", clock), lease(place, "2222", clock)
        old.ensure()
        assert new.newest() is not None
        clock.seconds += 1000
        expired = new.newest()
        assert expired is not None
        assert new._free(expired)
        if step == "before":
            old._write(1)  # renewed after the follower looked, before it took
            assert new._take(2, expired) is None
            with pytest.raises(LeaseHeldError):
                new.ensure()
            assert old.held()
        else:
            assert new._take(2, expired) == 2
            old._write(1)  # it had seen its lease in time, and writes only now
            with pytest.raises(LeaseHeldError):
                old._check_followers(1)
            assert new.held()


def test_a_place_is_taken_from_a_job_that_hangs(tmp_path: Path) -> None:
    clock = FakeClock()
    store = made(tmp_path)
    assert store.take_over() is None, "nobody's"
    clock.seconds = time.time()
    hung, waiting = lease(tmp_path, "1111", clock), lease(tmp_path, "2222", clock)
    hung.ensure()
    with pytest.raises(LeaseHeldError, match=f"tierckpt takeover {re.escape(store.url)}"):
        waiting.ensure()
    assert store.take_over() == "job of 1111"
    clock.seconds = time.time()
    assert not hung.renew(), "its keeper ends"
    assert waiting.ensure() == 3
    with pytest.raises(LeaseHeldError, match="job of 2222"):
        hung.ensure()
    assert [p.name for p in tmp_path.iterdir()] == ["lease.000003"]


def test_the_command_that_takes_a_place_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path).lease("1111", "job on node1").ensure()
    assert run_command(["takeover", str(tmp_path)]) == 0
    assert "taken from job on node1; the next job" in capsys.readouterr().out
    assert run_command(["takeover", str(tmp_path)]) == 0
    assert "no job holds it" in capsys.readouterr().out
    assert run_command(["takeover", str(tmp_path / "jbo")]) == 1
    assert "is not a directory" in capsys.readouterr().err
    made(tmp_path).lease("2222", "job on node2").ensure()


def test_a_lease_is_kept_from_a_thread_until_it_is_lost(tmp_path: Path) -> None:
    def newest() -> LeaseRecord:
        found = lease.newest()
        assert found is not None
        return found

    def until(true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    lease = made(tmp_path).lease("11", "us")
    lease.ensure()
    keeper = LeaseKeeper(lambda: made(tmp_path), every_seconds=0.001)
    try:
        before = newest()
        keeper.keep("11", "us")
        keeper.keep("11", "us")
        until(lambda: newest().expires_seconds > before.expires_seconds)
        assert newest().number == before.number
        follower = made(tmp_path).lease("22", "us")
        follower.ensure()
        until(lambda: keeper._thread is None)
        assert follower.held()
        keeper.keep("22", "us")
        before = newest()
        until(lambda: newest().expires_seconds > before.expires_seconds)
        assert newest().run_id == "22"
    finally:
        keeper.close()


def test_only_the_member_that_creates_takes_the_first_lease(tmp_path: Path) -> None:
    clock = FakeClock()
    first = lease(tmp_path, "1111", clock)
    second = made(tmp_path).lease("1111", "job of 1111", clock, creates=False)
    with pytest.raises(FileNotFoundError, match="is it mounted"):
        second.ensure()
    assert list(tmp_path.iterdir()) == []
    assert first.ensure() == second.ensure() == 1
    clock.seconds += 1000
    assert second.ensure() == 2, "one that ended may be followed by anybody"


# --- clocks --------------------------------------------------------------------------------------

DAY_SECONDS = 86400.0


@pytest.mark.parametrize("wrong_seconds", [-DAY_SECONDS, 0.0, DAY_SECONDS])
def test_a_dead_holder_is_waited_for_as_long_as_a_lease_lasts_whatever_its_clock(
    wrong_seconds: float, tmp_path: Path
) -> None:
    clock = FakeClock()
    dead, waiting = (
        lease(tmp_path, "1111", FakeClock(wrong_seconds)),
        lease(tmp_path, "2222", clock),
    )
    dead.ensure()
    start = clock.seconds
    while True:
        try:
            waiting.ensure()
            break
        except LeaseHeldError:
            clock.seconds += 5
    assert clock.seconds - start == LEASE_SECONDS
    assert waiting.held()


@pytest.mark.parametrize("wrong_seconds", [-DAY_SECONDS, DAY_SECONDS])
def test_a_living_holder_keeps_the_place_whatever_the_clocks(
    wrong_seconds: float, tmp_path: Path
) -> None:
    wrong = FakeClock(wrong_seconds)
    for holder_clock, clock in ((wrong, FakeClock()), (FakeClock(), wrong)):
        place = tmp_path / f"{holder_clock.wrong_seconds:+}"
        place.mkdir()
        holder, waiting = lease(place, "1111", holder_clock), lease(place, "2222", clock)
        for _ in range(40):
            holder.ensure()
            with pytest.raises(LeaseHeldError):
                waiting.ensure()
            clock.seconds += 10
            holder_clock.seconds += 10
        assert holder.held()


def test_a_holder_with_a_jumping_clock_keeps_renewing(tmp_path: Path) -> None:
    clock, others = FakeClock(), FakeClock()
    holder, waiting = lease(tmp_path, "1111", clock), lease(tmp_path, "2222", others)
    for wrong_seconds in (0.0, -DAY_SECONDS, DAY_SECONDS):
        clock.wrong_seconds = wrong_seconds
        for _ in range(30):
            holder.ensure()
            with pytest.raises(LeaseHeldError):
                waiting.ensure()
            clock.seconds += 10
            others.seconds += 10
