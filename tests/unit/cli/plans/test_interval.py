"""`tierckpt interval`, from a job's events and from times given by hand."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from tierckpt.cli import duration, observe, read_events, run_command
from tierckpt.events import EventLog


def said(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert run_command(["interval", *line]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert run_command(["interval", *line]) == 1
    return capsys.readouterr().err


class Story:
    """A job's events at a chosen pace, in the form that jobs write."""

    def __init__(self, folder: Path, ranks: int = 2) -> None:
        self.now = 1000.0
        self.logs = [EventLog(rank, str(folder)) for rank in range(ranks)]
        self.files = [str(folder / f"events-r{rank:05d}.jsonl") for rank in range(ranks)]

    def tell(self, name: str, **values: Any) -> None:
        for rank, log in enumerate(self.logs):
            own = {k: v[rank] if isinstance(v, list) else v for k, v in values.items()}
            log.emit(name, time_seconds=self.now, **own)

    def steps(self, versions: range, stalls: tuple[float, float] = (0.001, 0.002)) -> None:
        """A version every second step of 100 ms; every tenth goes to disk in half a second."""
        for version in versions:
            self.now += 0.1
            if version % 2 == 0:
                seconds = [{"boundary": s, "stall": s} for s in stalls]
                self.tell("sealed", level="memory", version=version, seconds=seconds)
            if version % 10 == 0:
                seconds = [{"write": 0.4, "commit": 0.1}] * 2
                self.tell("committed", level="local", version=version, seconds=seconds)

    def restarts(self, level: str, version: int, after: float) -> None:
        self.now += after
        self.tell("restored", level=level, version=version, seconds={"total": 0.2})

    def end(self) -> list[str]:
        for log in self.logs:
            log.close()
        return self.files


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_a_jobs_own_events_give_the_settings(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.tell("restored", level="", version=0)
    story.steps(range(1, 1001))
    story.restarts("memory", 1000, after=3.0)
    story.steps(range(1001, 2001))
    story.restarts("memory and local", 2000, after=7.0)
    story.steps(range(2001, 4001))
    files = [Path(name) for name in story.end()]
    job = observe(*read_events(files))
    assert job.step_seconds == pytest.approx(0.1)
    memory, local = job.levels["memory"], job.levels["local"]
    assert memory.cost_seconds == pytest.approx(0.002), "of the slower rank"
    assert memory.failures_per_second == pytest.approx(1 / 409.9, rel=1e-3)
    assert local.failures_per_second == memory.failures_per_second
    assert (memory.restart_seconds, local.restart_seconds) == pytest.approx((3.0, 7.0))
    assert local.latency_seconds == pytest.approx(0.5)
    out = said(capsys, "--events", *map(str, files), "--level", "local", "30ms")
    # Young: sqrt(2 x 2 ms x 410 s) is 1.28 s.
    assert "memory_every_steps=13, local_every_steps=52" in out


def test_a_job_that_ended_as_it_should_did_not_fail(story: Story) -> None:
    """It came back after a night in the queue; that night is not part of the job's time either."""
    story.steps(range(1, 1001))
    story.tell("closed", version=1000)
    story.restarts("local", 1000, after=40_000.0)
    story.steps(range(1001, 2001))
    story.restarts("memory", 2000, after=1.0)
    story.steps(range(2001, 3001))
    job = observe(*read_events([Path(name) for name in story.end()]))
    memory = job.levels["memory"]
    assert memory.failures_per_second == pytest.approx(1 / 301, rel=1e-2)
    assert job.levels["local"].failures_per_second == 0


def test_costs_that_the_job_measured_itself_are_believed(story: Story) -> None:
    story.steps(range(1, 101))
    cost = {"step": 0.1, "cost": 0.01}
    story.tell("interval", level="local", version=100, seconds=cost, message="every 9 steps")
    job = observe(*read_events([Path(name) for name in story.end()]))
    assert job.levels["local"].cost_seconds == 0.01
    assert job.notes == ()
    assert math.isnan(job.levels["memory"].failures_per_second), "nothing has failed yet"


def test_a_missing_measurement_is_reported(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.steps(range(1, 101))
    files = story.end()
    out = said(capsys, "--events", *files, "--failure-every", "1h")
    assert "Note: local counted at no cost" in out
    assert "--failure-every" in refused(capsys, "--events", *files)


def test_figures_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Young: sqrt(2 x 0.1 s x 2000 s) is 20 s; the higher order makes it 19.97 s."""
    out = said(capsys, "--step", "0.5", "--level", "memory", "100ms", "2000s")
    assert "memory_every_steps=40" in out
    out = said(capsys, "--step", "0.5", "--level", "memory", "100ms", "2000s", "--budget", "0.001")
    assert "memory_every_steps=200" in out


def test_the_last_line_of_a_killed_rank_may_be_cut(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.steps(range(1, 101))
    files = story.end()
    whole = Path(files[0]).read_text()
    Path(files[0]).write_text(whole + whole[:40])
    assert said(capsys, "--events", *files, "--failure-every", "1h")
    # The next run has continued on a new line.
    Path(files[0]).write_text(whole + whole[:40] + "\n" + whole)
    text = said(capsys, "--events", str(Path(files[0]).parent), "--failure-every", "1h")
    assert f"Note: {files[0]}: 1 unreadable line was left out" in text


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "--events"),
        ("--step 1 --level lokal 3ms", "memory, local, persistent"),
        ("--step 1 --level local", "one to three times"),
        ("--step 1 --level local soon", "'soon'"),
        ("--step 1 --level local 3ms", "--failure-every"),
        ("--level local 3ms 1h", "--step"),
        ("--step 1 --level local 3ms 1h --budget 2", "between 0 and 1"),
        ("--events /nowhere/events.jsonl", "/nowhere/events.jsonl"),
        ("--step 1 --level memory inf 6h", "'inf' is not a finite time of 0 or more"),
        ("--step 1 --level memory 2ms 6h inf", "'inf' is not a finite time of 0 or more"),
    ],
)
def test_missing_events_are_named(line: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert what in refused(capsys, *line.split())


def test_a_step_that_never_ends_is_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(["interval", "--step", "inf", "--level", "memory", "2ms", "6h"])
    assert "'inf' is not a finite time of 0 or more" in capsys.readouterr().err


def test_a_level_that_no_failure_needs_is_never_taken(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--step", "1s", "--level", "memory", "2ms", "inf")
    assert "memory_every_steps=0" in text


@pytest.mark.parametrize(
    "line",
    [
        b'{"time_seconds": 1}',
        b'{"time_seconds": 1, "name": "sealed"}',
        b'{"time_seconds":1,"name":"sealed","rank":0,"level":"memory","version":1,"seconds":{}}',
        b'{"time_seconds":1,"name":"sealed","rank":0,"level":"","version":1,"seconds":{"stall":"a"}}',
        b'{"time_seconds":1,"name":"sealed","rank":0,"level":"memory","version":1,"seconds":[1]}',
        b"[1]",
        b"\x80\x81",
    ],
)
def test_an_invalid_event_is_named(
    line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line + b"\n")
    assert f"{path}, line 1: not an event of a job" in refused(capsys, "--events", str(path))


def test_durations() -> None:
    assert [duration(t) for t in ("3", "20ms", "1.5s", "2m", "8h", "2d")] == pytest.approx(
        [3, 0.02, 1.5, 120, 28800, 172800]
    )
    for wrong in ("", "x", "3w", "-1", "nan", "s", "inf", "1e999", "infh"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{wrong}' is not a finite time"):
            duration(wrong)
