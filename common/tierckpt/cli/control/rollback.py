"""`tierckpt rollback`: go back to an older version at the next start."""

from __future__ import annotations

import argparse
import secrets
import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt._text import is_url, some
from tierckpt.config import load_config
from tierckpt.core.rollback import RollbackRequest, nearest, pending
from tierckpt.errors import ConfigError, CorruptShardError, FormatError, RestoreError
from tierckpt.halt import request_file
from tierckpt.offline.jobs import where_jobs_are
from tierckpt.offline.survey import Survey, survey
from tierckpt.storage.persistent import PersistentStore
from tierckpt.storage.rollbacks import RollbackFiles

from ..arguments import place, version_number
from .halt import was_job_here

if TYPE_CHECKING:
    from rich.console import Console

MOST_SHOWN = 8
NAME_BYTES = 8


def add_rollback(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt rollback PATH VERSION`."""
    parser.description = (
        "The next start of the job takes VERSION, and trains on from there. Restarts "
        "after that take the newest version since then, never one that was given up. Nothing is "
        "deleted: later versions can be read until retention removes them, when newer versions "
        "of the next run are complete. PATH is a job's path on one of its nodes, or its "
        "persistent_path (its client gets the options in TIERCKPT_PERSISTENT_STORAGE_OPTIONS). A "
        "running job goes on until it ends."
    )
    parser.add_argument("path", type=place, metavar="PATH")
    parser.add_argument("version", type=version_number, nargs="?", metavar="VERSION")
    text = "take back a request that no start has carried out"
    parser.add_argument("--cancel", action="store_true", help=text)
    parser.set_defaults(run=rollback)


def rollback(args: argparse.Namespace, console: Console) -> None:
    """Run the command. Raises ConfigError, RestoreError."""
    if args.cancel == (args.version is not None):
        raise ConfigError("give a VERSION, or --cancel")
    try:
        with _files(args.path) as files:
            lines = _cancel(args, files) if args.cancel else _ask(args, files)
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be used: {error}") from error
    for text in lines:
        console.print(text, soft_wrap=True)


@contextmanager
def _files(path: str) -> Iterator[RollbackFiles]:
    if not is_url(path):
        if not Path(path).is_dir():
            raise ConfigError(f"{path} is not a directory; give a job's path or persistent_path")
        if not was_job_here(path):
            text = f"no job has written to {path}, so no start looks for a request there"
            raise ConfigError(f"{text}: {where_jobs_are(path)}")
        yield RollbackFiles(path)
        return
    there = load_config().persistent.at(path)
    with closing(PersistentStore(there.path, **there.options())) as store:
        yield RollbackFiles(store)


def _cancel(args: argparse.Namespace, files: RollbackFiles) -> list[str]:
    try:
        request = files.request()
    except (CorruptShardError, FormatError) as error:
        files.cancel()
        return [f"{args.path}: the request, which was damaged, is removed ({error})"]
    there = survey(args.path)
    open_ = {each.name for each in pending(there.requests, there.record)}
    files.cancel()
    if request is not None and request.name in open_:
        return [f"{args.path}: the request to go back to v{request.version} is taken back"]
    record = there.record
    if record is None:
        raise ConfigError(f"{args.path}: there is no request to go back")
    raise ConfigError(
        f"{args.path}: there is no request that could be taken back: a start went back to "
        f"v{record.version} already. As long as it has no version of its own, `tierckpt rollback "
        f"{shlex.quote(args.path)} VERSION` leads to a newer one again"
    )


def _ask(args: argparse.Namespace, files: RollbackFiles) -> Iterator[str]:
    there, wanted = survey(args.path), args.version
    plan = there.plan(wanted)
    here = wanted in _numbers(there)
    complete = [v for v in _numbers(there) if there.plan(v) is not None]
    abandoned = plan is None and there.plan(wanted, abandoned=True) is not None
    # Where versions are complete, all nodes are seen, and no other one has the missing shards.
    if plan is None and (abandoned or complete or not here):
        names = ", ".join(f"v{v}" for v in nearest(wanted, complete))
        there_is = (
            f"The nearest complete versions here are {names}" if names else "None is complete"
        )
        if abandoned:
            why = (
                f"v{wanted} was given up before: the job went back to an older version, and no "
                "run goes on from it (`tierckpt export` still reads it)"
            )
        else:
            why = f"there is no complete v{wanted}"
        raise RestoreError(
            f"{args.path}: {why}. Nothing was changed",
            f"{there_is}. If other nodes or another level may have it: give their path",
        )
    files.ask(RollbackRequest(wanted, secrets.token_hex(NAME_BYTES)))
    return _result(args.path, there, wanted, plan is not None)


def _numbers(there: Survey) -> list[int]:
    return sorted({each.key.id.version for each in there.copies})


def _result(path: str, there: Survey, wanted: int, complete: bool) -> Iterator[str]:
    yield f"{path}: the next start goes back to v{wanted}, on all ranks"
    if not complete:
        yield f"not all shards of v{wanted} are here: the start ends if other nodes lack the rest"
    if later := [v for v in _numbers(there) if v > wanted]:
        names = some([f"v{v}" for v in later[-MOST_SHOWN:]])
        yield (
            f"{names}: no start takes {'them' if later[1:] else 'it'} then. Nothing is deleted "
            "now; retention does when newer versions of that run are complete. To keep one: "
            f"tierckpt pin {shlex.quote(path)} VERSION"
        )
    halted = _is_to_halt(path)
    if there.living and not halted:
        yield (
            "the job runs now, and goes on until it ends: tierckpt halt "
            f"{shlex.quote(path)} --now ends it (--clear before the next start)"
        )
    if halted:
        yield (
            "a request to halt is there, at which the next start would end as well: tierckpt halt "
            f"{shlex.quote(path)} --clear, when the job has ended"
        )
    if there.living and wanted not in {version for *_, version in there.pinned}:
        yield (
            f"until the job ends, its retention may remove v{wanted}, and the next start would "
            f"fail: tierckpt pin {shlex.quote(path)} {wanted} keeps it on disk"
        )
    yield f"to take this back before that start: tierckpt rollback {shlex.quote(path)} --cancel"


def _is_to_halt(path: str) -> bool:
    """Whether there is a halt request, which stays until it is cleared."""
    with suppress(OSError, FormatError):
        return not is_url(path) and request_file.read(path) is not None
    return False


__all__ = ["rollback"]
