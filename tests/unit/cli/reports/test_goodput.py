"""`tierckpt goodput`: tables, JSON and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.event_stream import EventStream
from tierckpt.cli import observe, read_events, run_command
from tierckpt.goodput import CATEGORIES, document

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """A job on two ranks that failed once."""
    streams = [EventStream(tmp_path / "events", rank) for rank in range(2)]
    for stream in streams:
        stream.start(0, 3, 4, 5 + stream.rank, world=2)
        stream.restored(7, 0, 1.0)
        stream.progress(8, 1, 0.1, begun=0, run="one")
        stream.progress(26, 10, 0.5 + 0.25 * stream.rank)
        stream.write("sealed", 26, version=8, level="memory", seconds={"stall": 0.1})
        stream.start(40, 43, 44, 45, world=2)
        stream.restored(47, 8, 1.0)
        stream.progress(49, 9, begun=8, run="two")
        stream.progress(71, 20)
        stream.closed(72, 20, 1.0)
    return tmp_path / "events"


def said(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert run_command(["goodput", *line]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert run_command(["goodput", *line]) == 1
    return capsys.readouterr().err


def test_tables(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, str(events))
    lines = [line.split() for line in text.splitlines()]
    assert ["lost", "work", "4.00", "5.6", "%", "1", "wasted", "progress"] in lines
    assert re.search(r"^elapsed +72\.00 +100\.0 %", text, re.MULTILINE)
    assert re.search(r"2 +\d{4}-.* 8 to 20 .* closed: the training's end$", text, re.MULTILINE)
    assert re.search(r"1 +\d{4}-.* 0 to 10 .* failed \(± \d+\.\d s\)$", text, re.MULTILINE)
    assert "20 of 22 steps counted, and 2 were lost (1 failure); up to" in text
    assert "Slowest checkpoints: rank 1 in run 1, 0.75 s" in text
    assert f"`tierckpt interval --events {events}`" in text
    assert "`tierckpt run` keeps torch imported" in text
    assert "program unknown" in text


def test_the_command_of_the_advice_works(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["interval", "--events", str(events), "--step", "2s"]) == 0
    assert "memory_every_steps=" in capsys.readouterr().out


def test_records_do_not_shorten_a_restart(events: Path) -> None:
    job = observe(*read_events([events]))
    # From the last event before the failure, at 26, to the end of the restore, at 47.
    assert job.levels["memory"].restart_seconds == pytest.approx(21.0)


def test_json_sums(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(said(capsys, str(events), "--json"))
    assert set(found["categories"]) == set(CATEGORIES)
    each = found["categories"].values()
    assert sum(one["seconds"] for one in each) == pytest.approx(found["elapsed_seconds"])
    assert sum(one["share"] for one in each) == pytest.approx(1)
    assert found["elapsed_seconds"] == pytest.approx(72)
    product = found["scheduling_goodput"] * found["runtime_goodput"]
    assert product == pytest.approx(found["goodput"])
    assert found["program_goodput"] is None
    assert [run["slowest_rank"] for run in found["runs"]] == [1, 0]


def test_the_json_has_the_documented_fields(
    events: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = json.loads(said(capsys, str(events), "--json"))
    page = (ROOT / "docs" / "goodput.md").read_text()
    named = set(re.findall(r"`(\w+)`", str(document.__doc__)))
    there = set(found) | set(found["runs"][0]) | set(found["categories"]["training"])
    assert there <= named
    assert all(f"| `{name}` |" in page for name in CATEGORIES)


def test_program_goodput(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = ("--step-flop", "1e12", "--peak-flops", "2e12")
    found = json.loads(said(capsys, str(events), "--json", *figures))
    training = found["categories"]["training"]["seconds"]
    assert found["program_goodput"] == pytest.approx(20 / (2 * training))
    assert "program unknown" not in said(capsys, str(events), *figures)
    assert "both" in refused(capsys, str(events), "--step-flop", "1e12")
    assert "more than 0" in refused(capsys, str(events), "--step-flop", "-1", "--peak-flops", "1")


def test_gap(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, str(events), "--gap", "10s")
    assert re.search(r"^not running +14\.00 +1 +not counted$", text, re.MULTILINE)
    assert re.search(r"^elapsed +58\.00", text, re.MULTILINE)


def test_no_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give the folder in the setting events_dir" in refused(capsys, str(tmp_path))
