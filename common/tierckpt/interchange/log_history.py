"""The log history of Hugging Face's Trainer as text in a version.

Times are apart from the rest, as they differ from run to run: `tierckpt prove` compares the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

TIMES = ("runtime", "per_second")
"""Parts of the names of times."""


def lines_of(entries: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """A line of JSON for each entry, with null for its times; and a line with these times."""
    history, times = "", ""
    for entry in entries:
        own = {name: value for name, value in entry.items() if any(t in name for t in TIMES)}
        history += json.dumps({**entry, **dict.fromkeys(own)}, default=plain) + "\n"
        times += json.dumps(own, default=plain) + "\n"
    return history, times


def entries_of(history: str, times: str) -> list[dict[str, Any]]:
    """The entries that gave these lines."""
    pairs = zip(history.splitlines(), times.splitlines(), strict=True)
    return [{**json.loads(entry), **json.loads(own)} for entry, own in pairs]


def plain(value: Any) -> Any:
    """A number of numpy's or torch's as one of Python's."""
    return value.item() if hasattr(value, "item") else str(value)


__all__ = ["entries_of", "lines_of", "plain"]
