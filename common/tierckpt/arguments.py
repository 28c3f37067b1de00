"""What commands are given, as it is parsed."""

from __future__ import annotations

import argparse
import os

from .naming import directory_of


def place(text: str) -> str:
    """A directory, or a URL; as in settings, `~` is the home directory, which a shell leaves as it
    is in quotes. Raises ArgumentTypeError, which argparse shows, for an empty one: what a variable
    makes of itself that is not set would else be the working directory."""
    path = os.path.expanduser(directory_of(text))
    if not path:
        raise argparse.ArgumentTypeError("it is empty; name a directory, or a URL")
    return path
