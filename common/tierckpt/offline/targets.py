"""Versions as commands name them: `PATH`, or `PATH@VERSION`."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from ..arguments import place
from ..errors import ConfigError


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
