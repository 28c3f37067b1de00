"""Versions of frameworks that the integrations were tested with: oldest and newest, both included.

Here, as the integrations use it, and `tierckpt doctor`, which imports no framework.
"""

from __future__ import annotations

import re

ACCELERATE = ("Accelerate", "1.0", "1.15")
LIGHTNING = ("Lightning", "2.4", "2.6")
TRANSFORMERS = ("Transformers", "5.3", "5.24")
PACKAGES = {
    "lightning": LIGHTNING,
    "pytorch-lightning": LIGHTNING,
    "transformers": TRANSFORMERS,
    "accelerate": ACCELERATE,
}
"""Name, oldest and newest version, by the name of the distribution."""


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def is_tested(version: str, oldest: str, newest: str) -> bool:
    """True if the version is in the range, by major and minor number."""
    return numbers(oldest) <= numbers(version) <= numbers(newest)
