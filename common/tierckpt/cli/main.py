"""The command line, `tierckpt` or `python -m tierckpt`.

A command is a function that adds its parser to the subparsers it is given and sets `run`, which
gets the parsed arguments and a console, and may return an exit status (else it is 0;
`error_status`, if it is set, is that of an error). Name it in `COMMANDS`, and it is there. Commands
import what they need when they run: `tierckpt --help` is quick.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierckpt._version import __version__
from tierckpt.errors import ConfigError, NodeHealthError, TierckptError

from .arguments import place
from .halt import halt
from .interval import interval

if TYPE_CHECKING:
    from rich.console import Console

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def trace(commands: Subparsers) -> None:
    """`tierckpt trace merge|summary|plot`."""
    parser = commands.add_parser(
        "trace",
        help="show checkpoints and allreduces on one time axis",
        description="Reads what ranks wrote to trace_dir, and Horovod's timeline if there is one.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    merge = actions.add_parser("merge", help="write one file for Perfetto or about:tracing")
    merge.add_argument("out", type=Path, metavar="OUT.json")
    _add_inputs(merge, "merge")

    summary = actions.add_parser(
        "summary", help="print latencies, gaps, and how much of the copying was hidden"
    )
    what = "leave out what was before version V, e.g. the first, slow steps"
    summary.add_argument("--from-version", type=int, metavar="V", help=what)
    _add_inputs(summary, "summary")

    plot = actions.add_parser("plot", help="draw one step")
    plot.add_argument("out", type=Path, metavar="OUT.png")
    plot.add_argument(
        "--version", type=int, metavar="V", help="which step; default: one of median duration"
    )
    what = "which ranks; default: the first four"
    plot.add_argument("--ranks", type=int, nargs="+", default=(), metavar="R", help=what)
    _add_inputs(plot, "plot")


def _add_inputs(parser: argparse.ArgumentParser, action: str) -> None:
    what = "trace-r*.json of all ranks, in the folder that trace_dir named"
    parser.add_argument("--ours", type=Path, nargs="+", required=True, metavar="FILE", help=what)
    what = "the file that HOROVOD_TIMELINE named, of the same run"
    parser.add_argument("--horovod", type=Path, metavar="FILE", help=what)

    def run(args: argparse.Namespace, console: Console) -> None:
        from . import trace as command

        getattr(command, action)(args, console)

    parser.set_defaults(run=run)


def health(commands: Subparsers) -> None:
    """`tierckpt health PATH...`."""
    parser = commands.add_parser(
        "health",
        help="check whether this node can take checkpoints",
        description="Writes, flushes, reads back and compares a file in each directory. For "
        "scripts that run before a job: the exit status is 0 when all is well, else 1.",
    )
    what = "directories for checkpoints: the job's path, its persistent_path, /dev/shm"
    parser.add_argument("path", type=place, nargs="+", metavar="PATH", help=what)
    what = "room that each directory must have, e.g. 20G"
    parser.add_argument("--free", default="0", metavar="SIZE", help=what)
    what = "memory that must be available, e.g. 64G"
    parser.add_argument("--memory", default="0", metavar="SIZE", help=what)
    what = "how long to wait for a directory to answer (default: 20)"
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help=what)
    parser.set_defaults(run=_health)


def _health(args: argparse.Namespace, console: Console) -> None:
    import socket

    from tierckpt.config import DAY_SECONDS
    from tierckpt.storage.health import Need, examine, parse_size

    if not 0.1 <= args.seconds <= DAY_SECONDS:  # as health_seconds; NaN is not
        raise ConfigError(f"--seconds is {args.seconds:g}: give 0.1 to {DAY_SECONDS} (a day)")
    free, node = parse_size(args.free), os.environ.get("TIERCKPT_NODE") or socket.gethostname()
    needs = [Need(os.path.abspath(path), free) for path in args.path]
    problems = examine(needs, parse_size(args.memory), args.seconds)
    if problems:
        raise NodeHealthError({node: problems})
    console.print(f"node {node} is well: {', '.join(n.path for n in needs)}", soft_wrap=True)


PLACES = (
    "PATH is a job's path (that of one node, of several, or the folder in which all nodes have "
    "theirs; {node} in it stands for any name), or its persistent_path, also as a URL, whose "
    "client is told what TIERCKPT_PERSISTENT_STORAGE_OPTIONS says. What a job has in the memory of "
    "this machine is found by its path. Nothing is changed."
)


def list_(commands: Subparsers) -> None:
    """`tierckpt list PATH...`."""
    parser = commands.add_parser(
        "list",
        help="list the checkpoints, and say which one a restart takes",
        description="Lists the checkpoints that are there, and which one a restart takes. Their "
        f"data is not read: see verify. {PLACES}",
    )
    _add_places(parser, "list_versions")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")


def verify(commands: Subparsers) -> None:
    """`tierckpt verify PATH...`."""
    parser = commands.add_parser(
        "verify",
        help="compare every byte of checkpoints with its checksum",
        description="Reads every copy of every shard, and all parity. The exit status is 0 when "
        "all is sound, else 1. What cannot be decoded here (no key, no package) is compared as it "
        f"is stored: damage is found, and 0 says that there is none. {PLACES}",
    )
    _add_places(parser, "verify_versions")
    parser.add_argument(
        "--version", type=int, metavar="V", help="verify only version V; default: all"
    )


def export(commands: Subparsers) -> None:
    """`tierckpt export PATH... OUT`."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint to one file: the model, or all as torch.save has it",
        description="OUT.safetensors gets the model's state_dict(), for evaluating it or giving it "
        "away; OUT.pt all of it, as torch.save writes it: model, optimizer (or optimizers, by "
        "their names), extra, version, iteration, metric. Takes the version that a restart would "
        f"take, verified. In Python: tierckpt.load(PATH). {PLACES}",
    )
    _add_places(parser, "export_version")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--version",
        type=int,
        metavar="V",
        help="export version V; default: the one that a restart takes",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")
    what = "has classes of values in it (torchao's 8-bit state, an Enum); may be given repeatedly"
    parser.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE", help=what
    )


