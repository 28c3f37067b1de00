"""Lists, counts, sizes and errors in sentences."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any


def some(things: Collection[Any], shown: int = 3, between: str = ", ") -> str:
    """The first few by name, the rest by number: `a, b, c and 5 more`."""
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return between.join(map(str, islice(things, shown))) + more


def counted(number: int, one: str, several: str = "") -> str:
    """`1 copy`, `2 copies`."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def near_names(name: str, known: Iterable[str], cutoff: float = 0.4) -> list[str]:
    """The names that somebody who wrote `name` may have meant: those that end with it, as in
    `local_keep_best` for `keep_best`, or else the most similar one. Empty if none is similar."""
    known = [*known]
    longer = [each for each in known if each.endswith(f"_{name}")]
    return longer or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)


def question(near: Collection[object]) -> str:
    """`did you mean a or b? `; empty without a name."""
    return f"did you mean {' or '.join(map(str, near))}? " if near else ""


def in_words(error: BaseException, *clear: type[BaseException]) -> str:
    """An error with its kind: `KeyError: 'name'`. Of the kinds in `clear` the message alone, unless
    it is empty."""
    message = str(error)
    return message if isinstance(error, clear) and message else f"{type(error).__name__}: {message}"


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
