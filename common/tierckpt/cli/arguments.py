"""Types of command-line arguments, arguments that several commands have, and versions as they are
named there: `PATH` or `PATH@VERSION`.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Sequence

from msgspec import Struct

from tierckpt._text import bytes_of, directory_of, is_url, seconds_of
from tierckpt.errors import ConfigError


def place(text: str) -> str:
    """A directory or a URL. `~` is expanded as in settings, since shells do not expand it in
    quotes. Raises ArgumentTypeError, which argparse prints, for places that cannot have
    checkpoints: fsspec's memory, and an empty path. An unset shell variable gives an empty path,
    which would mean the working directory."""
    path = os.path.expanduser(directory_of(text))
    if not path:
        raise argparse.ArgumentTypeError("the path is empty; give a directory or a URL")
    if path.startswith("memory://"):
        raise argparse.ArgumentTypeError(
            f"{path} is in the memory of one process, and no other process can read it. A job's "
            "checkpoints in shared memory are found by its path: give that path"
        )
    return path


def check_places(paths: Iterable[str]) -> None:
    """Raise ConfigError for a missing directory of a job with nothing in memory, before a command
    imports torch, which takes seconds."""
    from tierckpt.offline.survey import survey

    for path in paths:
        if not (is_url(path) or os.path.isdir(path)):
            survey(path)


def nbytes(text: str) -> int:
    """A size: bytes, or with a unit (5G). Raises ArgumentTypeError."""
    try:
        found = bytes_of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found <= 0:
        raise argparse.ArgumentTypeError(f"{text} is no size of a file; give e.g. 5G")
    return found


def number(text: str) -> int:
    """A whole number from 0 on. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of iterations: 0 or more")
    return int(text)


def version_number(text: str) -> int:
    """A version's number, also as `list` and `log` print it (v4000). Raises ArgumentTypeError."""
    found = version_of(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no version; give a number, like 4000 or v4000"
        )
    return found


def version_of(text: str) -> int | None:
    """The number in `4000` or `v4000`; None for another text."""
    digits = text.removeprefix("v")
    return int(digits) if digits.isdecimal() else None


def duration(text: str) -> float:
    """A duration in seconds. Raises ArgumentTypeError, which argparse prints."""
    try:
        seconds = seconds_of(text)
    except ConfigError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a finite time of 0 or more; write for example 1.5s, 20m or 8h"
        )
    return seconds


PLACES = (
    "PATH is a job's path or its persistent_path. For several nodes give all paths, or the folder "
    "above them; {node} in a path stands for any name. A persistent_path may be a URL: its client "
    "gets the options in TIERCKPT_PERSISTENT_STORAGE_OPTIONS. Checkpoints of the job in this "
    "machine's memory are found by its path. Nothing is changed."
)
"""The end of the description of a command that reads checkpoints."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")


USAGE_OF_TARGETS = (
    "give two versions: `tierckpt diff PATH 100 200`, `tierckpt diff A@100 B@100`, or `tierckpt "
    "diff A B` for the newest version of each"
)


class Target(Struct, frozen=True):
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
        raise ConfigError(USAGE_OF_TARGETS)
    return target_of(first), target_of(more[0])
