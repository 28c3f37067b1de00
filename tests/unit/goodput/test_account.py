"""The account of a job: every second has one category, and made-up jobs have the expected ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.event_stream import EventStream
from tierckpt.errors import ConfigError
from tierckpt.events import event_files
from tierckpt.goodput import Account, Ending, advice, read_records
from tierckpt.goodput import account_of as account


def account_of(folder: Path, gap_seconds: float = math.inf) -> Account:
    return account(*read_records(event_files([folder])), gap_seconds)


def spent(job: Account) -> dict[str, float]:
    """Seconds by category, without empty ones."""
    return {name: pytest.approx(s, abs=1e-6) for name, s in job.seconds.items() if s > 1e-9}


def first_run(rank: EventStream, world: int = 1) -> None:
    """Ten steps of a second from 6 to 16, the first one 2 s late; the process starts at 0."""
    rank.start(0, 3, 4, 5, world=world)
    rank.restored(6, 0, 1.0)
    rank.progress(9, 1, 0.0, begun=0, run="one")
    rank.progress(14, 6, 0.5)
    rank.progress(18, 10, 0.9)


@pytest.fixture
def rank(tmp_path: Path) -> EventStream:
    """The only one of a job that has made its first run."""
    made = EventStream(tmp_path)
    first_run(made)
    return made


def second_run(rank: EventStream, version: int) -> None:
    """The process starts at 25, and continues from this version at 30 with a step of a second."""
    rank.start(25, 28, 28.5, 29)
    rank.restored(30, version, 0.5)
    rank.progress(31, version + 1, begun=version, run="two")


def next_run(rank: EventStream, at: int, version: int) -> None:
    """Every part of its start takes a second, and so does its first step."""
    rank.start(at, at + 1, at + 2, at + 3)
    rank.restored(at + 4, version, 1.0)
    rank.progress(at + 5, version + 1, begun=version, run=f"the one at {at}")


def test_a_run_that_ended_well(rank: EventStream, tmp_path: Path) -> None:
    rank.closed(20, 10, 1.5)
    job = account_of(tmp_path)
    # A step takes (9 s - 0.9 s of stalls) / 9 = 0.9 s; the first one took 3 s.
    assert spent(job) == {
        "import": 3.0,
        "setup": 1.0,
        "attach": 1.0,
        "restore": 1.0,
        "first_step": 2.1,
        "training": 0.9 + 8.1 + 0.5,
        "checkpoint": 0.9,
        "close": 1.5,
    }
    assert job.elapsed_seconds == pytest.approx(20)
    assert job.goodput == job.runtime_goodput == pytest.approx(9.5 / 20)
    assert job.scheduling_goodput == 1.0
    assert (job.made_steps, job.lost_steps, job.failures) == (10, 0, 0)


def test_lost_work_is_what_was_made_again(rank: EventStream, tmp_path: Path) -> None:
    # Killed after the last record, at some moment before the next process starts.
    second_run(rank, 6)
    rank.progress(35, 11)
    rank.closed(35, 11, 0.0)
    job = account_of(tmp_path)
    seconds = spent(job)
    assert seconds["lost"] == 4.0  # from 14, when version 6 was complete, to 18
    assert seconds["relaunch"] == 7.0
    assert seconds["checkpoint"] == 0.5
    assert (job.made_steps, job.lost_steps, job.failures) == (15, 4, 1)
    assert job.elapsed_seconds == pytest.approx(35)
    assert job.scheduling_goodput == pytest.approx(28 / 35)
    # Killed within a period and two steps after the last record, if it did not hang.
    assert job.uncertain_seconds == pytest.approx(5 + 2 * 0.95)
    assert job.runs[0].ending is Ending.FAILED


def test_a_version_between_two_records_is_lost_in_proportion(
    rank: EventStream, tmp_path: Path
) -> None:
    second_run(rank, 8)
    job = account_of(tmp_path)
    assert spent(job)["lost"] == 2.0
    assert spent(job)["checkpoint"] == pytest.approx(0.7)
    assert job.lost_steps == 2


def test_a_version_newer_than_the_last_record_was_made(rank: EventStream, tmp_path: Path) -> None:
    second_run(rank, 12)
    job = account_of(tmp_path)
    assert (job.made_steps, job.lost_steps) == (13, 0)
    assert "lost" not in spent(job)


def test_sealed_versions_are_progress(rank: EventStream, tmp_path: Path) -> None:
    rank.write("sealed", 20, version=12, seconds={"stall": 0.1})
    second_run(rank, 10)
    job = account_of(tmp_path)
    assert (job.made_steps, job.lost_steps) == (13, 2)
    assert spent(job)["lost"] == 2.0


def test_the_shim_knows_when_a_process_was_killed(rank: EventStream, tmp_path: Path) -> None:
    rank.start(19.5, 19.5, 20, 21, failed=18.6, noticed=18.8, ended=19.2)
    rank.restored(22, 10, 1.0)
    rank.progress(23, 11, begun=10, run="two")
    job = account_of(tmp_path)
    seconds = spent(job)
    assert seconds["lost"] == pytest.approx(0.6)
    assert seconds["noticed"] == pytest.approx(0.2)
    assert seconds["ended"] == pytest.approx(0.4)
    assert seconds["relaunch"] == pytest.approx(0.3)
    assert job.uncertain_seconds == 0
    assert job.unseen_steps == 1


def test_a_hang_before_a_failure_is_no_lost_work(rank: EventStream, tmp_path: Path) -> None:
    """A process that survives its neighbour waits for it until a timeout, and reports then."""
    rank.progress(618, 10, 0.9, since_boundary=600.0, ended=True)
    next_run(rank, 620, 10)
    job = account_of(tmp_path)
    seconds = spent(job)
    assert seconds["lost"] == pytest.approx(1.8)  # two steps at most
    assert seconds["noticed"] == pytest.approx(598.2)
    assert seconds["relaunch"] == 2.0
    assert job.uncertain_seconds == 0


@pytest.mark.parametrize(("interrupted", "category"), [(False, "not_running"), (True, "waiting")])
def test_a_job_that_continues_a_day_later(
    rank: EventStream, tmp_path: Path, interrupted: bool, category: str
) -> None:
    rank.closed(19, 10, 1.0, "received SIGTERM" if interrupted else "", interrupted)
    next_run(rank, 86419, 10)
    rank.closed(86424, 11, 0.0)
    job = account_of(tmp_path)
    assert spent(job)[category] == 86400.0
    assert job.elapsed_seconds == pytest.approx(24 + 86400 * interrupted)
    assert (job.lost_steps, job.failures) == (0, 0)


def test_a_long_time_after_a_failure_counts_unless_told_otherwise(
    rank: EventStream, tmp_path: Path
) -> None:
    rank.start(7218, 7220, 7221, 7222)
    rank.restored(7223, 10, 1.0)
    rank.progress(7224, 11, begun=10, run="two")
    assert spent(account_of(tmp_path))["relaunch"] == 7200.0
    job = account_of(tmp_path, gap_seconds=3600)
    assert spent(job)["not_running"] == 7200.0
    assert job.failures == 1
    assert job.elapsed_seconds == pytest.approx(24)


def test_the_slowest_rank_s_stalls_count(tmp_path: Path) -> None:
    zero, one = EventStream(tmp_path), EventStream(tmp_path, 1, shift_seconds=-500)
    first_run(zero, world=2)
    zero.closed(18, 10, 0.0)
    one.start(1, 4, 4.5, 5, world=2)  # last to attach
    one.restored(6, 0, 1.0)
    one.progress(9, 1, 0.2, begun=0, run="one")
    one.progress(18, 10, 2.0)
    one.closed(18, 10, 0.0)
    job = account_of(tmp_path)
    (run,) = job.runs
    assert spent(job)["checkpoint"] == pytest.approx(2.0)
    assert spent(job)["rendezvous"] == spent(job)["attach"] == pytest.approx(0.5)
    assert (run.slowest_rank, run.last_to_attach, run.world) == (1, 1, 2)
    assert (run.slowest_seconds, run.fastest_seconds) == (2.0, 0.9)
    assert job.elapsed_seconds == pytest.approx(18)


def test_another_rank_s_record_may_be_the_newest(tmp_path: Path) -> None:
    zero, one = EventStream(tmp_path), EventStream(tmp_path, 1)
    first_run(zero, world=2)
    first_run(one, world=2)
    one.progress(20, 12, 1.0, ended=True, since_boundary=0.1)
    for rank in (zero, one):
        rank.start(25, 26, 27, 28, world=2)
        rank.restored(29, 10, 1.0)
        rank.progress(30, 11, begun=10, run="two")
    assert account_of(tmp_path).lost_steps == 2


def test_more_ranks_after_a_restart(tmp_path: Path) -> None:
    zero, one = EventStream(tmp_path / "a"), EventStream(tmp_path / "b", 1)
    first_run(zero)
    zero.start(20, 21, 22, 23, world=2)
    one.start(20, 21, 22, 23, world=2)
    for rank in (zero, one):
        rank.restored(24, 10, 1.0)
        rank.progress(25, 11, begun=10, run="two")
    found, notes = read_records(event_files([tmp_path / "a", tmp_path / "b"]))
    job = account(found, notes)
    assert [run.world for run in job.runs] == [1, 2]
    assert not [note for note in job.notes if "no records" in note]
    (note,) = [note for note in account_of(tmp_path / "a").notes if "no records" in note]
    assert note.startswith("run 2: 1 of 2 ranks")


def test_elastic_ranks_roll_back_in_memory(rank: EventStream, tmp_path: Path) -> None:
    """Horovod's survivors make another checkpointer in the same process, at their last commit."""
    rank.progress(18.5, 10, 0.9, since_boundary=0.5, ended=True)
    rank.start(0, 3, 20, 21, world=2)
    rank.progress(22, 9, begun=8, run="two")
    rank.progress(26, 13)
    rank.closed(26, 13, 0.0)
    job = account_of(tmp_path)
    assert (job.made_steps, job.lost_steps) == (15, 2)
    assert spent(job)["import"] == 3.0
    assert spent(job)["setup"] == 1.0 + 1.5
    assert spent(job)["lost"] == pytest.approx(2.5)
    assert "relaunch" not in spent(job)
    assert not any("tierckpt run" in text for text in advice(job, "events"))
    assert job.elapsed_seconds == pytest.approx(26)


