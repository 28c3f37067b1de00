"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import os

from tierckpt._text import directory_of
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


def nbytes(text: str) -> int:
    """A size: bytes, or with a unit (5G). Raises ArgumentTypeError."""
    from tierckpt.storage.health import parse_size

    try:
        found = parse_size(text)
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
