"""`tierckpt completion`: the script with which a shell completes commands, options and paths."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError

from ..arguments import place

if TYPE_CHECKING:
    from rich.console import Console

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


__all__ = ["completion"]
