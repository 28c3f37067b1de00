"""Inventory and plan of a restart: what is left, where, and which of it to use.

`take_inventory` looks (I/O); `plan_restore` decides (pure). All ranks share their inventories once
and then plan alike, without talking again.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from .config import PersistentConfig
from .errors import (
    CorruptShardError,
    FormatError,
    NewerFormatError,
    RestoreError,
    TierckptError,
)
from .localstore import LocalStore
from .manifest import Manifest
from .naming import Lineage, ParityKey, ShardKey, VersionId, newest_first
from .persistent import PersistentStore
from .redundancy.codes import Code, Segment
from .redundancy.schedule import plan_rebuild
from .slots import JobDirectory

LEVELS = ("memory", "local", "peer", "persistent")
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
    encoded: bool = False
    """On the local level: modules have changed it."""

    @property
    def mappable(self) -> bool:
        """True when its bytes are there as soon as it is opened."""
        return self.level != "persistent" and not self.encoded


@dataclass(frozen=True)
class Found:
    """A shard that some rank sees, by its manifest; its data was not looked at."""

    key: ShardKey
    place: Place
    lineage: Lineage
    life: str = ""
    metric: float | None = None
    """Of the version, in a local shard 0's manifest."""
    complete: VersionId | None = None
    """A version that was on all ranks' disks when this shard was taken."""


@dataclass(frozen=True)
class FoundParity:
    """Parity that some rank sees, by its manifest."""

    key: ParityKey
    place: Place
    lineage: Lineage
    life: str
    group: tuple[int, ...]
    """The members' shard numbers, in the order of the ring."""
    k: int
    m: int


class Problem(NamedTuple):
    """Why something cannot be used, or seen."""

    place: Place
    why: str
    newer: bool = False
    """It is of a newer format."""

    @staticmethod
    def of(place: Place, error: Exception, what: str = "") -> Problem:
        """What `error` makes of it; `what` comes first, where the place says too little."""
        return Problem(place, f"{what}{error}", isinstance(error, NewerFormatError))


@dataclass(frozen=True)
class Inventory:
    """What one rank sees."""

    found: tuple[Found, ...]
    problems: tuple[Problem, ...]
    """Manifests that could not be read, and why."""
    unseen: tuple[Problem, ...]
    """Where it could not be seen what is there at all, and why."""
    generation: int
    """The newest generation seen, also in what is not restorable."""
    host: str = ""
    """The node's."""
    token: str = ""
    """Random; of rank 0's are made the name and the secret of the life that begins now."""
    parities: tuple[FoundParity, ...] = ()


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
    with _told(Place("memory", host, str(job.path)), unseen):
        look_at_memory(job, host, found, problems)
    disk = Place("local", host, str(store.directory))
    with _told(disk, unseen):
        disk = replace(disk, where=str(store.directory.resolve()))
        keys = look_at_local(store, disk, found, problems, unseen)
    with _told(disk, unseen):
        parities = look_at_parities(store, disk, problems)
    if persistent is not None and persistent.path:
        with _told(Place("persistent", EVERYWHERE, persistent.path), unseen):
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
    )


def nothing_seen(host: str, error: Exception) -> Inventory:
    """Of a rank that could not look at all."""
    why = f"{type(error).__name__}: {error}"
    unseen = Problem(Place("memory", host, f"node {host}"), why)
    return Inventory((), (), (unseen,), 0, host, secrets.token_hex(24))


@contextlib.contextmanager
def _told(place: Place, unseen: list[Problem]) -> Iterator[None]:
    """What is raised is one place that could not be seen; what was found there before counts."""
    try:
        yield
    except Exception as error:
        unseen.append(Problem.of(place, error, _kind_of(error)))


def look_at_memory(
    job: JobDirectory, host: str, found: list[Found], problems: list[Problem]
) -> None:
    """Add the slots of this machine."""
    for path, m in job.sealed():
        place = Place("memory", host, str(path))
        found.append(Found(m.key, place, m.lineage, m.life, complete=m.complete))
    for path, error in job.damaged():
        problems.append(Problem.of(Place("memory", host, str(path)), error))


