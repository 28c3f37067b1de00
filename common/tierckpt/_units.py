"""Times and sizes as people write them. Pure."""

from __future__ import annotations

import math
import re

from tierckpt.errors import ConfigError

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
