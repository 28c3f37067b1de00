"""What commands are given, as it is parsed."""

from __future__ import annotations

import argparse
import os

from tierckpt._text import directory_of


def place(text: str) -> str:
    """A directory, or a URL; as in settings, `~` is the home directory, which a shell leaves as it
    is in quotes. Raises ArgumentTypeError, which argparse shows, for what can have no checkpoints:
    fsspec's memory, and an empty one, as a variable makes it that is not set (that would else be
    the working directory)."""
    path = os.path.expanduser(directory_of(text))
    if not path:
        raise argparse.ArgumentTypeError("it is empty; name a directory, or a URL")
    if path.startswith("memory://"):
        raise argparse.ArgumentTypeError(
            f"{path} is in the memory of one process, and no other can look there. What a job has "
            "in shared memory is found by its path: name that"
        )
    return path
