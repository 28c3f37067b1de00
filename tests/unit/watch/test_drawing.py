"""The view as text, in narrow and in wide terminals."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from tierckpt.watch import (
    AgentView,
    EventsView,
    Incident,
    JobState,
    LevelView,
    Node,
    Restart,
    Slow,
    View,
    Work,
    clock,
    drawn,
    span,
)

NOW = 1_800_000_000.0
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "json.md"

EVENTS = EventsView(
    "/shared/events",
    8000,
    NOW - 600,
    NOW - 1,
    60.0,
    3.2,
    0.0012,
    0.031,
    {"sealed/memory": 4312, "committed/local": 431, "skipped/local": 3, "failed/persistent": 1},
    (Slow("stall", 4711, 0.012, 0.0012, 8000), Slow("persistent", 3208, 95.0, 31.0, 1000)),
    (Incident("failed", "persistent", 4200, 3208, NOW - 60, "OSError: no space left on device"),),
)
VIEW = View(
    NOW,
    ("/scratch/ckpts",),
    0.1,
    JobState(
        "runs",
        "8 on this machine",
        "ckpts-0123456789ab",
        NOW,
        8,
        3.21,
        Restart(4312, 4312, ("memory",), 0.3),
        {"v4100": "rank 3 differs in layers.0.weight"},
    ),
    (
        LevelView("memory", 4312, 8, 8, 2, 8 * 1500**3, 0.3, None, 81e9, None, 4312, 0, 0),
        LevelView("local", 4310, 8, 8, 2, 8 * 1500**3, 1.0, NOW - 0.5, 8.1e9, 2.1e9, 431, 3, 0),
        LevelView("persistent", 4200, 8000, 8000, 2, 10**13, None, NOW - 120, 9e9, 12e9, 43, 0, 1),
    ),
    (
        Work("gpu-0042", "persistent", 4300, None, 12.0, 12 * 10**9, 27 * 10**9),
        Work("", "persistent", 4300, None, 0.0, 0, 0, 7936, 8000, "shards 3200-3263"),
    ),
    (
        AgentView("gpu-0042", 4242, "runs", NOW - 7200, tuple(range(8)), (), {"local": 1}, 0.0),
        AgentView("gpu-0043", 777, "gone", None, (), (), {}, 0.0),
        AgentView("gpu-0044", 778, "silent", None, (), (), {}, 0.0, "timed out"),
    ),
    (Node("gpu-0042", 4200, True, NOW - 7200), Node("gpu-0043", 700, False, NOW - 7200)),
    EVENTS,
    ("no version of some node is visible",),
    ("/scratch/other: Permission denied",),
)
"""Everything at once."""


def shown(view: View, width: int, terminal: bool = False) -> list[str]:
    console = Console(
        file=io.StringIO(),
        record=True,
        width=width,
        markup=False,
        highlight=False,
        force_terminal=terminal,
        _environ={},
    )
    for part in drawn(view, width, bars=terminal):
        console.print(part)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("terminal", [False, True])
def test_every_row_of_a_table_is_on_one_line(width: int, terminal: bool) -> None:
    lines = shown(VIEW, width, terminal)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["memory"][1:5] == ["v4312", "8", "of", "8"]
    since = time.strftime("%H:%M:%S", time.localtime(NOW - 120))
    beside = {80: [], 140: ["43", "0", "1"]}[width]
    [row] = [line.split() for line in lines if line.startswith("persistent")]
    assert row == [
        *("persistent", "v4200", "8000", "of", "8000", ">2.0", "min", since),
        *("9", "GB/s", "12", "GB/s", *beside),
    ]


def test_everything_known_is_shown() -> None:
    text = "\n".join(shown(VIEW, 200))
    for part in (
        "job ckpts-0123456789ab: runs (8 on this machine), 3.21 steps/s",
        "a restart takes v4312 (iteration 4312) from memory, 300 ms old",
        "1 of 2 nodes live, gone: gpu-0043",
        "persistent v4300 from gpu-0042: 12 GB of 27 GB, 12 s, 1 GB/s",
        "persistent v4300 of all nodes: 7936 of 8000 shards stored, missing: shards 3200-3263",
        "gpu-0042, process 4242: runs for 2.0 h, serves ranks 0, 1, 2, 3, 4, 5, 6, 7, 1 waiting",
        "gpu-0043, process 777: gone, it was killed",
        "gpu-0044, process 778: does not answer (timed out)",
        "events of 8000 ranks since",
        "3 skipped on local, 1 failed on persistent",
        "stall of the training: 1.2 ms (median), 31 ms (longest)",
        "stall: rank 4711 (12 ms, median 1.2 ms); persistent: rank 3208 (95 s, median 31 s)",
        "[rank 3208] failed persistent v4200: OSError: no space left on device",
        "suspect, as replicas differed: v4100: rank 3 differs in layers.0.weight",
        "cannot be read: /scratch/other: Permission denied",
        "no version of some node is visible",
    ):
        assert part in text, part


def test_a_dead_job_is_shown_with_its_last_sign() -> None:
    job = replace(VIEW.job, state="stopped", evidence="killed", last_seen_seconds=NOW - 7200)
    text = "\n".join(shown(replace(VIEW, job=job), 200))
    assert "job ckpts-0123456789ab: stopped (killed)" in text
    assert "steps/s" not in text
    assert f"last seen {clock(NOW - 7200, NOW)}, 2.0 h ago" in text


def test_a_job_without_versions_says_so() -> None:
    job = replace(VIEW.job, restart=None, suspects={})
    bare = replace(VIEW, job=job, levels=(), work=(), agents=(), events=None, notes=())
    text = "\n".join(shown(bare, 80))
    assert "no versions yet" in text
    assert "no agent process" in text


def test_many_agents_are_cut_with_a_notice() -> None:
    many = replace(VIEW, agents=VIEW.agents[:1] * 20, work=VIEW.work[:1] * 20)
    lines = shown(many, 140)
    assert sum("process 4242" in line for line in lines) == 8
    assert sum("and 12 more; --json shows all" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.0, "0.0 ms"),
        (0.0032, "3.2 ms"),
        (0.4, "400 ms"),
        (1.0, "1.0 s"),
        (99.0, "99 s"),
        (100.0, "1.7 min"),
        (6000.0, "1.7 h"),
        (48 * 3600.0, "2.0 d"),
    ],
)
def test_durations_have_two_digits(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


# --- JSON ----------------------------------------------------------------------------------------


def test_the_view_is_json_with_a_number_for_its_schema() -> None:
    values = json.loads(json.dumps(VIEW.as_json()))
    assert values["schema"] == 1
    assert values["levels"][1]["level"] == "local"
    assert values["job"]["restart"]["levels"] == ["memory"]


def kinds(kind: Any) -> set[str]:
    """The names of the record and of those in it."""
    hints = [hint for each in get_type_hints(kind).values() for hint in (each, *get_args(each))]
    inner = (hint for hint in hints if isinstance(hint, type) and issubclass(hint, Struct))
    return {kind.__name__}.union(*map(kinds, inner))


def test_the_reference_has_every_class_of_the_schema() -> None:
    found = re.findall(r"autoclass:: tierckpt\.watch\.view\.(\w+)\n", PAGE.read_text())
    assert set(found) == kinds(View)
