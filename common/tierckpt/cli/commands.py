"""The list of all commands: each one's name, its line in `tierckpt --help`, and its module.

The module of a command NAME has a function `add_NAME(parser)`, which adds the description and the
arguments, and sets `run`. `run` gets the parsed arguments and a console, and may return an exit
status (default 0). `error_status`, if set, is the exit status after an error (default 1). A module
is imported only when its command is named, so it may import what the command needs, except torch
and numpy: `--help` must be quick.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
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
            "scripts.run",
            "run a training script under a launcher, and restart it within a second",
        ),
        Command(
            "prove",
            "scripts.prove",
            "test whether a killed and restarted script continues exactly",
        ),
    ),
    "look at a job": (
        Command("watch", "reports.watch", "show a job's checkpoints and agents while it runs"),
        Command(
            "list",
            "reports.checkpoints",
            "list the checkpoints, and the one that a restart takes",
        ),
        Command(
            "log",
            "reports.log",
            "show the history of a job as a tree: runs, what each restored, forks",
        ),
        Command(
            "verify",
            "reports.verification",
            "compare every byte of checkpoints with its checksum",
        ),
        Command("diff", "reports.diff", "compare two versions tensor by tensor"),
        Command(
            "report",
            "reports.report",
            "write one page with figures about a job: time, history, levels, traces",
        ),
        Command("goodput", "reports.goodput", "account for the time of a job over all its runs"),
        Command("trace", "reports.trace", "put checkpoints and allreduces on one time axis"),
    ),
    "control a job": (
        Command("halt", "control.halt", "ask a running job to checkpoint and stop"),
        Command("rollback", "control.rollback", "go back to an older version at the next start"),
        Command("fork", "control.fork", "let a new job begin from a version of another one"),
        Command("pin", "control.pins", "keep a version: retention does not delete it"),
        Command("unpin", "control.pins", "end a pin: retention may delete the version again"),
        Command("delete", "control.delete", "remove versions from all levels, after a question"),
        Command(
            "takeover", "control.takeover", "take a persistent_path away from a job that hangs"
        ),
    ),
    "plan a job": (
        Command(
            "interval", "plans.interval", "compute the best checkpoint interval for each level"
        ),
        Command(
            "simulate",
            "plans.simulate",
            "simulate a job under failures: goodput, lost work, traffic, best intervals",
        ),
    ),
    "exchange checkpoints with other tools": (
        Command(
            "import",
            "exchange.interchange",
            "make a version from another tool's checkpoint, for a job to start from",
        ),
        Command(
            "export",
            "exchange.interchange",
            "write a checkpoint for another tool, or for torch.load",
        ),
    ),
    "examine a machine": (
        Command(
            "doctor",
            "machine.doctor",
            "show what this machine offers, with a cure for all that is missing",
        ),
        Command("health", "machine.health", "check whether this node can take checkpoints"),
        Command("completion", "machine.completion", "print the completion of bash, zsh or fish"),
    ),
}
"""Commands by purpose, in the order of `tierckpt --help`."""
COMMANDS = tuple(command for group in GROUPS.values() for command in group)
