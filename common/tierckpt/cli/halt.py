"""`tierckpt halt`: whose job is asked, and what for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.core import halt_conditions
from tierckpt.errors import ConfigError, FormatError

from .arguments import place

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.core.halt_conditions import HaltRequest


def halt(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of `tierckpt halt PATH`."""
    parser = commands.add_parser(
        "halt",
        help="have a job take a last checkpoint and end",
        description="Asks the job whose path (or persistent_path, if that is a directory) PATH is "
        "to take a last checkpoint and end: when any of the conditions holds. They stay until they "
        "are cleared. Within some seconds the job has read them. A job that has written nothing "
        "there yet, or never does before its end, is found on its own node, by what it has in "
        "memory.",
    )
    what = "a directory; URLs (a persistent_path in an object store) are not watched"
    parser.add_argument("path", type=place, metavar="PATH", help=what)
    what = "when version V, or a later one, is taken"
    parser.add_argument("--after-version", type=int, metavar="V", help=what)
    what = (
        "before a time: HH:MM, or 2026-12-24T18:00. How long before says --seconds-left, or else "
        "the job's halt_seconds_left. Without either the job ends just AFTER that time: at the "
        "first boundary that finds it over"
    )
    parser.add_argument("--before", metavar="TIME", help=what)
    what = "S seconds before that time, and before the end of the scheduler's allocation"
    parser.add_argument("--seconds-left", type=float, metavar="S", help=what)
    parser.add_argument("--now", action="store_true", help="at once")
    parser.add_argument("--show", action="store_true", help="print what is asked for")
    what = "also where no job has left anything yet; makes the directory"
    parser.add_argument("--force", action="store_true", help=what)
    what = "ask for nothing any more, or only for what is given along with this"
    parser.add_argument("--clear", action="store_true", help=what)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> None:
    """See the parser's text. Raises ConfigError."""
    from tierckpt.halt import request_file

    asked = _asked(args)
    try:
        lookouts = _lookouts(args.path)
        if not (lookouts or args.force or was_job_here(args.path)):
            raise ConfigError(
                f"no job has left anything in {args.path} yet, and {_nobody()}. One that runs "
                "elsewhere would never see this: give the job's path, as it has it on this node. "
                "--force does it all the same, for a job that is still to start, or to come so far"
            )
        if args.clear:
            request_file.clear(args.path)
        standing = request_file.read(args.path)
        if asked != halt_conditions.HaltRequest():
            standing = (standing or halt_conditions.HaltRequest()).merged(asked)
            _make(args.path)
            request_file.write(args.path, standing)
    except FormatError as error:
        raise ConfigError(f"{args.path}: {error}; --clear removes it") from error
    except OSError as error:
        raise ConfigError(
            f"{args.path} cannot be used: {error}; PATH is the directory of the job's checkpoints, "
            "on a node where the job runs"
        ) from error
    said = f"the job is to end: {standing.text()}" if standing else "the job may go on"
    console.print(f"{args.path}: {said}", soft_wrap=True)
    if standing:
        console.print(f"{args.path}: {_who_reads_it(lookouts)}", soft_wrap=True)


def was_job_here(directory: str) -> bool:
    """Whether a job has left anything here: its claim, a shard, a version, a lease, or a request to
    it. Raises OSError."""
    from tierckpt.halt.request_file import FILE_NAME
    from tierckpt.storage.local.directory_claim import PREFIX
    from tierckpt.storage.local.store import LocalStore
    from tierckpt.storage.persistent import PersistentStore

    if any(n == FILE_NAME or n.startswith(PREFIX) for n in os.listdir(directory)):
        return True
    with closing(PersistentStore(directory)) as store:
        return bool(LocalStore(directory).shards_named()) or store.is_used()


def _asked(args: argparse.Namespace) -> HaltRequest:
    from tierckpt.halt import request_file

    if "://" in args.path:
        raise ConfigError(
            f"{args.path} is a URL, and no job looks for requests there: give the job's path, a "
            "directory, on one of its nodes"
        )
    before = request_file.parse_time(args.before, datetime.now()) if args.before else None
    asked = halt_conditions.HaltRequest(args.now, args.after_version, before, args.seconds_left)
    if wrong := asked.nonsense():
        raise ConfigError(f"nothing is asked for; {wrong}")
    if asked == halt_conditions.HaltRequest() and not (args.show or args.clear):
        raise ConfigError("nothing is asked for; see tierckpt halt --help for the conditions")
    return asked


def _lookouts(directory: str) -> list[str]:
    """Jobs that live on this machine and look for requests there, by name."""
    from tierckpt.config import load_config
    from tierckpt.storage.memory.job_directory import jobs_at

    real = os.path.realpath(directory)
    return [
        job.job
        for job in jobs_at(load_config().shm_dir)
        if real in map(os.path.realpath, job.watched())
    ]


def _nobody() -> str:
    from tierckpt.config import load_config
    from tierckpt.storage.memory.job_directory import JobDirectory

    root = JobDirectory.at(load_config().shm_dir, "").root
    return (
        f"of the jobs that live on this machine (those in {root}; TIERCKPT_SHM_DIR says where else "
        "to look) none looks there"
    )


def _make(directory: str) -> None:
    """As the job will, but not what it is in, which may be a file system that is not mounted."""
    from tierckpt.storage.files import durable

    folder = Path(directory)
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise ConfigError(
            f"{folder.absolute().parent} is not there; make it, unless it should have been mounted"
        )
    durable.make(folder, parents=False)


def _who_reads_it(lookouts: Sequence[str]) -> str:
    if lookouts:
        jobs = ", ".join(map(repr, lookouts))
        return f"job {jobs} on this machine reads it within some seconds"
    return (
        "no job on this machine looks there now; one on another that has this very directory reads "
        "it within some seconds, and one that is still to start reads it then"
    )
