"""`tierckpt list` of a folder with several jobs: a line for each."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierckpt._text import size_text
from tierckpt.offline.catalog import Row, rows_of
from tierckpt.offline.survey import Survey, survey

from ..columns import print_columns

if TYPE_CHECKING:
    from rich.console import Console

TITLES = ("job", "versions", "size", "a restart takes", "taken", "metric", "")
LEFT = ("job", "a restart takes", "taken", "")


def print_jobs(jobs: Sequence[Sequence[str]], console: Console) -> None:
    """Print the table, and what to type for one of them. `jobs`: the places of each."""
    seen = [survey(places) for places in jobs]
    lines = [_cells(places, there) for places, there in zip(jobs, seen, strict=True)]
    print_columns([TITLES, *lines], LEFT, console)
    first = shlex.join(jobs[0])
    text = f"{len(jobs)} jobs are here; for one of them: tierckpt list {first}"
    console.print(f"{text}, tierckpt log {first}", soft_wrap=True)
    for text in dict.fromkeys(text for there in seen for text in there.troubles):
        console.print(f"cannot be read: {text}", soft_wrap=True)


def _cells(places: Sequence[str], there: Survey) -> tuple[str, ...]:
    rows = [row for row in rows_of(there) if not row.elsewhere]
    taken = [row for row in rows if row.next]
    newest = taken[-1] if taken else None
    levels = " and ".join(row.level for row in taken)
    return (
        " ".join(places),
        str(len({(row.version, row.generation) for row in rows})),
        size_text(sum(row.nbytes for row in rows)),
        f"v{newest.version} from {levels}" if newest else "none",
        "" if newest is None else time_text(newest.created_seconds),
        "" if newest is None or newest.metric is None else f"{newest.metric:.6g}",
        ", ".join(_notes(rows, there)),
    )


def _notes(rows: Sequence[Row], there: Survey) -> list[str]:
    notes = ["running"] if there.living else []
    notes += [f"a fork of {origin}" for origin in there.origins[:1]]
    held = sorted({f"v{row.version}" for row in rows if row.held_for})
    return notes + [f"{' and '.join(held)} held for forks"] * bool(held)


def time_text(seconds: float | None) -> str:
    """A Unix time as text; empty if it is unknown."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


__all__ = ["print_jobs", "time_text"]
