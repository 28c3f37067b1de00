"""Inventory before a restart: the stored copies and their locations. `restore_plan` chooses among
them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tierckpt._text import error_text, is_url
from tierckpt.config import PersistentConfig
from tierckpt.core.branches import Rollback, RollbackRequest
from tierckpt.core.restore_plan import (
    EVERYWHERE,
    Found,
    FoundParity,
    Inventory,
    Location,
    Pin,
    Problem,
)
from tierckpt.errors import CorruptShardError, FormatError, TierckptError
from tierckpt.format.ids import ShardKey, VersionId, VersionName
from tierckpt.format.manifest import Manifest
from tierckpt.format.records import VersionManifest
from tierckpt.storage.job_directory import JobDirectory
from tierckpt.storage.local import LocalStore
from tierckpt.storage.marks import LocalPins

from . import answers
from .marks import local_suspects, persistent_suspects
from .notes import RollbackFiles

if TYPE_CHECKING:
    from .persistent import PersistentStore

MANIFESTS_AT_ONCE = 8
"""Manifests that come from a store at the same time."""


def take_inventory(
    job: JobDirectory,
    store: LocalStore,
    host: str,
    persistent: PersistentConfig | None = None,
    patience_seconds: float = answers.PATIENCE_SECONDS,
    say: Callable[[str], None] = lambda text: None,
    mirrors: Sequence[Path] = (),
) -> Inventory:
    """Inventory of memory and disk of this machine, and of the persistent level if it is given (it
    is enough that one rank reads that). Reads manifests only. Any failure is reported in `unseen`
    and raises nothing, because the other ranks wait for this rank's inventory.

    `mirrors`: directories on second disks of this machine (see `tierckpt.stages`). They and the
    persistent level have `patience_seconds` to answer; `say` is called when that takes long."""
    found: list[Found] = []
    problems: list[Problem] = []
    unseen: list[Problem] = []
    keys: list[ShardKey] = []
    parities: list[FoundParity] = []
    pins: tuple[Pin, ...] = ()
    suspects = dict[VersionId, str]()
    requests: list[RollbackRequest] = []
    rollbacks: list[Rollback] = []
    with _noting_errors(Location("memory", host, str(job.path)), unseen):
        look_at_memory(job, host, found, problems, unseen)
        suspects |= local_suspects(job.path).texts()
    disk = Location("local", host, str(store.directory))
    with _noting_errors(disk, unseen):
        disk = replace(disk, where=str(store.directory.resolve()))
        keys = look_at_local(store, disk, found, problems, unseen)
    for directory in mirrors:
        second = Location("mirror", host, str(directory))
        with _noting_errors(second, unseen):
            answers.ensure(str(directory.parent), patience_seconds, say)
            keys = [*keys, *look_at_local(LocalStore(directory), second, found, problems, unseen)]
    with _noting_errors(disk, unseen):
        parities = look_at_parities(store, disk, problems, unseen)
        pins = LocalPins(store.directory).pins()
        suspects |= local_suspects(store.directory).texts()
    more = requests, rollbacks, problems, unseen
    look_at_rollbacks(RollbackFiles(store.directory), disk, *more)
    if persistent is not None and persistent.path:
        with _noting_errors(Location("persistent", EVERYWHERE, persistent.path), unseen):
            rollback = requests, rollbacks
            look = patience_seconds, say
            look_at_persistent(persistent, found, problems, unseen, *rollback, *look)
    there = [*keys, *(f.key for f in found), *(p.key for p in parities)]
    return Inventory(
        tuple(found),
        tuple(problems),
        tuple(unseen),
        max([0, *(key.id.generation for key in there), *(each.generation for each in rollbacks)]),
        host,
        secrets.token_hex(24),
        tuple(parities),
        pins,
        tuple(suspects.items()),
        tuple(requests),
        tuple(rollbacks),
    )


def look_at_rollbacks(
    files: RollbackFiles,
    place: Location,
    requests: list[RollbackRequest],
    rollbacks: list[Rollback],
    problems: list[Problem],
    unseen: list[Problem],
) -> None:
    """Add the request and the record of one place. Those that cannot be used hide no version."""
    more_requests, more_rollbacks, errors = files.all()
    requests += more_requests
    rollbacks += more_rollbacks
    for error in errors:
        (unseen if isinstance(error, OSError) else problems).append(Problem.of(place, error))


def nothing_seen(host: str, error: Exception) -> Inventory:
    """Inventory of a rank that could not read any location."""
    why = error_text(error)
    unseen = Problem(Location("memory", host, f"node {host}"), why)
    return Inventory((), (), (unseen,), 0, host, secrets.token_hex(24))


@contextlib.contextmanager
def _noting_errors(place: Location, unseen: list[Problem]) -> Iterator[None]:
    """Turn an error into one location that could not be read; copies found there before it
    count."""
    try:
        yield
    except Exception as error:
        unseen.append(Problem.of(place, error, _kind_of(error)))


def look_at_memory(
    job: JobDirectory,
    host: str,
    found: list[Found],
    problems: list[Problem],
    unseen: list[Problem],
) -> None:
    """Add the slots of this machine."""
    for path, m in job.sealed():
        place = Location("memory", host, str(path))
        found.append(Found(m.key, place, m.facts, m.created_seconds))
    for path, error in job.damaged():
        target = unseen if isinstance(error, OSError) else problems
        target.append(Problem.of(Location("memory", host, str(path)), error))


def look_at_local(
    store: LocalStore,
    disk: Location,
    found: list[Found],
    problems: list[Problem],
    unseen: list[Problem],
) -> list[ShardKey]:
    """Add the files of this machine; returns the keys of all manifests, readable or not."""
    try:
        keys = store.keys()
    except NotADirectoryError:
        return []  # attach has reported it; the level is empty
    except OSError as error:
        unseen.append(Problem.of(disk, error))
        return []
    for key in keys:
        try:
            manifest = Manifest.decode(store.read_manifest(key))
            if manifest.key != key:
                raise FormatError(f"the manifest of {key} says it is {manifest.key}")
            if manifest.encoding and (base := manifest.encoding.base_of(key)) not in (None, *keys):
                raise FormatError(f"{key} refers to {base}, which does not exist")
        except FileNotFoundError:
            continue  # retired by an agent of the run before, after the listing
        except OSError as error:
            unseen.append(Problem.of(replace(disk, where=f"{disk.where}/{key.stem}"), error))
        except (CorruptShardError, FormatError) as error:
            where = replace(disk, where=f"{disk.where}/{key.stem}")
            problems.append(Problem.of(where, error, keys=(key,)))
        else:
            place = replace(disk, encoded=manifest.encoding is not None)
            found.append(Found(key, place, manifest.facts, manifest.created_seconds))
    return keys


def look_at_parities(
    store: LocalStore, place: Location, problems: list[Problem], unseen: list[Problem]
) -> list[FoundParity]:
    """Add the parities that this node keeps for other nodes' shards."""
    found = []
    try:
        keys = store.parities()
    except OSError:
        return []  # already reported for the shards
    if keys:
        from tierckpt.erasure.parity_manifest import ParityManifest
    for key in keys:
        try:
            record = ParityManifest.decode(store.read_manifest(key))
            if record.key != key:
                raise FormatError(f"the manifest of {key} says it is {record.key}")
        except FileNotFoundError:
            continue
        except OSError as error:
            unseen.append(Problem.of(place, error, f"{key}: "))
        except (CorruptShardError, FormatError) as error:
            problems.append(Problem.of(place, error, f"{key}: ", (key,)))
        else:
            code = (record.group, record.k, record.m)
            found.append(FoundParity(key, place, record.facts, *code))
    return found


