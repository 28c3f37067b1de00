"""Results files of papers.py: rows that separate runs of the command add up to.

A measurement of all rows of a table takes longer than a quiet machine can be had for, so each run
measures some, and replaces these in the file. Each row has the context of its run: command, commit,
hardware, date.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.files import write_json

FOLDER = Path(__file__).resolve().parents[2] / "results"

Row = dict[str, Any]


def path_of(name: str) -> Path:
    """The file of a paper."""
    return FOLDER / f"papers-{name}.json"


def merge(path: Path, about: dict[str, Any], rows: Sequence[Row], key: Sequence[str]) -> None:
    """Add rows, in place of those that equal them in all of `key`.

    The file is replaced in one step. `runs` holds the contexts, and a row names its own by
    position.
    """
    document = read(path)
    new = {tuple(row[name] for name in key) for row in rows}
    kept = [row for row in document["rows"] if tuple(row[name] for name in key) not in new]
    contexts = [document["runs"][row["run"]] for row in kept] + [about] * len(rows)
    runs = [each for place, each in enumerate(contexts) if each not in contexts[:place]]
    merged = [
        {**row, "run": runs.index(context)}
        for row, context in zip([*kept, *rows], contexts, strict=True)
    ]
    write_json(path, {"runs": runs, "rows": merged})


def read(path: Path) -> dict[str, Any]:
    """The file's document, or an empty one."""
    if not path.exists():
        return {"runs": [], "rows": []}
    document: dict[str, Any] = json.loads(path.read_text())
    return document
