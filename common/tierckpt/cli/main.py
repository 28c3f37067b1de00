"""The command line, `tierckpt` or `python -m tierckpt`: the list of all commands, and the parser.

GROUPS has each command's name, its line in `tierckpt --help`, and its module. The module of a
command NAME has a function `add_NAME(parser)`, which adds the description and the arguments, and
sets `run`. `run` gets the parsed arguments and a console, and may return an exit status (default
0). `error_status`, if set, is the exit status after an error (default 1). A module is imported
only when one of its commands is named. So it may import what all its commands need, except torch
and numpy; what one command alone needs is imported in that command's function. `--help` must be
quick.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import sys
from collections.abc import Container, Iterable, Sequence
from typing import Any, NoReturn

from msgspec import Struct

from tierckpt._text import near_names, question
from tierckpt._version import __version__
from tierckpt.errors import TierckptError


class Command(Struct, frozen=True):
    """A command, without its arguments."""

    name: str
    module: str
    """Relative to this folder."""
    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Import the module, and let it add the arguments and set `run`."""
        module: Any = importlib.import_module(f".{self.module}", __package__)
        getattr(module, f"add_{self.name}")(parser)


GROUPS = {
    "run a script": (
        Command(
            "run",
            "scripts",
            "run a training script under a launcher, and restart it within a second",
        ),
        Command(
            "prove",
            "scripts",
            "test whether a killed and restarted script continues exactly",
        ),
    ),
    "look at a job": (
        Command("watch", "watch", "show a job's checkpoints and agents while it runs"),
        Command(
            "list",
            "versions",
            "list the checkpoints, and the one that a restart takes",
        ),
        Command(
            "log",
            "versions",
            "show the history of a job as a tree: runs, what each restored, forks",
        ),
        Command(
            "verify",
            "versions",
            "compare every byte of checkpoints with its checksum",
        ),
        Command("diff", "versions", "compare two versions tensor by tensor"),
        Command(
            "report",
            "reports",
            "write one page with figures about a job: time, history, levels, traces",
        ),
        Command("goodput", "reports", "account for the time of a job over all its runs"),
        Command("trace", "trace", "put checkpoints and allreduces on one time axis"),
    ),
    "control a job": (
        Command("halt", "control", "ask a running job to checkpoint and stop"),
        Command("rollback", "removal", "go back to an older version at the next start"),
        Command("fork", "control", "let a new job start from a version of another one"),
        Command("pin", "control", "keep a version: retention does not delete it"),
        Command("unpin", "control", "end a pin: retention may delete the version again"),
        Command("delete", "removal", "remove versions from all levels, after a question"),
        Command("takeover", "control", "take a persistent_path away from a job that hangs"),
    ),
    "plan a job": (
        Command("interval", "plans", "compute the best checkpoint interval for each level"),
        Command(
            "simulate",
            "plans",
            "simulate a job under failures: goodput, lost work, traffic, best intervals",
        ),
    ),
    "exchange checkpoints with other tools": (
        Command(
            "import",
            "exchange",
            "make a version from another tool's checkpoint, for a job to start from",
        ),
        Command(
            "export",
            "exchange",
            "write a checkpoint for another tool, or for torch.load",
        ),
    ),
    "examine a machine": (
        Command(
            "doctor",
            "doctor",
            "show what this machine offers, with a cure for whatever is missing",
        ),
        Command("health", "machine", "check whether this node can take checkpoints"),
        Command("completion", "machine", "print the completion of bash, zsh or fish"),
    ),
}
"""Commands by purpose, in the order of `tierckpt --help`."""
COMMANDS = tuple(command for group in GROUPS.values() for command in group)


RUN = "run"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Tierckpt's errors and the system's are printed on
    stderr, as one sentence. Ctrl-C gives 130, as in shells. `run` ends this process, or returns at
    the end of the script, and raises its exceptions. The arguments after a script are the script's,
    so `run` gets them before they are parsed here."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [RUN] and not {"-h", "--help"} & set(arguments[1:2]):
        from tierckpt.run.__main__ import main as run_script

        run_script(arguments[1:])
        return 0
    args = argparse.Namespace()
    try:
        _accept_any_file_name()
        args = parser_of(arguments).parse_args(arguments)
        from rich.console import Console

        from .output import UNLIMITED

        console = Console(highlight=False, markup=False)
        if not console.is_terminal:  # COLUMNS is the terminal's width, whoever exports it
            console.width = UNLIMITED
        status = args.run(args, console)
        print(end="", flush=True)
    except BrokenPipeError:  # `| head`
        _discard_output()
        return 1
    except (TierckptError, OSError) as error:
        _discard_output()
        print(f"tierckpt: {error}", file=sys.stderr)
        return getattr(args, "error_status", 1)
    except KeyboardInterrupt:
        return 130
    return status or 0


class _Parser(argparse.ArgumentParser):
    """A parser with a guess of the right name in errors about a wrong one."""

    options: Sequence[str] = ()
    """Options of the given command, for the parser of all commands, which reports
    arguments that its command does not know."""

    def error(self, message: str) -> NoReturn:
        names: Iterable[str] = ()
        if wrong := re.match(r"argument COMMAND: invalid choice: '(.*?)' ", message):
            message = f"there is no command {wrong[1]!r}"
            names = (command.name for command in COMMANDS)
        elif wrong := re.match(r"unrecognized arguments: (-[^ =]+)", message):
            names = self.options
        hint = question(near_names(wrong[1], names, cutoff=0.6)).strip() if wrong else ""
        if wrong and not hint:
            hint = "--help lists all"
        super().error("; ".join(filter(None, [message, hint])))


def _accept_any_file_name() -> None:
    """Escape characters on stdout that its encoding lacks: file names may contain any."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Send output to /dev/null if it cannot be written (reader gone, disk full). Otherwise Python
    would try again at exit, and print an error."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser_of(named: Container[str]) -> argparse.ArgumentParser:
    """The parser of all commands; only those in `named` have their arguments, as these need the
    command's module."""
    parser = _Parser(
        "tierckpt",
        usage="tierckpt [-h] [--version] COMMAND ...",
        description="Runs training scripts, and looks at the checkpoints of a job, while it runs "
        "and afterwards.",
        epilog="`tierckpt COMMAND --help` describes a command.",
    )
    parser.set_defaults(whole_parser=whole_parser)
    parser.add_argument("--version", action="version", version=f"tierckpt {__version__}")
    commands = parser.add_subparsers(
        prog="tierckpt", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for title, group in GROUPS.items():
        for command in group:
            added = commands.add_parser(command.name, help=command.help)
            if command.name in named:
                command.add_arguments(added)
                parser.options = [*added._option_string_actions]
        # argparse has one list for all subcommands: their lines go into groups of their own.
        lines = commands._choices_actions[-len(group) :]
        parser.add_argument_group(title)._group_actions.extend(lines)
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """The parser of all commands with all their arguments, for the page that lists them, and for
    the completion of shells."""
    return parser_of({command.name for command in COMMANDS})
