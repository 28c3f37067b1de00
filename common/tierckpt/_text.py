"""How lists, counts and sizes are told in a sentence."""

from __future__ import annotations

import os
from collections.abc import Collection
from itertools import islice
from typing import Any


def some(things: Collection[Any], shown: int = 3, between: str = ", ") -> str:
    """The first few by name, the others by number: `a, b, c and 5 more`."""
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return between.join(map(str, islice(things, shown))) + more


def counted(number: int, one: str, several: str = "") -> str:
    """`1 copy`, `2 copies`."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def size_text(nbytes: int) -> str:
    """In decimal units, three digits; nothing where there is none."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}" if nbytes else ""


def directory_of(path: str | os.PathLike[str]) -> str:
    """The directory that a `file://` URL names; any other path, or URL, as it is."""
    return os.fspath(path).removeprefix("file://")


def is_url(path: str | os.PathLike[str]) -> bool:
    """True for what fsspec has to open; `file:` and plain paths are directories."""
    return "://" in directory_of(path)
