"""The command line, `tierckpt` or `python -m tierckpt`.

A command is a function that adds its parser to the subparsers it is given and sets `run`, which
gets the parsed arguments and a console. Name it in `COMMANDS`, and it is there. Commands import
what they need when they run: `tierckpt --help` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import TierckptError

if TYPE_CHECKING:
    from rich.console import Console

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def trace(commands: Subparsers) -> None:
    """`tierckpt trace merge|summary|plot`."""
    parser = commands.add_parser(
        "trace",
        help="checkpoints and allreduces on one time axis",
        description="Reads what ranks wrote to trace_dir, and Horovod's timeline if there is one.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    merge = actions.add_parser("merge", help="one file for Perfetto or about:tracing")
    merge.add_argument("out", type=Path, metavar="OUT.json")
    _add_inputs(merge, "merge")

    summary = actions.add_parser("summary", help="latencies, gaps, and how much was hidden")
    what = "leave out what came before (e.g. the first, slow steps)"
    summary.add_argument("--from-version", type=int, metavar="V", help=what)
    _add_inputs(summary, "summary")

    plot = actions.add_parser("plot", help="a picture of one step")
    plot.add_argument("out", type=Path, metavar="OUT.png")
    plot.add_argument("--version", type=int, metavar="V", help="default: one of median duration")
    what = "default: the first four"
    plot.add_argument("--ranks", type=int, nargs="+", default=(), metavar="R", help=what)
    _add_inputs(plot, "plot")


def _add_inputs(parser: argparse.ArgumentParser, action: str) -> None:
    what = "the traces of all ranks"
    parser.add_argument("--ours", type=Path, nargs="+", required=True, metavar="FILE", help=what)
    what = "what HOROVOD_TIMELINE named, of the same run"
    parser.add_argument("--horovod", type=Path, metavar="FILE", help=what)

    def run(args: argparse.Namespace, console: Console) -> None:
        from .timeline import command

        getattr(command, action)(args, console)

    parser.set_defaults(run=run)


COMMANDS: tuple[Callable[[Any], None], ...] = (trace,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors of ours are one sentence on stderr."""
    parser = argparse.ArgumentParser("tierckpt", description="Looks after checkpoints.")
    parser.add_argument("--version", action="version", version=f"tierckpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    args = parser.parse_args(arguments)
    from rich.console import Console

    try:
        args.run(args, Console(highlight=False, markup=False))
    except TierckptError as error:
        print(f"tierckpt: {error}", file=sys.stderr)
        return 1
    return 0