def look_at_persistent(
    persistent: PersistentConfig,
    found: list[Found],
    problems: list[Problem],
    unseen: list[Problem],
    requests: list[RollbackRequest],
    rollbacks: list[Rollback],
    patience_seconds: float = answers.PATIENCE_SECONDS,
    say: Callable[[str], None] = lambda text: None,
) -> dict[VersionName, VersionManifest]:
    """Add the versions of the persistent level, and its requests and records of rollbacks. A
    manifest there means that all shards exist. Returns the manifests. For the last two arguments
    see `take_inventory`."""
    place = Location("persistent", EVERYWHERE, persistent.path)
    manifests: dict[VersionName, VersionManifest] = {}
    try:
        answers.ensure(persistent.path, patience_seconds, say)
    except answers.NoAnswerError as error:
        unseen.append(Problem.of(place, error))
        return manifests
    if (store := _opened(persistent, place, unseen)) is None:
        return manifests
    try:
        look = persistent_suspects(store).texts
        suspects = answers.within(persistent.path, patience_seconds, look, say)
        look_at_rollbacks(RollbackFiles(store), place, requests, rollbacks, problems, unseen)
        for name, read in _manifests_of(store, store.versions()):
            keys = tuple(ShardKey(name.id, shard, name.shards) for shard in range(name.shards))
            try:
                manifests[name] = manifest = read()
            except FileNotFoundError as error:  # retired after the listing
                problems.append(Problem.of(place, error, f"{name}: "))
            except OSError as error:
                unseen.append(Problem.of(place, error, f"{name}: "))
            except (CorruptShardError, FormatError) as error:
                problems.append(Problem.of(place, error, f"{name}: ", keys))
            else:
                facts = manifest.facts
                if name in suspects:
                    facts = replace(facts, suspect=suspects[name])
                found += [Found(key, place, facts, manifest.created_seconds) for key in keys]
        for name in store.obstructed():
            why = f"{name}: a directory has the name of its manifest"
            unseen.append(Problem(place, why))
    except FileNotFoundError:
        pass  # nothing was ever flushed
    except Exception as error:  # also a client's own errors: the other ranks wait for this report
        unseen.append(Problem.of(place, error, _kind_of(error)))
    finally:
        with contextlib.suppress(Exception):
            store.close()
    return manifests


