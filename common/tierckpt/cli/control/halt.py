"""`tierckpt halt`: ask a running job to checkpoint and stop."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.core import halt_conditions
from tierckpt.errors import ConfigError, FormatError

from ..arguments import place, version_number

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.core.halt_conditions import HaltRequest


def add_halt(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt halt PATH`."""
    parser.description = (
        "Asks a job to take a last checkpoint and stop as soon as one of the "
        "conditions holds. The request stays until it is cleared, and the job reads it within "
        "seconds. PATH is the job's path, or its persistent_path if that is a directory. A job "
        "that has not written to PATH yet is found on its own node, by its shared memory."
    )
    text = "a directory; jobs do not watch URLs (a persistent_path in an object store)"
    parser.add_argument("path", type=place, metavar="PATH", help=text)
    text = "stop when version V or a later one is taken"
    parser.add_argument("--after-version", type=version_number, metavar="V", help=text)
    text = (
        "stop before this time: HH:MM, or 2026-12-24T18:00. --seconds-left, or else the job's "
        "halt_seconds_left, says how long before. Without either the job stops just AFTER this "
        "time, at its next boundary"
    )
    parser.add_argument("--before", metavar="TIME", help=text)
    text = "stop S seconds before that time, and before the end of the scheduler's allocation"
    parser.add_argument("--seconds-left", type=float, metavar="S", help=text)
    parser.add_argument("--now", action="store_true", help="stop at once")
    parser.add_argument("--show", action="store_true", help="print the current request")
    text = "write the request even if no job has written to PATH yet; makes the directory"
    parser.add_argument("--force", action="store_true", help=text)
    text = "remove the current request; conditions given with --clear make a new one"
    parser.add_argument("--clear", action="store_true", help=text)
    parser.set_defaults(run=halt)


def halt(args: argparse.Namespace, console: Console) -> None:
    """Run the command. Raises ConfigError."""
    from tierckpt.halt import request_file

    request = _request(args)
    try:
        watching = _watching_jobs(args.path)
        if not (watching or args.force or was_job_here(args.path)):
            raise ConfigError(
                f"no job has written to {args.path} yet, and {_no_job_watches()}. A job that runs "
                f"elsewhere would never see the request: {_remedy(args.path)}. --force writes the "
                "request for a job that will start or write later"
            )
        if args.clear:
            request_file.clear(args.path)
        standing = request_file.read(args.path)
        if request != halt_conditions.HaltRequest():
            standing = (standing or halt_conditions.HaltRequest()).merged(request)
            _make(args.path)
            request_file.write(args.path, standing)
    except FormatError as error:
        raise ConfigError(f"{args.path}: {error}; --clear removes it") from error
    except OSError as error:
        raise ConfigError(
            f"{args.path} cannot be used: {error}; give the job's checkpoint directory, on a node "
            "where the job runs"
        ) from error
    state = f"the job is asked to stop: {standing.text()}" if standing else "the job may continue"
    console.print(f"{args.path}: {state}", soft_wrap=True)
    if standing:
        console.print(f"{args.path}: {_reader(watching)}", soft_wrap=True)


def was_job_here(directory: str) -> bool:
    """Whether a job has left a claim, a shard, a version, a lease or a halt request here. Raises
    OSError."""
    from tierckpt.halt.request_file import FILE_NAME
    from tierckpt.storage.local.directory_claim import PREFIX
    from tierckpt.storage.local.store import LocalStore
    from tierckpt.storage.persistent import PersistentStore

    if any(n == FILE_NAME or n.startswith(PREFIX) for n in os.listdir(directory)):
        return True
    with closing(PersistentStore(directory)) as store:
        return bool(LocalStore(directory).shards_named()) or store.is_used()


def _request(args: argparse.Namespace) -> HaltRequest:
    from tierckpt.halt import request_file

    if "://" in args.path:
        raise ConfigError(
            f"{args.path} is a URL, and jobs do not watch URLs: give the job's path, a directory, "
            "on one of its nodes"
        )
    before = request_file.parse_time(args.before, datetime.now()) if args.before else None
    request = halt_conditions.HaltRequest(args.now, args.after_version, before, args.seconds_left)
    if wrong := request.nonsense():
        raise ConfigError(f"the condition is not valid: {wrong}")
    if request == halt_conditions.HaltRequest() and not (args.show or args.clear):
        raise ConfigError("no condition is given; tierckpt halt --help lists the conditions")
    return request


def _watching_jobs(directory: str) -> list[str]:
    """Names of the live jobs on this machine that watch this directory for requests."""
    from tierckpt.config import load_config
    from tierckpt.storage.memory.job_directory import jobs_at

    real = os.path.realpath(directory)
    return [
        job.job
        for job in jobs_at(load_config().shm_dir)
        if real in map(os.path.realpath, job.watched())
    ]


def _no_job_watches() -> str:
    from tierckpt.config import load_config
    from tierckpt.storage.memory.job_directory import JobDirectory

    root = JobDirectory.at(load_config().shm_dir, "").root
    return (
        f"no live job on this machine watches it (looked in {root}; TIERCKPT_SHM_DIR names another "
        "place)"
    )


def _remedy(directory: str) -> str:
    from tierckpt.offline.folders import MissingPathError
    from tierckpt.offline.jobs import where_jobs_are

    with suppress(MissingPathError):
        return where_jobs_are(directory)
    return "give the job's path as it is on this node"


def _make(directory: str) -> None:
    """Make the directory as the job will, but not its parent, which may be an unmounted file
    system."""
    from tierckpt.storage.files import durable

    folder = Path(directory)
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise ConfigError(f"{folder.absolute().parent} does not exist; mount it, or make it")
    durable.make(folder, parents=False)


def _reader(watching: Sequence[str]) -> str:
    if watching:
        jobs = ", ".join(map(repr, watching))
        return f"job {jobs} on this machine reads it within seconds"
    return (
        "no job on this machine watches it now; a job on another machine with the same directory "
        "reads it within seconds, and a job that starts later reads it then"
    )
