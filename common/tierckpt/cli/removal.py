"""`tierckpt rollback` and `delete`: which versions a job loses.

`rollback` goes back to an older version at the next start. `delete` removes versions of a job that
does not run, from all levels.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt._text import counted, is_url, size_text, some
from tierckpt.config import load_config
from tierckpt.core.branches import RollbackRequest, nearest_version, pending_request
from tierckpt.errors import ConfigError, CorruptShardError, FormatError, PinError, RestoreError
from tierckpt.format.ids import VersionId
from tierckpt.halt import request_file
from tierckpt.journal.segments import FOLDER, names_in, remove_all
from tierckpt.offline.catalog import Row, rows_of
from tierckpt.offline.survey import Survey, hints_of, refuse_several_jobs, survey, where_jobs_are
from tierckpt.storage.claims import claims_in
from tierckpt.storage.job_directory import JobBusyError
from tierckpt.storage.local import LocalStore
from tierckpt.storage.marks import LocalPins, local_suspects
from tierckpt.storage.notes import RollbackFiles, RunRecords
from tierckpt.storage.persistent import PersistentStore, VersionName

from .arguments import place, version_number, version_of
from .control import was_job_here

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["delete", "rollback"]


MAX_SHOWN = 8
NAME_BYTES = 8


def add_rollback(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt rollback PATH VERSION`."""
    parser.description = (
        "The next start of the job takes VERSION, and trains on from there. Restarts "
        "after that take the newest version since then, never one that was given up. Nothing is "
        "deleted: later versions can be read until retention removes them, when newer versions "
        "of the next run are complete. PATH is a job's path on one of its nodes, or its "
        "persistent_path (its client gets the options in TIERCKPT_PERSISTENT_STORAGE_OPTIONS). A "
        "running job continues until it ends."
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
    open_ = {each.name for each in pending_request(there.requests, there.record)}
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
    here = wanted in _numbers_in(there)
    complete = [v for v in _numbers_in(there) if there.plan(v) is not None]
    abandoned = plan is None and there.plan(wanted, abandoned=True) is not None
    # Where versions are complete, all nodes are seen, and no other one has the missing shards.
    if plan is None and (abandoned or complete or not here):
        names = ", ".join(f"v{v}" for v in nearest_version(wanted, complete))
        there_is = (
            f"The nearest complete versions here are {names}" if names else "None is complete"
        )
        if abandoned:
            why = (
                f"v{wanted} was given up before: the job went back to an older version, and no "
                "run continues from it (`tierckpt export` still reads it)"
            )
        else:
            why = f"there is no complete v{wanted}"
        raise RestoreError(
            f"{args.path}: {why}. Nothing was changed",
            f"{there_is}. If other nodes or another level may have it: give their path",
        )
    files.ask(RollbackRequest(wanted, secrets.token_hex(NAME_BYTES)))
    return _result(args.path, there, wanted, plan is not None)


def _numbers_in(there: Survey) -> list[int]:
    return sorted({each.key.id.version for each in there.copies})


def _result(path: str, there: Survey, wanted: int, complete: bool) -> Iterator[str]:
    yield f"{path}: the next start goes back to v{wanted}, on all ranks"
    if not complete:
        yield f"not all shards of v{wanted} are here: the start ends if other nodes lack the rest"
    if later := [v for v in _numbers_in(there) if v > wanted]:
        names = some([f"v{v}" for v in later[-MAX_SHOWN:]])
        yield (
            f"{names}: no start takes {'them' if later[1:] else 'it'} then. Nothing is deleted "
            "now; retention does when newer versions of that run are complete. To keep one: "
            f"tierckpt pin {shlex.quote(path)} VERSION"
        )
    halted = _is_to_halt(path)
    if there.living and not halted:
        yield (
            "the job runs now, and continues until it ends: tierckpt halt "
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


NOTHING = "Nothing was deleted"


def add_delete(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt delete PATH (--versions V... | --all)`."""
    parser.description = (
        "Removes versions from all levels: this machine's memory, the local disk with the parity "
        "for other nodes, and the persistent_path of its recorded runs. Shows them first, and "
        "asks. Refused as a whole while the job runs, and if a version is pinned, held for a fork, "
        "or needed by one that stays. The records for `tierckpt log` stay. PATH is the job's path, "
        "or the folder above the paths of its nodes; a persistent_path alone leaves the nodes' own "
        "levels as they are. If every node has a disk of its own, run the command on all of them."
    )
    parser.add_argument("path", type=place, metavar="PATH")
    which = parser.add_mutually_exclusive_group(required=True)
    text = "versions, as 4000 or v4000, and ranges of those that there are, as 1000..2000"
    which.add_argument("--versions", type=_numbers, nargs="+", metavar="V", help=text)
    text = "all versions, with the journal: the next run starts from nothing"
    which.add_argument("--all", action="store_true", help=text)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=delete)


def _numbers(text: str) -> tuple[int, int]:
    """The first and the last version that a text names. Raises ArgumentTypeError."""
    first, dots, last = text.partition("..")
    found = version_of(first), version_of(last if dots else first)
    if found[0] is None or found[1] is None or found[0] > found[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no version, and no range of them; write 4000, v4000 or 1000..2000"
        )
    return found[0], found[1]


def delete(args: argparse.Namespace, console: Console) -> int:
    """Run the command. Raises ConfigError, JobBusyError, PinError."""
    there = _survey(args.path)
    rows = _chosen(args, there)
    _refuse(args.path, rows, there)
    for text in _preview(args, rows, there):
        console.print(text, soft_wrap=True)
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{args.path}: nobody can be asked here. {NOTHING}; --yes deletes")
        if console.input("delete them for ever? [y/N] ").strip().lower() not in ("y", "yes"):
            console.print(NOTHING)
            return 1
        asked, there = rows, _survey(args.path)  # the answer may have taken its time
        rows = _chosen(args, there)
        _refuse(args.path, rows, there)
        if rows != asked:
            raise ConfigError(f"{args.path}: the versions have changed meanwhile. {NOTHING}")
    _remove(args, rows, there)
    console.print(f"{args.path}: deleted {_named(rows)}", soft_wrap=True)
    return 0


def _survey(path: str) -> Survey:
    """The survey of the path, and of the persistent places that its runs have used. Raises
    MissingPathError and ConfigError."""
    there = survey(path)
    if far := [each for each in _recorded(there) if each != path and _is_here(each)]:
        there = survey([path, *far])
    refuse_several_jobs(there, path)
    if there.unseen:
        raise ConfigError(f"{path}: not all places can be read: {there.troubles[0]}. {NOTHING}")
    return there


def _recorded(there: Survey) -> list[str]:
    """The persistent places in the records of runs that are there."""
    runs = (RunRecords(folder).all().records for folder in there.directories)
    return sorted({record.persistent for each in runs for record in each} - {""})


def _is_here(where: str) -> bool:
    return is_url(where) or os.path.isdir(where)


def _chosen(args: argparse.Namespace, there: Survey) -> list[Row]:
    """The rows to remove. Raises ConfigError for a missing version."""
    own = [row for row in rows_of(there) if not row.elsewhere]
    if not own:
        hint = hints_of(args.path, there)
        raise ConfigError(f"{args.path}: no checkpoints here{f'; {hint}' if hint else ''}")
    if args.all:
        return own
    known = sorted({row.version for row in own})
    for first, last in args.versions:
        if not any(first <= version <= last for version in known):
            wanted = f"v{first}" if first == last else f"version from v{first} to v{last}"
            near = ", ".join(f"v{version}" for version in nearest_version(first, known))
            raise ConfigError(f"{args.path}: there is no {wanted}; near it: {near}. {NOTHING}")
    return [row for row in own if any(a <= row.version <= b for a, b in args.versions)]


def _refuse(path: str, rows: Sequence[Row], there: Survey) -> None:
    """Raise JobBusyError, PinError or ConfigError if a version must stay."""
    if user := next(_users(there), ""):
        raise JobBusyError(f"{path}: {user}. {NOTHING}")
    quoted = shlex.quote(path)
    for row in rows:
        if row.pinned or row.held_for:
            why = "is pinned" if row.pinned else f"is held for the fork {some(row.held_for, 2)}"
            cure = f"tierckpt unpin {quoted} {row.version}{'' if row.pinned else ' --forks'}"
            raise PinError(f"{path}: v{row.version} {why}. {NOTHING}; {cure} ends that")
    going = {row.version for row in rows}
    for row in rows:
        if staying := [version for version in row.needed_by if version not in going]:
            names = some([f"v{version}" for version in staying], MAX_SHOWN)
            raise ConfigError(
                f"{path}: {names} on {row.level} refers to v{row.version}, and could not be read "
                f"without it. {NOTHING}; delete both"
            )


def _users(there: Survey) -> Iterator[str]:
    """Yield what uses the job's places now, as text."""
    own = [job for job in there.jobs if job.job not in there.elsewhere]
    if any(job.trains() for job in own):
        yield "the job runs now: tierckpt halt ends it, with a last checkpoint"
    elif any(job.alive() for job in own):
        yield (
            "the job has ended, and an agent of it still works or waits for a restart "
            "(tierckpt watch shows it); it ends by itself"
        )
    for folder in there.directories:
        for claim, lives in claims_in(folder):
            if lives:
                yield f"a job uses {folder}: {claim.text()}"
    for where in _far(there):
        with closing(there.open_store(where)) as store:
            lease = store.lease_record()
        if lease is not None and lease.run_id and lease.expires_seconds > time.time():
            left = lease.expires_seconds - time.time()
            yield (
                f"{where} is in use by {lease.owner}; if that was killed, its lease ends in "
                f"{left:.0f} s"
            )


def _far(there: Survey) -> list[str]:
    return sorted({each.place.where for each in there.found if each.place.level == "persistent"})


def _preview(args: argparse.Namespace, rows: Sequence[Row], there: Survey) -> Iterator[str]:
    for row in rows:
        parts = f"{len(row.there)} of {row.shards} shards" if row.there else "parity"
        where = some(sorted({_folder(each) for each in row.places}), 2)
        size = f", {size_text(row.nbytes)}" if row.nbytes else ""
        yield f"v{row.version} on {row.level}: {parts}{size}, in {where}"
    if args.all and any(names_in(folder / FOLDER) for folder in there.directories):
        yield "the journal of gradients"
    for where in _recorded(there):
        if not _is_here(where):
            yield f"{where} is not here: what the job has there stays"
    left = [each for each in rows_of(there) if each not in rows and each.restartable]
    if not left:
        yield "no version that a restart could take is left: the next run starts from nothing"
    elif any(row.next for row in rows):
        yield f"a restart then takes v{max(row.version for row in left)}"
    if any(row.missing and row.level == "local" for row in rows):
        yield "other nodes have more shards of these versions: run this there, too"


def _folder(where: str) -> str:
    """The folder of a segment in memory; another place as it is."""
    return re.sub(r"/r\d{5,}\.\d+$", "", where)


def _named(rows: Sequence[Row]) -> str:
    versions = [f"v{version}" for version in sorted({row.version for row in rows})]
    return f"{counted(len(versions), 'version')}: {some(versions, MAX_SHOWN)}"


# --- removing ------------------------------------------------------------------------------------


def _remove(args: argparse.Namespace, rows: Sequence[Row], there: Survey) -> None:
    """Remove the versions, the newest first: those that refer to others go before these. Raises
    JobBusyError and PinError if a job or a pin has come since they were looked for."""
    ids = sorted({VersionId(row.generation, row.version) for row in rows}, reverse=True)
    for job in there.jobs:
        if job.job not in there.elsewhere and not job.remove_versions(ids):
            raise JobBusyError(f"{args.path}: the job has started. Its versions in memory stay")
    with ExitStack() as stack:
        stores = {
            where: stack.enter_context(closing(there.open_store(where))) for where in _far(there)
        }
        for id_ in ids:
            for folder in there.directories:
                _remove_local(LocalPins(folder), id_)
            for name, where in {
                (VersionName(id_, each.key.shards, each.facts.run_id), each.place.where)
                for each in there.found
                if each.key.id == id_ and each.place.level == "persistent"
            }:
                if not stores[where].retire(name):
                    raise PinError(f"{where}: {name} has been pinned meanwhile, and stays")
        for folder in there.directories:
            names = [n for n in names_in(folder / FOLDER) if args.all or n.base.id in ids]
            remove_all(folder / FOLDER, names)
        if args.all:
            _remove_rest(there, stores.values())


def _remove_rest(there: Survey, stores: Iterable[PersistentStore]) -> None:
    """Remove what is no version: unfinished and spare files, slots, requests to go back."""
    for job in there.jobs:
        if job.job not in there.elsewhere:
            job.remove_orphans()
            job.remove_if_unused()
    for folder in there.directories:
        local = LocalStore(folder)
        for shard in local.shards_named():
            local.clean(shard)
            local.drop_spare(shard)
        RollbackFiles(folder).cancel()
    for store in stores:
        for name in store.incomplete():
            store.give_up(name)
        RollbackFiles(store).cancel()


def _remove_local(pins: LocalPins, id_: VersionId) -> None:
    store = LocalStore(pins.directory)
    keys = [key for key in (*store.keys(), *store.parities()) if key.id == id_]
    if not keys:
        return
    with pins.spared(id_) as stays:
        if stays:
            raise PinError(f"{pins.directory}: {id_} has been pinned meanwhile, and stays")
        for key in keys:
            store.retire(key, reuse=False)
    local_suspects(pins.directory).unmark([id_])