def _add_places(parser: argparse.ArgumentParser, action: str) -> None:
    parser.add_argument("path", type=place, nargs="+", metavar="PATH")
    parser.set_defaults(run=_offline, action=action)


def _offline(args: argparse.Namespace, console: Console) -> None:
    from . import checkpoints as command

    getattr(command, args.action)(args, console)


def diff(commands: Subparsers) -> None:
    """`tierckpt diff A B`."""
    parser = commands.add_parser(
        "diff",
        help="compare two versions, tensor by tensor",
        description="Compares two versions of one job (`tierckpt diff PATH 100 200`), or of two "
        "(`tierckpt diff A@100 B@100`; without a number the one that a restart would take): every "
        "tensor, and all that is kept beside them. What has equal checksums is not read. The exit "
        "status is 0 when they are equal bit for bit, 1 when they differ, 2 when something is "
        "wrong. --plot draws how far each layer moves from version to version: `tierckpt diff PATH "
        f"--plot FILE`, or `PATH 100..200` for some versions of all. {PLACES}",
    )
    parser.add_argument("what", nargs="+", metavar="PATH[@VERSION]|VERSION")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    parser.add_argument("--all", action="store_true", help="show all lines, not only the first 20")
    what = "a picture: how far each layer moves from version to version"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=what)
    parser.set_defaults(run=_diff, error_status=2)


def _diff(args: argparse.Namespace, console: Console) -> int:
    from . import diff as diffcommand

    return diffcommand.diff(args, console)


def prove(commands: Subparsers) -> None:
    """`tierckpt prove -- COMMAND`."""
    parser = commands.add_parser(
        "prove",
        usage="tierckpt prove [options] -- COMMAND...",
        help="test whether a script that is killed and started again goes on exactly",
        description="Runs the command, as it is, twice for some steps: once undisturbed, and once "
        "killed with SIGKILL on the way and started again; and compares every bit of every step: "
        "weights, optimizers, random streams, objects. Says that it is exact, or what differs "
        "first and what usually causes that. Checkpoints go to a scratch folder: those of the job "
        "itself are never touched. What else the script writes, it writes again each time. The "
        "exit status is 0 for exact, 1 for not, 2 when nothing can be said.",
    )
    what = "how many steps to compare after the kill (default: 10)"
    parser.add_argument("--steps", type=int, default=10, metavar="N", help=what)
    what = "kill after K steps (default: 5)"
    parser.add_argument("--kill-after", type=int, default=5, metavar="K", help=what)
    what = "choose both, at least so many, for an epoch to end before the kill and one after it"
    parser.add_argument("--epochs", action="store_true", help=what)
    what = "begin with a copy of this version, and not afresh; without a PATH that of the settings"
    parser.add_argument("--from", dest="begin", metavar="[PATH@]VERSION", help=what)
    what = "keep logs and records in this folder; with several nodes, one that all of them see"
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help=what)
    what = "give up a run that makes no step for this long (default: 900)"
    parser.add_argument("--patience", type=float, default=900.0, metavar="SECONDS", help=what)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_prove, error_status=2)


