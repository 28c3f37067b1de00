"""The records of a rank among its events."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.parts import boundary_at
from tierckpt.core import Stalls
from tierckpt.events import RECORDS, Event, EventLog
from tierckpt.format import VersionId
from tierckpt.goodput import Heartbeat
from tierckpt.restored import Restored

Line = dict[str, Any]
JOB: Any = SimpleNamespace(history=SimpleNamespace(job="job"))


def restored(version: int) -> Restored:
    result = Restored(version)
    result.version = version
    return result


class Rank:
    """A heartbeat with its file."""

    def __init__(self, folder: Path, period_seconds: float) -> None:
        self.events: list[Event] = []
        self.log = EventLog(0, str(folder), self.events.append)
        self.path = folder / "events-r00000.jsonl"
        self.stalls = Stalls()
        self.beat = Heartbeat(self.log, period_seconds, 2, time.monotonic(), self.stalls)

    def boundary(self, version: int, seconds: float = 0.0) -> None:
        """A boundary of so long, as the loop counts it."""
        self.stalls.boundary_seconds += seconds
        self.stalls.passed_seconds, self.stalls.version = time.perf_counter(), version
        self.beat.boundary_ends(boundary_at(version))

    def lines(self, name: str = "progress") -> list[Line]:
        lines = map(json.loads, self.path.read_text().splitlines())
        return [line for line in lines if line["name"] == name]


def test_the_first_boundary_after_each_start_is_recorded(tmp_path: Path) -> None:
    rank = Rank(tmp_path, period_seconds=1e6)
    rank.beat.attached(JOB)
    for version in (1, 2, 3):
        rank.boundary(version)
    rank.beat.continues_from(restored(2), VersionId(1, 2), 2)
    for version in (3, 4):
        rank.boundary(version)
    assert [line["version"] for line in rank.lines()] == [1, 3]
    assert [line["facts"] for line in rank.lines()] == [
        {"from": 0, "run": "run"},
        {"from": 2, "run": "run"},
    ]
    (attached,) = rank.lines("attached")
    assert attached["facts"] == {"job": "job"}
    rank.log.close()


def test_stalls_are_sums_since_the_last_restore(tmp_path: Path) -> None:
    rank = Rank(tmp_path, period_seconds=0)
    rank.boundary(1, 10.0)
    rank.stalls.barrier_seconds += 10.0
    rank.boundary(2, 10.0)
    with rank.beat.saving(trained=True):
        rank.boundary(3, 10.0)
    rank.boundary(4)
    rank.beat.continues_from(restored(4), VersionId(1, 4), 2)
    rank.boundary(5)
    rounded = [
        [round(line["seconds"][name], -1) for name in ("boundary", "barrier", "save")]
        for line in rank.lines()
    ]
    assert rounded == [[10, 0, 0], [20, 10, 0], [30, 10, 0], [20, 10, 0], [0, 0, 0]]
    rank.log.close()


def test_an_end_without_close_leaves_the_last_state(tmp_path: Path) -> None:
    rank = Rank(tmp_path, period_seconds=1e6)
    rank.boundary(1)
    rank.boundary(2)
    rank.beat.left(abandoned=True)
    _, last = rank.lines()
    assert (last["version"], last["facts"]["ended"]) == (2, True)
    assert last["facts"]["since_boundary"] >= 0
    rank.log.close()


def test_the_start_of_the_process_is_the_system_s(tmp_path: Path) -> None:
    rank = Rank(tmp_path, period_seconds=1)
    (line,) = rank.lines("started")
    started = line["time_seconds"] - sum(line["seconds"].values())
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    assert started == pytest.approx(boot + int(stat[19]) / os.sysconf("SC_CLK_TCK"), abs=0.5)
    assert (line["facts"]["world"], line["facts"]["pid"]) == (2, os.getpid())
    assert min(line["seconds"].values()) >= 0
    rank.log.close()


@pytest.mark.parametrize(
    ("moments", "facts"),
    [
        ("1.5 2.5 3.5", {"failed": 1.5, "noticed": 2.5, "ended": 3.5}),
        ("1.5 2.5", {}),
        ("a b c", {}),
        ("", {}),
    ],
)
def test_moments_of_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: str, facts: dict[str, float]
) -> None:
    monkeypatch.setenv("TIERCKPT_RESTART", moments)
    rank = Rank(tmp_path, period_seconds=1)
    found = rank.lines("started")[0]["facts"]
    assert {name: found[name] for name in ("failed", "noticed", "ended") if name in found} == facts
    rank.log.close()


def test_records_are_in_the_file_alone(tmp_path: Path) -> None:
    rank = Rank(tmp_path, period_seconds=0)
    rank.beat.attached(JOB)
    rank.boundary(1)
    assert (rank.events, rank.log.counts) == ([], {})
    assert all(rank.lines(name) for name in RECORDS)
    rank.log.close()


def test_nothing_is_written_without_a_folder() -> None:
    log = EventLog(0)
    beat = Heartbeat(log, 0, 1, time.monotonic(), Stalls())
    beat.attached(JOB)
    beat.boundary_ends(boundary_at(1))
    beat.continues_from(restored(1), VersionId(1, 1), 2)
    beat.boundary_ends(boundary_at(2))
    beat.left(abandoned=True)
    log.close()
