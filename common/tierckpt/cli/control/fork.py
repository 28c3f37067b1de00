"""`tierckpt fork`, and `tierckpt unpin --forks`."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from tierckpt._text import some
from tierckpt.core.fork import source_of
from tierckpt.errors import ConfigError

from ..arguments import place
from ..journal_notes import steps_after

if TYPE_CHECKING:
    from rich.console import Console


def add_fork(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt fork SOURCE[@VERSION] PATH`."""
    parser.description = (
        "The next start of the job with this PATH begins from the version, bit for "
        "bit, on any number of ranks, and goes on with versions of its own. Nothing is copied: "
        "the version is held at its source until the new job has one on disk. SOURCE and PATH are "
        "jobs' paths, or persistent_paths. TIERCKPT_FORK_FROM=SOURCE@VERSION, where the job is "
        "started, is the same without this command."
    )
    text = "the other job, with @v4000 or @4000 for a version; default: its newest complete one"
    parser.add_argument("source", nargs="?", metavar="SOURCE[@VERSION]", help=text)
    text = "the new job; it must have no version yet"
    parser.add_argument("path", type=place, metavar="PATH", help=text)
    text = "take the order back, if no start has carried it out: tierckpt fork --cancel PATH"
    parser.add_argument("--cancel", action="store_true", help=text)
    parser.set_defaults(run=fork)


def fork(args: argparse.Namespace, console: Console) -> None:
    """Run the command. Raises ConfigError, RestoreError."""
    from tierckpt.lineage.orders import cancel_fork, order_fork
    from tierckpt.offline.jobs import survey_of_job

    if args.cancel == (args.source is not None):
        raise ConfigError("give SOURCE[@VERSION] and PATH, or --cancel and PATH")
    try:
        if args.cancel:
            origin = cancel_fork(args.path)
            if origin is None:
                text = (
                    f"{args.path}: the order, which was damaged, is removed. If `tierckpt list` of "
                    "its source shows a hold for this path: tierckpt unpin SOURCE VERSION --forks"
                )
            else:
                text = f"{args.path}: the order to begin from {origin} is taken back, and its hold"
            console.print(text, soft_wrap=True)
            return
        wanted = source_of(args.source)
        theirs = survey_of_job(wanted.path)
        origin, sentences = order_fork(args.source, args.path, theirs)
    except OSError as error:
        raise ConfigError(f"no fork could be made: {error}") from error
    console.print(f"{args.path}: the next start begins from {origin}", soft_wrap=True)
    for text in (*sentences, *(steps_after(theirs) if wanted.version is None else ())):
        console.print(text, soft_wrap=True)
    text = f"to take this back before that start: tierckpt fork --cancel {shlex.quote(args.path)}"
    console.print(text, soft_wrap=True)


def end_holds(args: argparse.Namespace, console: Console) -> None:
    """End the holds of a version. Raises PinError."""
    from tierckpt.lineage.orders import end_holds as end

    try:
        forks = end(args.path, args.version)
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    text = f"{args.path}: v{args.version} is no longer held for {some(forks)}"
    console.print(text, soft_wrap=True)


__all__ = ["end_holds", "fork"]
