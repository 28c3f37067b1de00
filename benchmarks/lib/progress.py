"""Progress lines for the person at the terminal."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print one line to standard error."""
    print(text, file=sys.stderr, flush=True)
