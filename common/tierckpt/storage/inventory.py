"""Inventory before a restart: what is left, and where. `restore_plan` says which of it to use."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tierckpt.config import PersistentConfig
from tierckpt.core.copies import EVERYWHERE, Found, FoundParity, Inventory, Location, Pin, Problem
from tierckpt.errors import CorruptShardError, FormatError, TierckptError
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.storage.local.pins import LocalPins
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.job_directory import JobDirectory

from .persistent import PersistentStore
from .suspects import SuspectMarks, persistent_suspects


def take_inventory(
    job: JobDirectory, store: LocalStore, host: str, persistent: PersistentConfig | None = None
) -> Inventory:
    """Look at memory and disk of this machine, and at the persistent level if it is given (one
    rank's look is enough). Reads manifests only. What fails is told in `unseen`, whatever it is:
    the other ranks wait for what this one saw."""
    found: list[Found] = []
    problems: list[Problem] = []
    unseen: list[Problem] = []
    keys: list[ShardKey] = []
    parities: list[FoundParity] = []
    pins: tuple[Pin, ...] = ()
    suspects = dict[VersionId, str]()
    with _told(Location("memory", host, str(job.path)), unseen):
        look_at_memory(job, host, found, problems, unseen)
        suspects |= SuspectMarks(job.path).all()
    disk = Location("local", host, str(store.directory))
    with _told(disk, unseen):
        disk = replace(disk, where=str(store.directory.resolve()))
        keys = look_at_local(store, disk, found, problems, unseen)
    with _told(disk, unseen):
        parities = look_at_parities(store, disk, problems, unseen)
        pins = LocalPins(store.directory).pins()
        suspects |= SuspectMarks(store.directory).all()
    if persistent is not None and persistent.path:
        with _told(Location("persistent", EVERYWHERE, persistent.path), unseen):
            look_at_persistent(persistent, found, problems, unseen)
    there = [*keys, *(f.key for f in found), *(p.key for p in parities)]
    return Inventory(
        tuple(found),
        tuple(problems),
        tuple(unseen),
        max((key.id.generation for key in there), default=0),
        host,
        secrets.token_hex(24),
        tuple(parities),
        pins,
        tuple(suspects.items()),
    )


def nothing_seen(host: str, error: Exception) -> Inventory:
    """Of a rank that could not look at all."""
    why = f"{type(error).__name__}: {error}"
    unseen = Problem(Location("memory", host, f"node {host}"), why)
    return Inventory((), (), (unseen,), 0, host, secrets.token_hex(24))


@contextlib.contextmanager
def _told(place: Location, unseen: list[Problem]) -> Iterator[None]:
    """What is raised is one place that could not be seen; what was found there before counts."""
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
        told = unseen if isinstance(error, OSError) else problems
        told.append(Problem.of(Location("memory", host, str(path)), error))


def look_at_local(
    store: LocalStore,
    disk: Location,
    found: list[Found],
    problems: list[Problem],
    unseen: list[Problem],
) -> list[ShardKey]:
    """Add the files of this machine; returns all that are named, readable or not."""
    try:
        keys = store.keys()
    except NotADirectoryError:
        return []  # said at attach; there is nothing in there
    except OSError as error:
        unseen.append(Problem.of(disk, error))
        return []
    for key in keys:
        try:
            manifest = Manifest.decode(store.read_manifest(key))
            if manifest.key != key:
                raise FormatError(f"the manifest of {key} says it is {manifest.key}")
            if manifest.encoding and (base := manifest.encoding.base_of(key)) not in (None, *keys):
                raise FormatError(f"{key} refers to {base}, which is not there")
        except FileNotFoundError:
            continue  # retired by an agent of the run before while we looked
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
    """What this node keeps for the shards of others."""
    found = []
    try:
        keys = store.parities()
    except OSError:
        return []  # said of the shards already
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
) -> None:
    """Add what the persistent level has. A version's manifest is there only when all shards are."""
    place = Location("persistent", EVERYWHERE, persistent.path)
    root = Path(persistent.path)
    try:
        former_nodes = (
            "://" not in persistent.path and not root.exists() and not root.parent.is_dir()
        )
    except OSError as error:  # a mount that is dead
        unseen.append(Problem.of(place, error))
        return
    if former_nodes:
        why = f"{root.parent} is not there; make it, unless it should have been mounted"
        unseen.append(Problem(place, why))
        return
    try:
        store = PersistentStore(persistent.path, **persistent.options())
    except Exception as error:  # on one rank alone, so that it must not end here
        unseen.append(Problem.of(place, error, _kind_of(error)))
        return
    try:
        suspects = persistent_suspects(store)
        for name in store.versions():
            keys = tuple(ShardKey(name.id, shard, name.shards) for shard in range(name.shards))
            try:
                manifest = store.read_manifest(name)
                if lacking := [base for base in manifest.bases if not store.exists(base)]:
                    raise FormatError(f"it refers to {lacking[0]}, which is not there")
            except FileNotFoundError as error:  # retired meanwhile
                problems.append(Problem.of(place, error, f"{name}: "))
            except OSError as error:
                unseen.append(Problem.of(place, error, f"{name}: "))
            except (CorruptShardError, FormatError) as error:
                problems.append(Problem.of(place, error, f"{name}: ", keys))
            else:
                facts = manifest.facts
                if name in suspects:
                    facts = replace(facts, suspect=suspects[name])
                found += [Found(key, place, facts) for key in keys]
        for name in store.obstructed():
            why = f"{name}: a directory is in the place of its manifest"
            unseen.append(Problem(place, why))
    except FileNotFoundError:
        pass  # nothing was ever flushed
    except Exception as error:  # also a client's own: the other ranks wait for what is told here
        unseen.append(Problem.of(place, error, _kind_of(error)))
    finally:
        with contextlib.suppress(Exception):
            store.close()


def _kind_of(error: Exception) -> str:
    """Its name, where the text says too little without."""
    told = isinstance(error, (OSError, ImportError, TierckptError))
    return "" if told else f"{type(error).__name__}: "
