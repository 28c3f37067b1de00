"""What a run prints and keeps: the rows of its results file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lib.files import write_json

WIDTH = 150
"""Of the terminal: a wider table has a line for each figure instead of one for each row."""


def publish(path: Path | None, about: dict[str, Any], **document: Any) -> None:
    """Print each table of the document, a list of rows, and write it all to a file, if one is
    asked for. `about`: `lib.machine.description`."""
    machine = f"{about['cpu']}, {about['cores']} cores, {about['filesystem']}"
    print(f"\n{machine}, torch {about['torch']}, load {about['load_average'][0]:.1f}")
    for name, rows in document.items():
        if isinstance(rows, list) and (text := table(rows)):
            print(f"\n{name}\n{text}")
    if path:
        write_json(path, {**about, **document})


def table(rows: Iterable[Any]) -> str:
    """Rows as text: numbers with three digits, a spread as its median and range. What is no number
    or word, and what no row has, is left out."""
    cells = [dict(_cells(row)) for row in rows if isinstance(row, dict)]
    names = dict.fromkeys(name for row in cells for name in row)
    names = [name for name in names if any(row.get(name, "-") != "-" for row in cells)]
    if not names:
        return ""
    lines = [tuple(names), *(tuple(row.get(name, "-") for name in names) for row in cells)]
    text = align(lines)
    return text if text.index("\n") <= WIDTH else align(list(zip(*lines, strict=True)))


def _cells(row: dict[str, Any], parent: str = "") -> Iterable[tuple[str, str]]:
    for key, value in row.items():
        name = f"{parent}{key}"
        if isinstance(value, dict) and "median" not in value:
            yield from _cells(value, f"{name}.")
        elif not isinstance(value, (list, tuple)):
            yield name, _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return f"{_text(value['median'])} ({_text(value['low'])} to {_text(value['high'])})"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if type(value) is int else str(value).strip().splitlines()[-1]


def align(lines: Sequence[tuple[str, ...]]) -> str:
    """Pad columns to equal width."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        ).rstrip()
        for line in lines
    )
