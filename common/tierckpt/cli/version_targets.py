"""Versions as they are named on the command line: `PATH` or `PATH@VERSION`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from tierckpt.errors import ConfigError

from .arguments import place, version_of

USAGE = (
    "give two versions: `tierckpt diff PATH 100 200`, `tierckpt diff A@100 B@100`, or `tierckpt "
    "diff A B` for the newest version of each"
)


@dataclass(frozen=True)
class Target:
    """A version named on the command line."""

    path: str
    version: int | None
    """None: the version that a restart takes."""


def target_of(text: str) -> Target:
    """Parse `PATH`, or `PATH@VERSION` unless a directory has that name. Raises ConfigError."""
    path, at, version = text.rpartition("@")
    number = version_of(version)
    if at and number is not None and not os.path.isdir(text):
        return Target(place_of(path), number)
    return Target(place_of(text), None)


def place_of(text: str) -> str:
    """Parse a path as `arguments.place` does. Raises ConfigError."""
    try:
        return place(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(str(error)) from None


def targets_of(given: Sequence[str]) -> tuple[Target, Target]:
    """The two versions that the arguments name. Raises ConfigError if they do not name two."""
    first, *more = given
    named = [version_of(text) for text in more if not os.path.isdir(text)]
    numbers = [number for number in named if number is not None]
    if more and len(numbers) == len(more) <= 2:
        path = target_of(first)
        if path.version is not None:
            raise ConfigError(f"{first} already names a version; leave out {' and '.join(more)}")
        versions: list[int | None] = [*numbers, None]
        return Target(path.path, versions[0]), Target(path.path, versions[1])
    if len(more) != 1:
        raise ConfigError(USAGE)
    return target_of(first), target_of(more[0])
