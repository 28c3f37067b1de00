"""Names of entries in a version: the part that each belongs to, their order, and patterns.

Pure.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tierckpt.errors import ConfigError
from tierckpt.format.layout import FIXED

PARTS = ("model", "buffer", "", "options", "extra", "extra_per_rank", "rng", "adapter", "metric")
"""The parts in order; the empty one is optimizer state."""

Names = str | Sequence[str]
"""One pattern, or several."""


def part_of(name: str) -> str:
    """The one of `PARTS` that a name belongs to."""
    part = re.split(r"[/\[]", name, maxsplit=1)[0]
    return part if part in PARTS else ""


def order(name: str) -> tuple[int, list[Any]]:
    """Sort key: by part, then in natural order, `layer.10` after `layer.9`."""
    pieces = re.split(r"(\d+)", name)
    return PARTS.index(part_of(name)), [int(p) if p.isdigit() else p for p in pieces]


def in_order(names: Iterable[str]) -> list[str]:
    """Names of tensors and values, sorted."""
    return sorted(names, key=order)


def shown(entry: str) -> str:
    """The name of a model's parameter or buffer without its part, others as they are."""
    return entry.split("/", 1)[1] if entry.startswith(FIXED) else entry


def patterns_of(names: Names) -> tuple[str, ...]:
    """The patterns, one or several. Raises ConfigError for other values, and for none."""
    given: Any = names
    patterns = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else (*given,)
    if not patterns or not all(isinstance(each, str) and each for each in patterns):
        raise ConfigError(f'names={names!r}: give a pattern such as "layer4.*", or several')
    return patterns


def fits(name: str, pattern: str) -> bool:
    """Whether a shown name has the pattern. A star stands for any text, and slashes separate an
    optimizer's tensors from a model's: those need a pattern with a slash."""
    return ("/" in name) == ("/" in pattern) and fnmatch.fnmatchcase(name, pattern)


def without_entry(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that no name has."""
    there = [*names]
    return [each for each in patterns if not any(fits(name, each) for name in there)]