def _prove(args: argparse.Namespace, console: Console) -> int:
    from . import prove as command

    return command.prove(args, console)


def pin(commands: Subparsers) -> None:
    """`tierckpt pin PATH VERSION`."""
    _add_pin(commands, "pin", "keep a version: it is not deleted when it is old")


def unpin(commands: Subparsers) -> None:
    """`tierckpt unpin PATH VERSION`."""
    _add_pin(commands, "unpin", "end a pin: the version may be deleted when it is old")


def _add_pin(commands: Subparsers, action: str, what: str) -> None:
    parser = commands.add_parser(
        action,
        help=what,
        description="PATH is a job's path, on this node alone, or its persistent_path, also as a "
        "URL, whose client is told what TIERCKPT_PERSISTENT_STORAGE_OPTIONS says. On several nodes "
        f"with a path each, run it on all of them, or call {action}() in the job.",
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.add_argument("version", type=int, metavar="VERSION")
    parser.set_defaults(run=_run_pin, action=action)


def _run_pin(args: argparse.Namespace, console: Console) -> None:
    from tierckpt.config import load_config
    from tierckpt.coordination.pinning import mark_at

    try:
        marked = mark_at(args.action, args.version, args.path, load_config().persistent)
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    console.print(f"{args.path}: {args.action}ned {', '.join(marked)}", soft_wrap=True)


def takeover(commands: Subparsers) -> None:
    """`tierckpt takeover PATH`."""
    parser = commands.add_parser(
        "takeover",
        help="take a persistent_path away from a job that hangs",
        description="Takes the lease of a persistent_path, a directory or a URL (whose client is "
        "told what TIERCKPT_PERSISTENT_STORAGE_OPTIONS says), away from the job that holds it; the "
        "next job that asks has it. For a job that hangs somewhere, renews its lease, and cannot "
        "be ended: the lease of one that is dead ends by itself.",
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.set_defaults(run=_takeover)


def _takeover(args: argparse.Namespace, console: Console) -> None:
    from contextlib import closing

    from tierckpt._text import is_url
    from tierckpt.config import load_config
    from tierckpt.storage.persistent import PersistentStore

    there = load_config().persistent.at(args.path)
    try:
        if not is_url(args.path) and not Path(args.path).is_dir():
            raise ConfigError(f"{args.path} is no directory; PATH is a job's persistent_path")
        with closing(PersistentStore(there.path, **there.options())) as store:
            owner = store.take_over()
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    said = f"it was {owner}'s; the next job that asks has it" if owner else "no job holds it"
    console.print(f"{args.path}: {said}", soft_wrap=True)


COMMANDS: tuple[Callable[[Any], None], ...] = (
    trace,
    halt,
    health,
    interval,
    list_,
    verify,
    export,
    diff,
    prove,
    pin,
    unpin,
    takeover,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors of ours, and of the system, are one sentence
    on stderr; Ctrl-C is 130, as in shells."""
    args = argparse.Namespace()
    try:
        _take_any_name()
        args = _parser().parse_args(arguments)
        from rich.console import Console

        status = args.run(args, Console(highlight=False, markup=False))
        print(end="", flush=True)
    except BrokenPipeError:  # `| head`
        _let_go_of_output()
        return 1
    except (TierckptError, OSError) as error:
        _let_go_of_output()
        print(f"tierckpt: {error}", file=sys.stderr)
        return getattr(args, "error_status", 1)
    except KeyboardInterrupt:
        return 130
    return status or 0


def _take_any_name() -> None:
    """Names of files need be no text in the terminal's encoding, nor in any."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _let_go_of_output() -> None:
    """Where it takes no more (nobody reads it, its disk is full): else Python would try once more
    at its end, and say so."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tierckpt", description="Looks at a job's checkpoints, and steers the job."
    )
    parser.add_argument("--version", action="version", version=f"tierckpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    return parser
