"""Inventory and plan of a restart: what is left, where, and which of it to use.

`take_inventory` looks (I/O); `plan_restore` decides (pure). All ranks share their inventories once
and then plan alike, without talking again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .errors import CorruptShardError, FormatError
from .localstore import LocalStore
from .manifest import Manifest
from .naming import Lineage, ShardKey, VersionId, newest_first
from .persistent import PersistentError, PersistentStore
from .slots import JobDirectory

LEVELS = ("memory", "local", "persistent")
"""Cheapest first."""
EVERYWHERE = "*"
"""Host of what every node can read."""


@dataclass(frozen=True, order=True)
class Place:
    """One copy of one shard."""

    level: str
    host: str
    where: str
    """Path of the segment, directory of the store, or address of the persistent one."""


@dataclass(frozen=True)
class Found:
    """A shard that some rank sees, by its manifest; its data was not looked at."""

    key: ShardKey
    place: Place
    lineage: Lineage
    life: str = ""


@dataclass(frozen=True)
class Inventory:
    """What one rank sees."""

    found: tuple[Found, ...]
    problems: tuple[tuple[Place, str], ...]
    """Manifests that could not be read, and why."""
    generation: int
    """The newest generation seen, also in what is not restorable."""
    token: str = ""
    """A random name; rank 0's becomes that of the life that begins now."""


def take_inventory(
    job: JobDirectory, store: LocalStore, host: str, persistent: str = ""
) -> Inventory:
    """Look at memory and disk of this machine, and at the persistent level if its path is given
    (one rank's look is enough). Reads manifests only."""
    found = [
        Found(m.key, Place("memory", host, str(path)), m.lineage, m.life)
        for path, m in job.sealed()
    ]
    problems = [(Place("memory", host, str(path)), error) for path, error in job.damaged()]
    directory = str(store.directory.resolve())
    keys: list[ShardKey] = []
    try:
        keys = store.keys()
    except NotADirectoryError:
        pass  # said at attach; there is nothing in there
    except OSError as error:
        problems.append((Place("local", host, directory), str(error)))
    for key in keys:
        try:
            manifest = Manifest.decode(store.read_manifest(key))
            if manifest.key != key:
                raise FormatError(f"the manifest of {key} says it is {manifest.key}")
        except FileNotFoundError:
            continue  # retired by an agent of the life before while we looked
        except (OSError, CorruptShardError, FormatError) as error:
            problems.append((Place("local", host, f"{directory}/{key.stem}"), str(error)))
        else:
            found.append(
                Found(key, Place("local", host, directory), manifest.lineage, manifest.life)
            )
    if persistent:
        look_at_persistent(persistent, found, problems)
    generations = [f.key.id.generation for f in found] + [k.id.generation for k in keys]
    newest = max(generations, default=0)
    return Inventory(tuple(found), tuple(problems), newest, secrets.token_hex(8))


def look_at_persistent(path: str, found: list[Found], problems: list[tuple[Place, str]]) -> None:
    """Add what the persistent level has. A version's manifest is there only when all shards are."""
    place = Place("persistent", EVERYWHERE, path)
    store = PersistentStore(path)
    try:
        for name in store.versions():
            try:
                lineage = store.read_manifest(name).facts.lineage
            except (OSError, CorruptShardError, FormatError) as error:
                problems.append((place, f"{name}: {error}"))
                continue
            keys = [ShardKey(name.id, shard, name.shards) for shard in range(name.shards)]
            found += [Found(key, place, lineage, name.life) for key in keys]
    except FileNotFoundError:
        pass  # nothing was ever flushed
    except (OSError, PersistentError, ImportError) as error:
        problems.append((place, str(error)))
    finally:
        store.close()


@dataclass(frozen=True)
class Source:
    """Where one shard comes from."""

    shard: int
    place: Place
    reader: int
    """The rank that reads and verifies it."""
    direct: bool
    """Every rank sees the same copy: each maps it itself; otherwise the reader broadcasts it."""


@dataclass(frozen=True)
class RestorePlan:
    """Which version to restore, and each shard's source, by shard number."""

    id: VersionId
    sources: tuple[Source, ...]
    life: str = ""

    @property
    def levels(self) -> dict[str, int]:
        """How many shards come from which level."""
        names = [s.place.level for s in self.sources]
        return {level: names.count(level) for level in LEVELS if level in names}


def plan_restore(
    inventories: Sequence[Sequence[Found]],
    bad: frozenset[tuple[ShardKey, Place]] = frozenset(),
    version: int | None = None,
) -> RestorePlan | None:
    """The newest version whose every shard is somewhere, each shard from its cheapest place.

    All shards of a version are of one life. `bad` are copies found damaged; `version` asks for that
    one only. None when there is no such version. Same inputs, same plan: every rank calls this.
    """
    seen: dict[tuple[str, ShardKey], dict[Place, list[int]]] = {}
    lineages: dict[VersionId, Lineage] = {}
    for rank, inventory in enumerate(inventories):
        for item in inventory:
            lineages[item.key.id] = item.lineage
            if (item.key, item.place) not in bad:
                places = seen.setdefault((item.life, item.key), {})
                places.setdefault(item.place, []).append(rank)
    for id_ in newest_first(lineages.items()):
        if version is not None and id_.version != version:
            continue
        for life, shards in sorted({(life, k.shards) for life, k in seen if k.id == id_}):
            keys = [ShardKey(id_, s, shards) for s in range(shards)]
            if all((life, k) in seen for k in keys):
                places_of = {k: seen[life, k] for k in keys}
                return RestorePlan(id_, tuple(_assign(places_of, len(inventories))), life)
    return None


def _assign(places_of: dict[ShardKey, dict[Place, list[int]]], ranks: int) -> Iterator[Source]:
    """Pick a place and a reader for every shard; readers as evenly loaded as places allow."""
    load = [0] * ranks
    for key, places in places_of.items():
        place = min(places, key=lambda p: (LEVELS.index(p.level), p))
        everywhere = place.host == EVERYWHERE
        readers = list(range(ranks)) if everywhere else places[place]
        home = key.shard if key.shard in readers and load[key.shard] == 0 else None
        reader = home if home is not None else min(readers, key=lambda r: (load[r], r))
        load[reader] += 1
        yield Source(key.shard, place, reader, direct=len(readers) == ranks and not everywhere)
