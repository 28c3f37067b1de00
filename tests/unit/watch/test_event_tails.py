"""The newest events of all ranks, read from the ends of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.event_stream import EventStream
from tierckpt.events import EventLog
from tierckpt.watch import EventsView, observer
from tierckpt.watch.observer import EventTails

STALLS = {0: 0.001, 1: 0.001, 2: 0.050, 3: 0.002}


def write(folder: Path, rank: int, *events: dict[str, Any]) -> None:
    log = EventLog(rank, str(folder))
    for event in events:
        log.emit(**event)
    log.close()


def sealed(version: int, stall: float) -> dict[str, Any]:
    return {"name": "sealed", "level": "memory", "version": version, "seconds": {"stall": stall}}


def skipped(version: int) -> dict[str, Any]:
    return {"name": "skipped", "level": "local", "version": version, "message": "busy"}


def look(tails: EventTails) -> EventsView:
    seen = tails.look()
    assert seen is not None
    return seen


def test_without_files_there_is_nothing_to_see(tmp_path: Path) -> None:
    assert EventTails(tmp_path).look() is None


def test_the_slowest_rank_is_named_beside_the_median(tmp_path: Path) -> None:
    for rank, stall in STALLS.items():
        write(tmp_path, rank, *(sealed(version, stall) for version in range(1, 6)))
    seen = look(EventTails(tmp_path))
    assert (seen.files, seen.stall_seconds, seen.worst_stall_seconds) == (4, 0.0015, 0.050)
    [slow] = seen.slow
    assert (slow.work, slow.rank, slow.seconds, slow.ranks) == ("stall", 2, 0.050, 4)
    assert slow.median_seconds == 0.0015


def test_a_version_that_all_ranks_skip_counts_once(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, sealed(1, 0.001), skipped(2), skipped(4))
    seen = look(EventTails(tmp_path))
    assert seen.counts == {"sealed/memory": 1, "skipped/local": 2}
    [incident] = seen.incidents
    assert (incident.name, incident.level, incident.version) == ("skipped", "local", 4)


def test_later_looks_read_only_what_was_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tails = EventTails(tmp_path)
    write(tmp_path, 0, sealed(1, 0.001))
    assert look(tails).counts == {"sealed/memory": 1}
    read = list[bytes]()
    record = observer.decode
    monkeypatch.setattr(observer, "decode", lambda line: read.append(line) or record(line))
    write(tmp_path, 0, skipped(2))
    write(tmp_path, 1, sealed(1, 0.001))
    seen = look(tails)
    assert (seen.files, seen.counts) == (2, {"sealed/memory": 1, "skipped/local": 1})
    assert len(read) == 2


def test_of_a_long_file_only_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "MAX_TAIL_BYTES", 4096)
    write(tmp_path, 0, *(sealed(version, 0.001) for version in range(200)), skipped(200))
    seen = look(EventTails(tmp_path))
    assert 5 < seen.counts["sealed/memory"] < 30
    assert seen.counts["skipped/local"] == 1


def test_files_beyond_a_limit_are_read_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "FILES_AT_ONCE", 2)
    for rank in range(5):
        write(tmp_path, rank, sealed(1, 0.001))
    tails = EventTails(tmp_path)
    look(tails)
    for rank in range(5):
        write(tmp_path, rank, sealed(2, 0.002), skipped(10 + rank))
    found = [look(tails).counts.get("skipped/local", 0) for _ in range(3)]
    assert found[0] == 2
    assert found[2] == 5


def test_a_half_written_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    write(tmp_path, 0, sealed(1, 0.001), sealed(2, 0.001))
    file = tmp_path / "events-r00000.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    tails = EventTails(tmp_path)
    assert look(tails).counts == {"sealed/memory": 1}
    file.write_bytes(whole)
    assert look(tails).counts == {"sealed/memory": 2}


def test_lines_of_something_else_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "events-r00000.jsonl").write_bytes(b'{"name": 3}\n[]\n\xff\n')
    write(tmp_path, 0, sealed(1, 0.001))
    assert look(EventTails(tmp_path)).counts == {"sealed/memory": 1}


def test_a_closed_job_is_known_by_its_last_event(tmp_path: Path) -> None:
    write(tmp_path, 0, sealed(1, 0.001), {"name": "closed", "message": "the training's end"})
    tails = EventTails(tmp_path)
    assert look(tails).closed == "the training's end"
    write(tmp_path, 0, sealed(2, 0.001))  # it was started again
    assert look(tails).closed == ""


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time of the look in stories at chosen times."""
    monkeypatch.setattr(observer.time, "time", lambda: 1000.0)
    return 1000.0


