"""The terminal of a benchmark: options that all of them share, and lines of progress."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parser_of(
    docstring: str | None,
    toy: str = "a few seconds, to try it",
    place: str = "",
    results: str = "write the results here",
) -> argparse.ArgumentParser:
    """A parser with a docstring, and the options --toy, --dir and --json.

    Args:
        docstring: the program's.
        toy: help of --toy.
        place: help of --dir; empty: without it.
        results: help of --json; empty: without it.
    """
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help=toy)
    if place:
        parser.add_argument("--dir", type=Path, help=place)
    if results:
        parser.add_argument("--json", type=Path, help=results)
    return parser


def say(text: str) -> None:
    """Print one line to standard error."""
    print(text, file=sys.stderr, flush=True)


__all__ = ["parser_of", "say"]
