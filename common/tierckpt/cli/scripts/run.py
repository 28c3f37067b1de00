"""`tierckpt run`: the arguments, for `--help`. `main` gives all others to `tierckpt.run`."""

from __future__ import annotations

import argparse

from tierckpt.run import options


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt run SCRIPT`."""
    parser.usage = options.USAGE
    parser.description = options.DESCRIPTION
    options.add(parser)
