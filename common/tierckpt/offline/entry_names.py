"""Names of entries in a version: the part that each belongs to, and their order. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

PARTS = ("model", "buffer", "", "options", "extra", "extra_per_rank", "rng", "adapter", "metric")
"""The parts in order; the empty one is optimizer state."""


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
