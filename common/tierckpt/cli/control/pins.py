"""`tierckpt pin` and `unpin`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError

from ..arguments import place, version_number

if TYPE_CHECKING:
    from rich.console import Console


def add_pin(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt pin PATH VERSION`."""
    _add(parser, "pin")


def add_unpin(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt unpin PATH VERSION`."""
    _add(parser, "unpin")
    text = "end the holds that forks have on the version, instead of the pin"
    parser.add_argument("--forks", action="store_true", help=text)


def _add(parser: argparse.ArgumentParser, action: str) -> None:
    parser.description = (
        "PATH is a job's path on this node, or its persistent_path. A persistent_path may be a "
        "URL: its client gets the options in TIERCKPT_PERSISTENT_STORAGE_OPTIONS. If every node "
        f"has a path of its own, run the command on all of them, or call {action}() in the job."
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.add_argument("version", type=version_number, metavar="VERSION")
    parser.set_defaults(run=mark, action=action, forks=False)


def mark(args: argparse.Namespace, console: Console) -> None:
    """Pin or unpin the version, or end the holds of its forks. Raises ConfigError, PinError."""
    if args.forks:
        from .fork import end_holds

        end_holds(args, console)
        return
    from tierckpt.config import load_config
    from tierckpt.coordination.pinning import mark_at

    try:
        marked = mark_at(args.action, args.version, args.path, load_config().persistent)
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    console.print(f"{args.path}: {args.action}ned {', '.join(marked)}", soft_wrap=True)
