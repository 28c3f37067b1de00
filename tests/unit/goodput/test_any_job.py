"""Whatever happens to a job, its parts sum to its time, and none is negative."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.event_stream import EventStream
from tierckpt.events import event_files
from tierckpt.goodput import account_of, read_records

seconds = st.floats(0, 50)
ENDS = ("killed", "killed early", "closed", "interrupted", "error", "restored")


@dataclass(frozen=True)
class Life:
    """One run: its starting times, steps with a record, stalls, and end."""

    gap: float
    startup: tuple[float, float, float, float]
    restore: float
    back: float
    """Share of the steps so far that the restore gives up."""
    steps: list[tuple[int, float, float]]
    """Steps since the last record, seconds since then, and share of these that were stalls."""
    end: str
    late: float
    shim: bool


lives = st.builds(
    Life,
    st.floats(0.01, 50),
    st.tuples(seconds, seconds, seconds, seconds),
    seconds,
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(0, 40), seconds, st.floats(0, 2)), max_size=6),
    st.sampled_from(ENDS),
    seconds,
    st.booleans(),
)


class Job:
    """Writes the events of a job with some ranks, and knows its time."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.streams = [EventStream(folder, rank, 7.0 * rank) for rank in range(ranks)]
        self.now, self.version = 100.0, 0
        self.began = self.last = 0.0

    def run(self, number: int, life: Life) -> None:
        failed = self.now
        self.now += life.gap
        process = self.now
        self.began = self.began or process
        at = [process := process + each for each in (0.0, *life.startup[:3])]
        facts: dict[str, Any] = {}
        if life.shim and number:
            facts = {"failed": failed, "noticed": failed + life.late, "ended": failed + 60}
        for stream in self.streams:
            own = dict(facts) if stream.rank == 0 else {}
            stream.start(at[0], at[1], at[2], at[3], world=len(self.streams), **own)
        self.now = self.last = at[3]
        if life.end == "killed early":
            return
        self._restore(life)
        self._train(life, f"run {number}", self.version)
        if life.end == "restored":
            self.now += life.late
            self._restore(life)
            self._train(life, f"again {number}", self.version)
        self.now += life.late
        for stream in self.streams:
            if life.end in ("closed", "interrupted"):
                interrupted = life.end == "interrupted"
                stream.closed(self.now, self.version, life.late / 2, interrupted=interrupted)
            elif life.end == "error":
                stream.progress(self.now, self.version, since_boundary=life.late, ended=True)
            else:
                continue
            self.last = self.now

    def _restore(self, life: Life) -> None:
        self.now += life.restore
        self.version = int(self.version * (1 - life.back))
        for stream in self.streams:
            stream.restored(self.now, self.version, life.restore)
        self.last = self.now

    def _train(self, life: Life, run: str, started: int) -> None:
        stall = 0.0
        for number, (steps, took, share) in enumerate(life.steps):
            self.version += max(steps, int(number == 0))
            self.now, stall = self.now + took, stall + took * share
            facts = {"begun": started, "run": run} if number == 0 else {}
            for stream in self.streams:
                more = stall * (1 + stream.rank)
                stream.progress(self.now, self.version, more, **facts)
            self.last = self.now


@settings(max_examples=60, deadline=None)
@given(st.lists(lives, min_size=1, max_size=5), st.integers(1, 3))
def test_parts_sum_to_the_job_s_time(all_lives: list[Life], ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), ranks)
        for number, life in enumerate(all_lives):
            job.run(number, life)
        found = account_of(*read_records(event_files([Path(folder)])))
    parts = [part for run in found.runs for part in run.parts]
    assert all(part.seconds >= 0 for part in parts)
    assert sum(part.seconds for part in parts) == pytest.approx(job.last - job.began, abs=1e-4)
    assert sum(found.seconds.values()) == pytest.approx(job.last - job.began, abs=1e-4)
    for one, after in pairwise(parts):
        assert one.start + one.seconds == pytest.approx(after.start, abs=1e-4)
    assert 0 <= found.goodput <= 1
    assert 0 <= found.lost_steps <= found.made_steps
    # The steps that count lead from nothing to the newest version.
    assert found.made_steps - found.lost_steps == job.version