def longer_second_run(rank: EventStream) -> None:
    second_run(rank, 10)
    rank.progress(35, 15)
    rank.closed(35, 15, 0.0)


@pytest.mark.parametrize("set_seconds", [-3600, 3600])
def test_a_clock_set_during_a_run_changes_no_restart(
    rank: EventStream, tmp_path: Path, set_seconds: float
) -> None:
    rank.shift_seconds = set_seconds
    rank.progress(20, 10)
    longer_second_run(rank)
    job = account_of(tmp_path)
    assert [(run.from_version, run.to_version) for run in job.runs] == [(0, 10), (10, 15)]
    assert job.seconds["relaunch"] == pytest.approx(5)
    assert job.elapsed_seconds == pytest.approx(35)


def test_a_clock_set_back_between_two_runs(rank: EventStream, tmp_path: Path) -> None:
    rank.shift_seconds = -3600
    longer_second_run(rank)
    job = account_of(tmp_path)
    assert [(run.from_version, run.to_version) for run in job.runs] == [(0, 10), (10, 15)]
    assert job.seconds["relaunch"] == 0
    assert job.elapsed_seconds == pytest.approx(18 + 10), "of both runs"
    assert any("run 2 started, by its clock, before the end" in note for note in job.notes)


def test_a_running_job(rank: EventStream, tmp_path: Path) -> None:
    job = account_of(tmp_path)
    assert job.runs[0].ending is Ending.OPEN
    assert (job.made_steps, job.lost_steps, job.failures) == (10, 0, 0)
    assert any("no end" in note for note in job.notes)


def test_jobs_at_the_same_time_are_refused(rank: EventStream, tmp_path: Path) -> None:
    rank.start(10, 17, 18.5, 19, job="other")
    rank.progress(20, 1, begun=0, run="two")
    with pytest.raises(ConfigError, match="several jobs at the same time"):
        account_of(tmp_path)


def test_frequent_records_make_the_end_more_exact(tmp_path: Path) -> None:
    rank = EventStream(tmp_path)
    rank.start(0, 3, 4, 5)
    rank.progress(9, 1, begun=0, run="one")
    for step in range(39):
        rank.write("sealed", 9.5 + step / 2, version=2 + step, seconds={"stall": 0.1})
    rank.start(60, 61, 62, 63)
    rank.restored(64, 40, 0.5)
    rank.progress(65, 41, begun=40, run="two")
    job = account_of(tmp_path)
    assert job.uncertain_seconds == pytest.approx(1.0)
