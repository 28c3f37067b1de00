"""`tierckpt run` and `prove`: commands that run a training script.

For `run` this module has only the arguments, for `--help`; `main` gives all others to
`tierckpt.run`. `prove` tests whether a killed and restarted script continues bit for bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError
from tierckpt.run import launcher

from .arguments import Target, target_of, version_of

if TYPE_CHECKING:
    from rich.console import Console


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt run SCRIPT`."""
    parser.usage = launcher.USAGE
    parser.description = launcher.DESCRIPTION
    launcher.add(parser)


def add_prove(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt prove -- COMMAND`."""
    parser.usage = "tierckpt prove [options] -- COMMAND..."
    parser.description = (
        "Runs the command twice for some steps, without changing it: once undisturbed, "
        "and once killed with SIGKILL on the way and restarted. Compares every bit of every step: "
        "weights, optimizers, random streams, objects. Prints that the runs are equal, or the "
        "first difference and its usual cause. Checkpoints go to a scratch folder; those of the "
        "job itself are not touched. Other files that the script writes are written again by each "
        "run. The exit status is 0 for exact, 1 for not exact, 2 if the test gave no result."
    )
    text = "number of steps to compare after the kill (default: 10)"
    parser.add_argument("--steps", type=int, default=10, metavar="N", help=text)
    text = "kill after K steps (default: 5)"
    parser.add_argument("--kill-after", type=int, default=5, metavar="K", help=text)
    text = "raise both as needed, so that an epoch ends before the kill and another one after it"
    parser.add_argument("--epochs", action="store_true", help=text)
    text = "start from a copy of this version, not from scratch; PATH defaults to the settings'"
    parser.add_argument("--from", dest="start", metavar="[PATH@]VERSION", help=text)
    text = "keep logs and records in this folder; on several nodes, a folder that all of them see"
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help=text)
    text = "give up a run that makes no step for this time (default: 900)"
    parser.add_argument("--patience", type=float, default=900.0, metavar="SECONDS", help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=prove, error_status=2)


def prove(args: argparse.Namespace, console: Console) -> int:
    """Run the test; returns 0 if the script is exact, 1 if not. Raises ProveError and ConfigError
    if the test gave no result."""
    command = tuple(args.command[1:] if args.command[:1] == ["--"] else args.command)
    if not command:
        raise ConfigError("give the command that starts the job: tierckpt prove -- torchrun ...")
    from .kill_test import KEPT, MIN_BEFORE, Plan, judge  # imports torch

    folder = _folder(args.dir)
    keep = True
    try:
        start = _seed(args.start, folder)
        least = MIN_BEFORE if start else KEPT + MIN_BEFORE
        if args.steps < 1 or args.kill_after < least:
            raise ConfigError(
                f"--steps must be 1 or more and --kill-after {least} or more; they are "
                f"{args.steps} and {args.kill_after}"
            )
        how = (args.kill_after, args.steps, args.patience)
        with _ending_at_sigterm():
            status = judge(Plan(command, folder, start, *how, console), args.epochs)
        keep = status != 0 or args.dir is not None
        return status
    finally:
        if keep and (folder / "undisturbed").exists():
            console.print(f"logs, records and last versions: {folder}", soft_wrap=True)
        elif args.dir is None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C: started processes are ended, too."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _folder(given: Path | None) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="tierckpt-prove-"))
    folder = Path(os.path.abspath(given))
    with suppress(FileNotFoundError):
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; give --dir a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _seed(start: str | None, folder: Path) -> int:
    """Copy the version to start from; returns its number, 0 for none."""
    if start is None:
        return 0
    from tierckpt.config import load_config
    from tierckpt.coordination.proof_order import SEED
    from tierckpt.proof.runs import copy_version

    number = version_of(start)
    target = target_of(start) if number is None else Target(load_config().path, number)
    return copy_version(target.path, target.version, folder / SEED)