def open_persistent(persistent: PersistentConfig, tries: int | None = None) -> PersistentStore:
    """Open the store of a persistent level; each call of it has so many `tries`, None: the usual
    number. Only here does a training process load the store's code: when it attaches, if the
    settings name such a level. Raises the errors of `PersistentStore`."""
    from .persistent import PersistentStore, RetryPolicy

    retry = None if tries is None else RetryPolicy(tries=tries)
    return PersistentStore(persistent.path, retry=retry, **persistent.options())


def _opened(
    persistent: PersistentConfig, place: Location, unseen: list[Problem]
) -> PersistentStore | None:
    """Open the store; None, with the reason in `unseen`, if that fails. Raises nothing, because one
    rank alone reads it."""
    root = Path(persistent.path)
    try:
        if "://" not in persistent.path and not root.exists() and not root.parent.is_dir():
            why = f"{root.parent} does not exist; create it, unless it should have been mounted"
            unseen.append(Problem(place, why))
            return None
        return open_persistent(persistent)
    except Exception as error:  # also of a dead mount
        unseen.append(Problem.of(place, error, _kind_of(error)))
        return None


def _manifests_of(
    store: PersistentStore, names: Sequence[VersionName]
) -> Iterator[tuple[VersionName, Callable[[], VersionManifest]]]:
    """Each version with a call that returns its manifest, or raises why it cannot be used. From a
    store many are read at once, as each takes a round trip."""
    there = set(names)

    def read(name: VersionName) -> VersionManifest:
        manifest = store.read_manifest(name)
        for base in manifest.bases:  # a request for each would take as long as a version
            if base not in there and not store.exists(base):
                raise FormatError(f"it refers to {base}, which does not exist")
        return manifest

    if not is_url(store.url) or len(names) < 2:
        yield from ((name, partial(read, name)) for name in names)
        return
    with ThreadPoolExecutor(MANIFESTS_AT_ONCE, "tierckpt-manifests") as pool:
        coming = [(name, pool.submit(read, name)) for name in names]
        yield from ((name, each.result) for name, each in coming)


def _kind_of(error: Exception) -> str:
    """The error's type, if its message says too little without it."""
    clear = isinstance(error, (OSError, ImportError, TierckptError))
    return "" if clear else f"{type(error).__name__}: "
