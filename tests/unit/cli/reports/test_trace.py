"""`tierckpt trace`, and the command line around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierckpt.cli import run_command
from tierckpt.tracing import (
    ALLREDUCE,
    COPIER,
    MAX_ROWS,
    TRAINING,
    TREE_ROW,
    Span,
    Timeline,
    TimelineError,
    Trace,
    load_traces,
    rows_of_step,
    step_of,
    typical_version,
)

US = 1e-6


def write_trace(folder: Path, rank: int, versions: int = 3) -> Path:
    """A trace of steps of 1000 microseconds, made with the recorder itself; step v takes v more."""
    path = folder / f"trace-r{rank:05d}.json"
    trace = Trace(path, rank, versions + 1, lambda _: "", lambda _: None)
    trace._epoch_us = 1e15  # without a fraction, so that durations are not rounded
    at = 1000.0
    for version in range(1, versions + 1):

        def span(kind: str, first: int, end: int, row: int, **args: Any) -> None:
            trace.span(kind, at + first * US, at + end * US, row, version=version, **args)  # noqa: B023

        span("boundary", 0, 50, TRAINING)
        layers = {"layers": ["body.0.weight", "body.0.bias"], "bytes": 4000}
        span("allreduce", 300, 500, ALLREDUCE, **layers)
        span("copy", 310, 410, COPIER, **layers)
        span("tree", 420, 430, COPIER)
        span("barrier", 800, 850 + version, TRAINING)
        span("update", 900, 990, TRAINING)
        at += 1000 * US
    trace.close()
    return path


@pytest.fixture
def traces(tmp_path: Path) -> list[str]:
    return [str(write_trace(tmp_path, rank)) for rank in (0, 1)]


def test_a_summary_says_the_numbers(traces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["trace", "summary", "--ours", *traces]) == 0
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines()]
    assert ["1 KiB to 4 KiB", "6", "0.200", "0.200", "0.200", "0.200"] in rows
    assert ["between weight updates", "4", "0.910", "0.910", "0.910"] in rows
    assert ["barrier", "6", "0.051", "0.052", "0.053"] in rows
    assert ["hidden under allreduces", "0.660", "100.0 %"] in rows


def test_a_summary_can_leave_out_the_first_steps(
    traces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["trace", "summary", "--from-version", "3", "--ours", *traces]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    assert [row[2].strip() for row in rows if row[1:] and row[1].strip() == "barrier"] == ["2"]
    assert run_command(["trace", "summary", "--from-version", "9", "--ours", *traces]) == 1
    assert "no boundary of v9" in capsys.readouterr().err


def test_a_merge_is_one_file(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged.json"
    assert run_command(["trace", "merge", str(out), "--ours", *traces]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert "merged.json: 38 spans of 2 rank(s)" in capsys.readouterr().out


def test_bad_input_is_named(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text('[{"ph": "B", "name": "x", "ts": 1}]')
    for files, problem in (
        ([str(tmp_path / "none.json")], "cannot read"),
        ([str(tmp_path / "other.json")], "give Horovod's timeline with --horovod"),
        ([traces[0], traces[0]], "both of rank 0"),
        ([*traces, "--horovod", traces[0]], "has no start time"),
    ):
        assert run_command(["trace", "summary", "--ours", *files]) == 1
        said = capsys.readouterr().err
        assert problem in said
        assert said.startswith("tierckpt: ")
        assert str(tmp_path) in said


def test_a_timeline_of_another_run_is_refused(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = {"start_time_since_epoch_in_micros": 1000}
    first = {"ph": "B", "name": "ALLREDUCE", "ts": 1, "pid": 1}
    entries = [
        {"ph": "M", "pid": 0, "args": start},
        {"ph": "M", "pid": 1, "args": {"name": "allreduce.a"}},
        first,
        {"ph": "E", "ts": 2, "pid": 1},
    ]
    (tmp_path / "h.json").write_text(json.dumps(entries))
    command = ["trace", "summary", "--ours", *traces, "--horovod", str(tmp_path / "h.json")]
    assert run_command(command) == 1
    assert "give files of one run" in capsys.readouterr().err


def test_a_process_set_without_horovods_rank_0_is_not_in_its_timeline(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The timeline has the reductions of another set, which may have the same names."""
    for rank, path in enumerate(traces):
        trace = Trace(Path(path), rank, 1, lambda _: "", lambda _: None)
        trace.name_reductions({})
        trace.close()
    command = ["trace", "summary", "--ours", *traces, "--horovod", str(tmp_path / "h.json")]
    assert run_command(command) == 1
    assert "h.json has no reductions of these ranks" in capsys.readouterr().err


# --- the picture's rows --------------------------------------------------------------------------


def spans_of(layers: list[str]) -> list[Span]:
    return [Span("allreduce", 0, i, i + 1, layers=(n,)) for i, n in enumerate(layers)]


def test_a_module_is_a_row() -> None:
    found = rows_of_step(spans_of(["fc.weight", "fc.bias", "body.0.weight", "scale"]))
    assert found == {
        "fc.weight": "fc",
        "fc.bias": "fc",
        "body.0.weight": "body.0",
        "scale": "scale",
    }


def test_many_layers_are_drawn_by_their_parent_modules() -> None:
    layers = [f"layer{i}.{j}.conv.weight" for i in range(4) for j in range(4)]
    assert set(rows_of_step(spans_of(layers)).values()) == {
        f"layer{i}.{j}.conv" for i in range(4) for j in range(4)
    }
    layers += [f"layer{i}.{j}.norm.weight" for i in range(4) for j in range(4)]
    assert len(set(rows_of_step(spans_of(layers)).values())) == 16  # layer0.0 and so on
    layers += [f"layer{i}.9.norm.weight" for i in range(4)]
    assert set(rows_of_step(spans_of(layers)).values()) == {f"layer{i}" for i in range(4)}


def test_each_ranks_own_state_has_a_row_of_its_own(tmp_path: Path) -> None:
    timeline = load_traces([write_trace(tmp_path, 0)], None)
    step = step_of(timeline, 0, 2)
    assert [s.layers for s in step if s.kind == "tree"] == [(TREE_ROW,)]
    rows = rows_of_step([*spans_of([f"p{i}" for i in range(MAX_ROWS - 1)]), *step])
    assert len(set(rows.values())) == MAX_ROWS + 1
    assert rows[TREE_ROW] == TREE_ROW


def test_layers_without_a_common_parent_share_the_last_row() -> None:
    rows = list(rows_of_step(spans_of([f"p{i}" for i in range(50)])).values())
    assert len(set(rows)) == MAX_ROWS
    assert rows.count("others") == 50 - MAX_ROWS + 1


def test_the_typical_step_is_the_median_of_those_all_ranks_have() -> None:
    timeline = Timeline()
    for rank, versions in ((0, (1, 2, 3, 4)), (1, (1, 2, 3))):
        for version, lasted in zip(versions, (500, 100, 300, 50), strict=False):
            at = 1000 * version
            timeline.add(
                [
                    Span("boundary", rank, at, at + 10, version=version),
                    Span("copy", rank, at + 20, at + 30, version=version),
                    Span("barrier", rank, at + lasted - 10, at + lasted, version=version),
                ]
            )
    assert typical_version(timeline, [0, 1]) == 3
    with pytest.raises(TimelineError, match="no version was copied by all"):
        typical_version(timeline, [0, 1, 2])


# --- the command line ----------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierckpt", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}
    )
