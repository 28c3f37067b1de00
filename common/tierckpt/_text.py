"""Lists, counts, sizes, times and errors, as people read and write them. Pure."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from tierckpt.errors import ConfigError


def some(things: Collection[Any], shown: int = 3, between: str = ", ") -> str:
    """The first few by name, the rest by number: `a, b, c and 5 more`."""
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return between.join(map(str, islice(things, shown))) + more


def counted(number: int, one: str, several: str = "") -> str:
    """`1 copy`, `2 copies`."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def near_names(name: str, known: Iterable[str], cutoff: float = 0.4) -> list[str]:
    """The names that the writer of `name` may have meant: those that end with it, as in
    `local_codecs` for `codecs`, or else the most similar one. Empty if none is similar."""
    known = [*known]
    longer = [each for each in known if each.endswith(f"_{name}")]
    return longer or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)


def question(near: Collection[object]) -> str:
    """`did you mean a or b? `; empty without a name."""
    return f"did you mean {' or '.join(map(str, near))}? " if near else ""


def error_text(error: BaseException, *clear: type[BaseException]) -> str:
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


def repr_without(record: Struct, *hidden: str) -> str:
    """The `repr` of a record without some of its fields, which may be secret."""
    shown = (f"{name}={value!r}" for name, value in asdict(record).items() if name not in hidden)
    return f"{type(record).__name__}({', '.join(shown)})"


def directory_of(path: str | os.PathLike[str]) -> str:
    """The directory of a `file://` URL; any other path or URL unchanged."""
    return os.fspath(path).removeprefix("file://")


def is_url(path: str | os.PathLike[str]) -> bool:
    """True for URLs that a client must open; `file:` and plain paths are directories."""
    return "://" in directory_of(path)


SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "y": 365 * 86400.0}
BYTES = {"": 1.0} | {
    prefix + unit: base**power
    for unit, base in (("", 1024.0), ("iB", 1024.0), ("B", 1000.0))
    for power, prefix in enumerate(("", "k", "M", "G", "T", "P"))
}
"""64G is 64 GiB, as memory is counted, and in most commands of Linux; 64GB is 64e9 bytes."""
NUMBER = r"\s*([-+]?\d*\.?\d+(?:e[-+]?\d+)?)\s*([A-Za-z]*)\s*"


def seconds_of(value: object) -> float:
    """A time in seconds: a number, or text such as 20ms, 1.5s, 3m, 8h, 2d, 1y, inf. Raises
    ConfigError with the forms that are valid."""
    if value in ("inf", math.inf):
        return math.inf
    found = _quantity(value, SECONDS, "s")
    if found is None:
        raise ConfigError(f"{value!r} is not a time; write for example 20ms, 1.5s, 3m, 8h, 2d, 1y")
    return found


def bytes_of(value: object) -> int:
    """A size in bytes: a number, or text such as 201MB, 64GiB, or 64G, which is the same. Raises
    ConfigError with the forms that are valid."""
    found = _quantity(value, BYTES, "")
    if found is None:
        raise ConfigError(f"{value!r} is not a size; write for example 201MB, 5TB, 64G or 64GiB")
    return int(found)


def _quantity(value: object, units: dict[str, float], default: str) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    match = re.fullmatch(NUMBER, value) if isinstance(value, str) else None
    if match is None:
        return None
    known = {name.lower(): size for name, size in units.items()}
    size = units.get(match[2] or default, known.get((match[2] or default).lower()))
    return None if size is None else float(match[1]) * size


def time_text(seconds: float) -> str:
    """A duration for people, such as 3.2 ms or 5 h."""
    if math.isinf(seconds):
        return "never"
    unit = "ms"
    for name, size in SECONDS.items():
        if seconds >= size and (name != "y" or seconds >= 2 * size):
            unit = name
    return f"{seconds / SECONDS[unit]:.3g} {unit}"
