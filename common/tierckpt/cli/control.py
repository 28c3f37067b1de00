"""`tierckpt halt`, `takeover`, `fork`, `pin` and `unpin`: what a job, or its next start, obeys.

`halt` asks a running job to checkpoint and stop. `takeover` takes a persistent_path away from a
hanging job. `fork` lets a new job start from a version of another one; `unpin --forks` ends the
holds of forks. `pin` keeps a version. Each function imports what its command needs, so that `halt`
is quick.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt._text import is_url, some
from tierckpt.core import decisions
from tierckpt.core.branches import source_of
from tierckpt.errors import ConfigError, FormatError, PinError

from .arguments import place, version_number
from .output import steps_after

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.core.decisions import HaltRequest

__all__ = ["end_holds", "fork"]


def add_halt(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt halt PATH`."""
    parser.description = (
        "Asks a job to take a last checkpoint and stop as soon as one of the "
        "conditions holds. The request stays until it is cleared, and the job reads it within "
        "seconds. PATH is the job's path, or its persistent_path if it is a directory. A job "
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

    request = _halt_request(args)
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
        if request != decisions.HaltRequest():
            standing = (standing or decisions.HaltRequest()).merged(request)
            _make_request(args.path)
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
        console.print(f"{args.path}: {_request_reader(watching)}", soft_wrap=True)


def was_job_here(directory: str) -> bool:
    """Whether a job has left a claim, a shard, a version, a lease or a halt request here. Raises
    OSError."""
    from tierckpt.halt.request_file import FILE_NAME
    from tierckpt.storage.claims import CLAIM_PREFIX
    from tierckpt.storage.local import LocalStore
    from tierckpt.storage.persistent import PersistentStore

    if any(n == FILE_NAME or n.startswith(CLAIM_PREFIX) for n in os.listdir(directory)):
        return True
    with closing(PersistentStore(directory)) as store:
        return bool(LocalStore(directory).shards_named()) or store.is_used()


def _halt_request(args: argparse.Namespace) -> HaltRequest:
    from tierckpt.halt import request_file

    if "://" in args.path:
        raise ConfigError(
            f"{args.path} is a URL, and jobs do not watch URLs: give the job's path, a directory, "
            "on one of its nodes"
        )
    before = request_file.parse_time(args.before, datetime.now()) if args.before else None
    request = decisions.HaltRequest(args.now, args.after_version, before, args.seconds_left)
    if wrong := request.nonsense():
        raise ConfigError(f"the condition is not valid: {wrong}")
    if request == decisions.HaltRequest() and not (args.show or args.clear):
        raise ConfigError("no condition is given; tierckpt halt --help lists the conditions")
    return request


def _watching_jobs(directory: str) -> list[str]:
    """Names of the live jobs on this machine that watch this directory for requests."""
    from tierckpt.config import load_config
    from tierckpt.storage.job_directory import jobs_at

    real = os.path.realpath(directory)
    return [
        job.job
        for job in jobs_at(load_config().shm_dir)
        if real in map(os.path.realpath, job.watched())
    ]


def _no_job_watches() -> str:
    from tierckpt.config import load_config
    from tierckpt.storage.job_directory import JobDirectory

    root = JobDirectory.at(load_config().shm_dir, "").root
    return (
        f"no live job on this machine watches it (looked in {root}; TIERCKPT_SHM_DIR names another "
        "place)"
    )


def _remedy(directory: str) -> str:
    from tierckpt.offline.survey import MissingPathError, where_jobs_are

    with suppress(MissingPathError):
        return where_jobs_are(directory)
    return "give the job's path as it is on this node"


def _make_request(directory: str) -> None:
    """Make the directory as the job will, but not its parent, which may be an unmounted file
    system."""
    from tierckpt.storage import durable

    folder = Path(directory)
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise ConfigError(f"{folder.absolute().parent} does not exist; mount it, or make it")
    durable.make(folder, parents=False)


def _request_reader(watching: Sequence[str]) -> str:
    if watching:
        jobs = ", ".join(map(repr, watching))
        return f"job {jobs} on this machine reads it within seconds"
    return (
        "no job on this machine watches it now; a job on another machine with the same directory "
        "reads it within seconds, and a job that starts later reads it then"
    )


def add_takeover(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt takeover PATH`."""
    parser.description = (
        "Takes the lease of a persistent_path away from the job that holds it. The "
        "next job that asks for the lease gets it. Use this for a job that hangs and still renews "
        "its lease, if you cannot end it; the lease of a dead job expires by itself. PATH is a "
        "directory or a URL; the client of a URL gets the options in "
        "TIERCKPT_PERSISTENT_STORAGE_OPTIONS."
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.set_defaults(run=takeover)


def takeover(args: argparse.Namespace, console: Console) -> None:
    """Take the lease. Raises ConfigError."""
    from contextlib import closing

    from tierckpt._text import is_url
    from tierckpt.config import load_config
    from tierckpt.offline.survey import where_jobs_are
    from tierckpt.storage.persistent import PersistentStore

    there = load_config().persistent.at(args.path)
    try:
        if not is_url(args.path) and not Path(args.path).is_dir():
            raise ConfigError(f"{args.path} is not a directory; give a job's persistent_path")
        with closing(PersistentStore(there.path, **there.options())) as store:
            owner = store.take_over()
            if owner is None and not store.is_used():
                raise ConfigError(
                    f"{args.path}: no job has used this as its persistent_path: "
                    f"{where_jobs_are(args.path)}"
                )
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    result = f"taken from {owner}; the next job that asks gets it" if owner else "no job holds it"
    console.print(f"{args.path}: {result}", soft_wrap=True)


def add_fork(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt fork SOURCE[@VERSION] PATH`."""
    parser.description = (
        "The next run of the job with this PATH starts from the version, bit for "
        "bit, on any number of ranks, and continues with versions of its own. Nothing is copied: "
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
    from tierckpt.offline.survey import survey_of_job

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
                text = f"{args.path}: the order to start from {origin} is taken back, and its hold"
            console.print(text, soft_wrap=True)
            return
        wanted = source_of(args.source)
        theirs = survey_of_job(wanted.path)
        origin, sentences = order_fork(args.source, args.path, theirs)
    except OSError as error:
        raise ConfigError(f"no fork could be made: {error}") from error
    console.print(f"{args.path}: the next run starts from {origin}", soft_wrap=True)
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


def add_pin(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt pin PATH VERSION`."""
    _add_pin_arguments(parser, "pin")


def add_unpin(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt unpin PATH VERSION`."""
    _add_pin_arguments(parser, "unpin")
    text = "end the holds that forks have on the version, instead of the pin"
    parser.add_argument("--forks", action="store_true", help=text)


def _add_pin_arguments(parser: argparse.ArgumentParser, action: str) -> None:
    parser.description = (
        "PATH is a job's path on this node, its persistent_path, or the folder above the paths of "
        "its nodes, if these are visible here. A persistent_path may be a URL: its client gets the "
        "options in TIERCKPT_PERSISTENT_STORAGE_OPTIONS. If every node has a disk of its own, run "
        f"the command on all of them, or call {action}() in the job."
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.add_argument("version", type=version_number, metavar="VERSION")
    parser.set_defaults(run=mark, action=action, forks=False)


def mark(args: argparse.Namespace, console: Console) -> None:
    """Pin or unpin the version, or end the holds of its forks. Raises ConfigError, PinError."""
    if args.forks:
        end_holds(args, console)
        return
    from tierckpt.config import load_config
    from tierckpt.coordination.pinning import mark_at

    try:
        places = _places_of_job(args.path)
        marked = mark_at(args.action, args.version, places, load_config().persistent)
    except PinError as error:
        raise PinError(f"{args.path}: {error}{_elsewhere(args.path)}") from error
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    console.print(f"{args.path}: {args.action}ned {', '.join(marked)}", soft_wrap=True)


def _places_of_job(path: str) -> list[str]:
    """The directories of the job on this machine, or its URL. Raises MissingPathError, ConfigError
    for several jobs, PinError if its versions are in memory alone."""
    from tierckpt.offline.survey import survey_of_job

    if is_url(path):
        return [path]
    there = survey_of_job(path)
    if not there.directories:
        raise PinError(
            "the versions of this job are in memory alone, where nothing keeps them. Have the job "
            "write one: save(now=True), local_every_steps"
        )
    return [str(each) for each in there.directories]


def _elsewhere(path: str) -> str:
    """Where the versions may be, if there are none at the path."""
    from tierckpt.offline.survey import hints_of, survey

    hint = hints_of(path, survey(path))
    return f"; {hint}" if hint else ""