def story(folder: Path, rank: int = 0, begin: float = 900.0, **kwargs: Any) -> EventStream:
    """20 steps at 2 a second from `begin` on."""
    stream = EventStream(folder, rank, **kwargs)
    stream.start(begin - 3, begin - 2, begin - 1, begin)
    stream.progress(begin + 1, 1, begun=0, run="one")
    stream.progress(begin + 6, 11)
    stream.progress(begin + 11, 21)
    return stream


def test_records_of_progress_are_no_events_and_give_the_pace(tmp_path: Path, now: float) -> None:
    stream = story(tmp_path, begin=980.0)
    stream.write("sealed", 990.5, level="memory", version=20, seconds={"stall": 0.01})
    stream.progress(996, 31)
    seen = look(EventTails(tmp_path))
    assert seen.counts == {"sealed/memory": 1}
    assert (seen.steps_per_second, seen.newest_seconds) == (2.0, 996)


def test_the_pace_is_that_of_one_run(tmp_path: Path, now: float) -> None:
    stream = story(tmp_path)
    tails = EventTails(tmp_path)
    assert look(tails).steps_per_second == 2.0
    stream.start(920, 921, 922, 923)
    assert look(tails).steps_per_second is None
    stream.progress(931, 16, begun=15, run="two")
    assert look(tails).steps_per_second is None
    stream.progress(936, 36)
    assert look(tails).steps_per_second == 4.0
    stream.progress(940, 30, begun=29, run="three")  # rolled back
    assert look(tails).steps_per_second is None


def test_setting_a_clock_changes_no_pace(tmp_path: Path, now: float) -> None:
    stream = story(tmp_path, begin=980.0)
    stream.shift_seconds = -3600
    stream.progress(996, 31)
    seen = look(EventTails(tmp_path))
    assert (seen.steps_per_second, seen.newest_seconds) == (2.0, 996 - 3600)


def test_long_steps_need_more_patience(tmp_path: Path, now: float) -> None:
    stream = story(tmp_path)
    tails = EventTails(tmp_path)
    assert look(tails).fresh_seconds == 60
    stream.progress(900 + 311, 22)
    assert look(tails).fresh_seconds == 600
    stream.progress(900 + 316, 32)
    assert look(tails).fresh_seconds == 600


def test_ranks_of_former_runs_are_not_slow(tmp_path: Path, now: float) -> None:
    """A job of three ranks closed, and was started again on two."""
    for rank, end in ((0, 990.0), (1, 990.0), (2, 100.0)):
        stream = story(tmp_path, rank, begin=end - 20)
        stall = {"stall": 5.0 if rank == 2 else 0.01 * (1 + rank)}
        stream.write("sealed", end - 1, level="memory", version=20, seconds=stall)
        if rank == 2:
            stream.closed(end, 21, 0.0)
    seen = look(EventTails(tmp_path))
    assert (seen.files, seen.closed, seen.worst_stall_seconds) == (3, "", 0.02)
    [slow] = seen.slow
    assert (slow.rank, slow.ranks) == (1, 2)


def test_a_clock_far_ahead_decides_nothing(tmp_path: Path, now: float) -> None:
    story(tmp_path, 0, begin=980.0)
    story(tmp_path, 1, begin=980.0, shift_seconds=1e6)
    seen = look(EventTails(tmp_path))
    assert (seen.newest_seconds, seen.steps_per_second) == (991.0, 2.0)


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    write(tmp_path, 0, sealed(1, 0.001))
    (tmp_path / "events-r00001.jsonl").mkdir()
    tails = EventTails(tmp_path)
    assert look(tails).counts == {"sealed/memory": 1}
    assert tails.problems == [f"{tmp_path}/events-r00001.jsonl: Is a directory"]


@pytest.mark.parametrize(
    "line", [b'"time_seconds":1e999', b'"time_seconds":1,"version":1e999', b'"time_seconds":1e20']
)
def test_numbers_that_are_none_are_left_out(tmp_path: Path, line: bytes) -> None:
    line += b',"name":"sealed","level":"memory","rank":0,"seconds":{}'
    if b"version" not in line:
        line += b',"version":1'
    (tmp_path / "events-r00000.jsonl").write_bytes(b"{" + line + b"}\n")
    write(tmp_path, 0, sealed(1, 0.001))
    assert look(EventTails(tmp_path)).counts == {"sealed/memory": 1}