def look_at_local(
    store: LocalStore,
    disk: Place,
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
            continue  # retired by an agent of the life before while we looked
        except (OSError, CorruptShardError, FormatError) as error:
            problems.append(Problem.of(replace(disk, where=f"{disk.where}/{key.stem}"), error))
        else:
            place = replace(disk, encoded=manifest.encoding is not None)
            told = (manifest.lineage, manifest.life, manifest.metric, manifest.complete)
            found.append(Found(key, place, *told))
    return keys


def look_at_parities(store: LocalStore, place: Place, problems: list[Problem]) -> list[FoundParity]:
    """What this node keeps for the shards of others."""
    found = []
    try:
        keys = store.parities()
    except OSError:
        return []  # said of the shards already
    if keys:
        from .peer.parity import ParityManifest  # and with it numpy
    for key in keys:
        try:
            record = ParityManifest.decode(store.read_manifest(key))
            if record.key != key:
                raise FormatError(f"the manifest of {key} says it is {record.key}")
        except FileNotFoundError:
            continue
        except (OSError, CorruptShardError, FormatError) as error:
            problems.append(Problem.of(place, error, f"{key}: "))
        else:
            made = (record.lineage, record.life, record.group, record.k, record.m)
            found.append(FoundParity(key, place, *made))
    return found


def look_at_persistent(
    persistent: PersistentConfig,
    found: list[Found],
    problems: list[Problem],
    unseen: list[Problem],
) -> None:
    """Add what the persistent level has. A version's manifest is there only when all shards are."""
    place = Place("persistent", EVERYWHERE, persistent.path)
    root = Path(persistent.path)
    try:
        absent = "://" not in persistent.path and not root.exists() and not root.parent.is_dir()
    except OSError as error:  # a mount that is dead
        unseen.append(Problem.of(place, error))
        return
    if absent:
        why = f"{root.parent} is not there; make it, unless it should have been mounted"
        unseen.append(Problem(place, why))
        return
    try:
        store = PersistentStore(persistent.path, **persistent.options())
    except Exception as error:  # on one rank alone, so that it must not end here
        unseen.append(Problem.of(place, error, _kind_of(error)))
        return
    try:
        for name in store.versions():
            try:
                manifest = store.read_manifest(name)
                lineage = manifest.facts.lineage
                if lacking := [base for base in manifest.bases if not store.exists(base)]:
                    raise FormatError(f"it refers to {lacking[0]}, which is not there")
            except (OSError, CorruptShardError, FormatError) as error:
                problems.append(Problem.of(place, error, f"{name}: "))
                continue
            keys = [ShardKey(name.id, shard, name.shards) for shard in range(name.shards)]
            found += [Found(key, place, lineage, name.life) for key in keys]
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


REBUILT = Place("peer", EVERYWHERE, "rebuilt")
"""Of what was lost and is made again."""


@dataclass(frozen=True)
class Source:
    """Where one shard comes from."""

    shard: int
    place: Place
    reader: int
    """The rank that reads and verifies it, or makes it."""
    direct: bool
    """Every rank sees the same copy: each maps it itself; otherwise the reader broadcasts it."""

    @property
    def rebuilt(self) -> bool:
        """It is nowhere: its reader makes it and holds it."""
        return self.place == REBUILT


@dataclass(frozen=True)
class ParitySource:
    """Where the parity beside one member's shard is, and the rank that reads and checks it."""

    member: int
    """On the ring."""
    key: ParityKey
    place: Place
    reader: int
    segments: tuple[int, ...]
    """Which of it are read; nothing is made of the others."""


@dataclass(frozen=True)
class Rebuild:
    """Lost shards of one redundancy group, and what they are made from."""

    group: tuple[int, ...]
    lost: tuple[int, ...]
    """Shard numbers."""
    parities: tuple[ParitySource, ...]
    """Those that it takes; members that are not lost have their shards elsewhere in the plan."""
    left: frozenset[ParityKey] = frozenset()
    """All that there are and that nobody found damaged."""


@dataclass(frozen=True)
class RestorePlan:
    """Which version to restore, and each shard's source, by shard number."""

    id: VersionId
    sources: tuple[Source, ...]
    life: str = ""
    rebuilds: tuple[Rebuild, ...] = ()

    @property
    def levels(self) -> dict[str, int]:
        """How many shards come from which level."""
        names = [s.place.level for s in self.sources]
        return {level: names.count(level) for level in LEVELS if level in names}


Bad = frozenset[tuple[ShardKey, Place]]
Readers = Mapping[tuple[ShardKey, Place], int]
"""Who read a copy at an earlier try, and has it."""
Unreachable = frozenset[tuple[ShardKey, Place, int]]
"""Copies that a rank could not get at, and that rank; others may."""


def plan_restore(
    inventories: Sequence[Sequence[Found]],
    bad: Bad = frozenset(),
    version: int | None = None,
    parities: Sequence[Sequence[FoundParity]] = (),
    readers: Readers = MappingProxyType({}),
    unreachable: Unreachable = frozenset(),
    nodes: Sequence[str] = (),
) -> RestorePlan | None:
    """The newest version whose every shard is somewhere, or can be rebuilt, each shard from its
    cheapest place.

    All shards of a version are of one life. `bad` are copies found damaged; `version` asks for that
    one only; `readers` read the same copies again; nobody is to read what is `unreachable` to it
    (see `_Sight`), and a copy is lost when nobody is left. `nodes` names every rank's; without it
    each rank is on one of its own. None when there is no such version. Same inputs, same plan:
    every rank calls this.
    """
    nodes = nodes or [str(rank) for rank in range(len(inventories))]
    sight = _Sight(len(inventories), readers, unreachable)
    seen: dict[tuple[str, ShardKey], dict[Place, list[int]]] = {}
    lineages: dict[VersionId, Lineage] = {}
    for rank, inventory in enumerate(inventories):
        for item in inventory:
            lineages[item.key.id] = item.lineage
            if (item.key, item.place) not in bad:
                places = seen.setdefault((item.life, item.key), {})
                places.setdefault(item.place, []).append(rank)
    lineages.update({p.key.id: p.lineage for each in parities for p in each})
    lives = {(life, k.id, k.shards) for life, k in seen}
    lives |= {(p.life, p.key.id, p.key.shards) for each in parities for p in each}
    for id_ in newest_first(lineages.items()):
        if version is not None and id_.version != version:
            continue
        for life, shards in sorted({(life, n) for life, i, n in lives if i == id_}):
            keys = [ShardKey(id_, s, shards) for s in range(shards)]
            places_of = {k: p for k in keys if (p := sight.of(k, seen.get((life, k), {})))}
            made_of = _parities_of(keys[0], parities, life, bad, unreachable)
            there, rebuilds, lost = _put_together(keys, places_of, made_of)
            if not lost:
                sources = tuple(_assign(keys, there, nodes))
                return RestorePlan(id_, sources, life, rebuilds)
    return None


class _Sight:
    """Which ranks are to read which copies.

    Who could not get at one shard of a version on the persistent level is asked for no other shard
    of it there, or one that lacks the mount would be tried shard after shard; and for no other
    version as long as there is a rank to which all went well. Who has a copy from an earlier try
    keeps it. Near levels are told copy by copy.
    """

    def __init__(self, ranks: int, had: Readers, unreachable: Unreachable) -> None:
        self._everyone: Sequence[int] = range(ranks)
        self._had, self._unreachable = had, unreachable
        far = [(key, place, rank) for key, place, rank in unreachable if _is_far(place)]
        self._without = {(key.id, place, rank) for key, place, rank in far}
        self._trouble = {(place, rank) for _, place, rank in far}
        self._of_all: dict[tuple[VersionId, Place], Sequence[int]] = {}

    def of(self, key: ShardKey, seen: Mapping[Place, Sequence[int]]) -> Places:
        """Of the places where ranks saw the shard, those that are left, with who may read there."""
        readers = {place: self._readers(key, place, ranks) for place, ranks in seen.items()}
        return {place: ranks for place, ranks in readers.items() if ranks}

    def _readers(self, key: ShardKey, place: Place, seers: Sequence[int]) -> Sequence[int]:
        holder = self._had.get((key, place))
        if holder is not None and (key, place, holder) not in self._unreachable:
            return [holder]
        if place.host != EVERYWHERE:
            return [rank for rank in seers if (key, place, rank) not in self._unreachable]
        if (key.id, place) not in self._of_all:
            self._of_all[key.id, place] = self._all_but_those_in_trouble(key.id, place)
        return self._of_all[key.id, place]

    def _all_but_those_in_trouble(self, version: VersionId, place: Place) -> Sequence[int]:
        if not self._trouble:
            return self._everyone
        left = [rank for rank in self._everyone if (version, place, rank) not in self._without]
        return [rank for rank in left if (place, rank) not in self._trouble] or left


def _is_far(place: Place) -> bool:
    return place.level == "persistent"


Places = dict[Place, Sequence[int]]
"""Where a shard is, and which ranks may read it there."""


def _put_together(
    keys: Sequence[ShardKey], places_of: Mapping[ShardKey, Places], parities: Parities
) -> tuple[dict[ShardKey, Places], tuple[Rebuild, ...], set[int]]:
    """Where to take shards from, what to make, and which of them there is no way to.

    What other nodes' can make is not fetched from far away, nor what is near: the rest alone.
    """
    near = {
        key: there
        for key, places in places_of.items()
        if (there := {place: ranks for place, ranks in places.items() if not _is_far(place)})
    }
    rebuilds, lost = plan_rebuilds(keys, near, parities)
    if lost:
        near |= {key: places_of[key] for key in keys if key.shard in lost and key in places_of}
        rebuilds, lost = plan_rebuilds(keys, near, parities)
    return near, rebuilds, lost


def plan_rebuilds(
    keys: Sequence[ShardKey], there: Container[ShardKey], parities: Parities
) -> tuple[tuple[Rebuild, ...], set[int]]:
    """How to make the shards of `keys` that are not `there`; and which of them cannot be made."""
    lost = {key.shard for key in keys if key not in there}
    rebuilds = []
    load: Counter[int] = Counter()
    for (group, k, m), parity_keys in parities.items():
        gone = tuple(shard for shard in group if shard in lost)
        if not gone:
            continue
        members = {group.index(shard) for shard in gone}
        no_parity = set(range(len(group))) - {group.index(key.shard) for key in parity_keys}
        try:
            tasks = plan_rebuild(Code(len(group), k, m), members, no_parity, restore_parities=False)
        except RestoreError:
            continue
        needed = sorted(s for task in tasks for s in task.sources if s.parity)
        sources = tuple(
            _parity_source(key, places, load, [s for s in needed if group[s.member] == key.shard])
            for key, places in sorted(parity_keys.items())
            if any(group[s.member] == key.shard for s in needed)
        )
        rebuilds.append(Rebuild(group, gone, sources, frozenset(parity_keys)))
        lost -= set(gone)
    return tuple(rebuilds), lost


ParityPlaces = dict[ParityKey, dict[Place, list[int]]]
"""Where each is, and which ranks may read it there."""
Parities = dict[tuple[tuple[int, ...], int, int], ParityPlaces]
"""By group and code."""


def _parities_of(
    key: ShardKey,
    parities: Sequence[Sequence[FoundParity]],
    life: str,
    bad: Bad,
    unreachable: Unreachable,
) -> Parities:
    """What there is of the version that `key` is of."""
    found: Parities = {}
    for rank, inventory in enumerate(parities):
        for p in inventory:
            same = (p.life, p.key.id, p.key.shards) == (life, key.id, key.shards)
            lost = (p.key, p.place) in bad or (p.key, p.place, rank) in unreachable
            if same and not lost:
                places = found.setdefault((p.group, p.k, p.m), {}).setdefault(p.key, {})
                places.setdefault(p.place, []).append(rank)
    return dict(sorted(found.items()))


def _parity_source(
    key: ParityKey,
    places: Mapping[Place, Sequence[int]],
    load: Counter[int],
    segments: Sequence[Segment],
) -> ParitySource:
    """Read by the rank that has least to read of those that see it."""
    place = min(places)
    reader = min(places[place], key=lambda rank: (load[rank], rank))
    load[reader] += 1
    return ParitySource(segments[0].member, key, place, reader, tuple(s.index for s in segments))


def _assign(
    keys: Sequence[ShardKey], places_of: Mapping[ShardKey, Places], nodes: Sequence[str]
) -> list[Source]:
    """Pick a place and a reader, or a maker, for every shard; ranks as evenly loaded as places
    allow, and nodes as evenly as that allows (see `_Load`).

    Copies that only one rank is to read, which may have them already, count first. A shard is its
    own rank's (see `mending`), where it has one that can and has nothing else to do; of what all
    see only where there is one for each rank, as few might all be of one node.
    """
    load, making = _Load(nodes), _Load(nodes)
    readers: dict[ShardKey, int] = {}
    nearest = {
        key: min(places, key=lambda p: (LEVELS.index(p.level), p))
        for key, places in places_of.items()
    }
    ranks = range(len(nodes))
    far = [key for key, place in nearest.items() if place.host == EVERYWHERE]
    far_homes = len(far) == len(nodes)
    for key in sorted(nearest, key=lambda key: (len(places_of[key][nearest[key]]) > 1, key.shard)):
        place = nearest[key]
        home = key.shard if place.host != EVERYWHERE or far_homes else -1
        readers[key] = load.give(places_of[key][place], home)
    sources = []
    for key in keys:
        if key not in nearest:
            maker = making.give(ranks, key.shard if len(keys) <= len(nodes) else -1)
            sources.append(Source(key.shard, REBUILT, maker, direct=False))
            continue
        place = nearest[key]
        # What has to be decoded is decoded once, and not by every rank.
        seen_by_all = len(places_of[key][place]) == len(nodes) and place.host != EVERYWHERE
        direct = seen_by_all and not place.encoded
        sources.append(Source(key.shard, place, readers[key], direct=direct))
    return sources


class _Load:
    """What ranks have to do: each as much as any other, to one piece; and where that leaves a
    choice, what is done on the node that has least to do."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._of_rank = [0] * len(nodes)
        self._of_node: Counter[str] = Counter()

    def give(self, ranks: Sequence[int], home: int) -> int:
        """One piece, to one of `ranks`: to `home`, if that is one and has nothing to do yet."""
        free = home in ranks and self._of_rank[home] == 0
        rank = home if free else min(ranks, key=self._weight)
        self._of_rank[rank] += 1
        self._of_node[self._nodes[rank]] += 1
        return rank

    def _weight(self, rank: int) -> tuple[int, int, int]:
        return self._of_rank[rank], self._of_node[self._nodes[rank]], rank
