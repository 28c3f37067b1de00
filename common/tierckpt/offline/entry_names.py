"""Names of what is in a version: which part of it they are of, and their order for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

PARTS = ("model", "buffer", "", "options", "extra", "extra_per_rank", "rng", "adapter", "metric")
"""In this order; the empty one is what optimizers keep."""


def part_of(name: str) -> str:
    """Which of `PARTS` it is in."""
    part = re.split(r"[/\[]", name, maxsplit=1)[0]
    return part if part in PARTS else ""


def order(name: str) -> tuple[int, list[Any]]:
    """By part, and then as people count: `layer.10` after `layer.9`."""
    pieces = re.split(r"(\d+)", name)
    return PARTS.index(part_of(name)), [int(p) if p.isdigit() else p for p in pieces]


def in_order(names: Iterable[str]) -> list[str]:
    """Names of tensors and values, sorted."""
    return sorted(names, key=order)
