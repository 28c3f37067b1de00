"""Values of a results file, as the expressions of claims name them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

PARTS = ("median", "low", "high")
"""Numbers of a spread, in the order of its text: median (low to high)."""

CONTEXT = ("command", "commit", "date", "cpu", "cores")
"""What a results file records of each run, so that anybody can make it again."""


class Record(dict[str, Any]):
    """A JSON object with its keys as attributes as well: `row.call.median`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(self)
            raise AttributeError(f"no field {name}: the object has {known}") from None


def load(path: Path) -> Record:
    """A results file."""
    document: Record = json.loads(path.read_text(), object_hook=Record)
    return document


def missing_context(document: Record) -> list[str]:
    """Fields of the context that a run of this file lacks."""
    runs = document.get("runs") or [document.get("machine") or document.get("run") or document]
    return [name for name in CONTEXT if any(run.get(name) is None for run in runs)]


def evaluate(expression: str, names: dict[str, Any]) -> Any:
    """The value of a Python expression over the fields of a file and these functions."""
    return eval(expression, {**FUNCTIONS, **names})


def one(rows: Iterable[Record], **wanted: Any) -> Record:
    """The only row that has these values."""
    found = [row for row in rows if all(row.get(name) == wanted[name] for name in wanted)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have {wanted}")
    return found[0]


def times(value: Any, factor: float) -> Any:
    """A number, or the median and the range of a spread, in another unit. None stays None."""
    if isinstance(value, dict):
        return Record({name: factor * value[name] for name in value if name in PARTS})
    return None if value is None else factor * value


def ms(value: Any) -> Any:
    """Milliseconds from seconds."""
    return times(value, 1e3)


def percent(value: Any) -> Any:
    """Percent from a share."""
    return times(value, 100)


def mid(value: Any) -> float | None:
    """The median alone."""
    return None if value is None else float(value["median"])


def span(value: Any) -> Record:
    """The range alone, without the median."""
    return Record(low=value["low"], high=value["high"])


FUNCTIONS = {
    each.__name__: each
    for each in (one, times, ms, percent, mid, span, median, abs, len, max, min, sum)
}
