"""Versions as commands name them: `PATH`, or `PATH@VERSION`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tierckpt.errors import ConfigError

from .arguments import place

USAGE = (
    "give two versions: `tierckpt diff PATH 100 200`, `tierckpt diff A@100 B@100`, or A and B "
    "alone, whose newest versions are taken; with --plot one PATH will do, or PATH 100..200"
)


@dataclass(frozen=True)
class Target:
    """A version that somebody named."""

    path: str
    version: int | None
    """None: what a restart would take."""


def target_of(text: str) -> Target:
    """`PATH`, or `PATH@VERSION`, where no directory has that name. Raises ConfigError."""
    path, at, version = text.rpartition("@")
    if at and version.isdecimal() and not os.path.isdir(text):
        return Target(place_of(path), int(version))
    return Target(place_of(text), None)


def place_of(text: str) -> str:
    """As `arguments.place`. Raises ConfigError."""
    try:
        return place(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(str(error)) from None


def targets_of(given: Sequence[str]) -> tuple[Target, Target]:
    """Of the command's arguments. Raises ConfigError for what names no two versions."""
    first, *more = given
    numbers = [int(text) for text in more if text.isdecimal() and not os.path.isdir(text)]
    if more and len(numbers) == len(more) <= 2:
        path = target_of(first)
        if path.version is not None:
            raise ConfigError(f"{first} names a version already, beside {' and '.join(more)}")
        versions: list[int | None] = [*numbers, None]
        return Target(path.path, versions[0]), Target(path.path, versions[1])
    if len(more) != 1:
        raise ConfigError(USAGE)
    return target_of(first), target_of(more[0])


def range_of(given: Sequence[str]) -> tuple[str, int | None, int | None]:
    """A path, and the first and last version to draw, if they were named. Raises ConfigError."""
    path, *more = given
    named = re.fullmatch(r"(\d*)\.\.(\d*)", more[0]) if len(more) == 1 else None
    if len(more) == 2 and all(text.isdecimal() for text in more):
        bounds = [*more]
    elif named is not None:
        bounds = [*named.groups()]
    elif more:
        raise ConfigError(f"--plot draws the versions of one path: {USAGE}")
    else:
        bounds = ["", ""]
    low, high = (int(text) if text else None for text in bounds)
    return place_of(path), low, high
