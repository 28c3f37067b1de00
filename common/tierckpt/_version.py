"""Versions: of this package, and of the frameworks that its integrations were tested with.

This is the one place that holds the package's version (setup.cfg reads it without importing
torch). Of each framework: the oldest and the newest version, both included. They are here as the
integrations use them, and `tierckpt doctor`, which imports no framework.
"""

from __future__ import annotations

import re

__version__ = "0.1.0"


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


def version_numbers(version: str) -> tuple[int, ...]:
    """(2, 13) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def is_tested(version: str, oldest: str, newest: str) -> bool:
    """True if the version is in the range, by major and minor number."""
    return version_numbers(oldest) <= version_numbers(version) <= version_numbers(newest)
