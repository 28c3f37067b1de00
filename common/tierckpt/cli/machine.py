"""`tierckpt health` and `completion`: quick answers about this machine and for its shell.

`health` says whether this node can take checkpoints. `completion` prints the script with which a
shell completes commands, options and paths.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError, NodeHealthError

from .arguments import place

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["completion"]


def add_health(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt health PATH...`."""
    parser.description = (
        "Writes, flushes, reads back and compares a file in each directory. Meant for "
        "scripts that run before a job: the exit status is 0 if the node is well, else 1."
    )
    text = "directories for checkpoints: the job's path, its persistent_path, /dev/shm"
    parser.add_argument("path", type=place, nargs="+", metavar="PATH", help=text)
    text = "free space that each directory must have, e.g. 20G"
    parser.add_argument("--free", default="0", metavar="SIZE", help=text)
    text = "memory that must be available, e.g. 64G"
    parser.add_argument("--memory", default="0", metavar="SIZE", help=text)
    text = "how long to wait for a directory to answer (default: 20)"
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help=text)
    parser.set_defaults(run=health)


def health(args: argparse.Namespace, console: Console) -> None:
    """Examine the directories. Raises ConfigError, and NodeHealthError if something is wrong."""
    import socket

    from tierckpt._text import bytes_of
    from tierckpt.config import DAY_SECONDS
    from tierckpt.storage.health import Need, examine

    if not 0.1 <= args.seconds <= DAY_SECONDS:  # NaN is not
        raise ConfigError(
            f"--seconds is {args.seconds:g}; it must be from 0.1 to {DAY_SECONDS} (a day)"
        )
    free, node = bytes_of(args.free), os.environ.get("TIERCKPT_NODE") or socket.gethostname()
    needs = [Need(os.path.abspath(path), free) for path in args.path]
    problems = examine(needs, bytes_of(args.memory), args.seconds)
    if problems:
        raise NodeHealthError({node: problems})
    console.print(f"node {node} is well: {', '.join(n.path for n in needs)}", soft_wrap=True)


SHELLS = ("bash", "zsh", "fish")


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt completion SHELL`."""
    parser.description = (
        "Prints the script with which a shell completes tierckpt's commands, options and paths "
        "(needs the package shtab: pip install 'tierckpt[completion]'). Write it, for bash, to "
        "~/.local/share/bash-completion/completions/tierckpt; for fish, to "
        "~/.config/fish/completions/tierckpt.fish; for zsh, to _tierckpt in a folder of fpath."
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=completion)


def completion(args: argparse.Namespace, console: Console) -> None:
    """Print the script. Raises ConfigError without shtab."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(
            "completion needs the package shtab: pip install 'tierckpt[completion]'"
        ) from error
    parser: argparse.ArgumentParser = args.whole_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    commands.help = None  # only `tierckpt --help` hides the list, as it has groups
    for line in commands._choices_actions:
        command = commands.choices[line.dest]
        command.description = line.help  # shown beside the name
        for action in command._actions:
            if action.type in (place, Path):
                action.complete = shtab.FILE
    print(shtab.complete(parser, args.shell))
