"""Lists, counts and sizes in sentences."""

from __future__ import annotations

import os
from collections.abc import Collection
from itertools import islice
from typing import Any


def some(things: Collection[Any], shown: int = 3, between: str = ", ") -> str:
    """The first few by name, the rest by number: `a, b, c and 5 more`."""
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return between.join(map(str, islice(things, shown))) + more


def counted(number: int, one: str, several: str = "") -> str:
    """`1 copy`, `2 copies`."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def size_text(nbytes: int) -> str:
    """A size in decimal units with three digits; empty for zero."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}" if nbytes else ""


def directory_of(path: str | os.PathLike[str]) -> str:
    """The directory of a `file://` URL; any other path or URL unchanged."""
    return os.fspath(path).removeprefix("file://")


def is_url(path: str | os.PathLike[str]) -> bool:
    """True for URLs that a client must open; `file:` and plain paths are directories."""
    return "://" in directory_of(path)
