"""Job history: which run of the job this is, what earlier runs left, and where this one started.

Every start of a job is a run. Versions of two runs may have the same number and different bytes,
so each run has a generation (larger than any that is still found), a random name, and a lineage
that says from which version of which run it went on (docs/internals/agreement.md, "Runs").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING

from tierckpt._text import some
from tierckpt.config import Config
from tierckpt.core.copies import (
    EVERYWHERE,
    Found,
    FoundParity,
    Inventory,
    Location,
    Pin,
    Problem,
)
from tierckpt.core.levels import AGENT, LOCAL, MEMORY
from tierckpt.core.restore_plan import RestorePlan, plan_restore
from tierckpt.format.ids import Lineage, ParityKey, ShardKey, VersionId, on_lineage
from tierckpt.group import Group
from tierckpt.storage.inventory import nothing_seen, take_inventory
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.job_directory import JobDirectory

from .error_barrier import ErrorBarrier
from .former_nodes import UNKNOWN, FormerNodes

if TYPE_CHECKING:
    from tierckpt.peer.read_client import RemoteNode

NAME_LETTERS = 16
RUN_ID_LETTERS = 8
"""Of it, which are enough to tell lives apart."""
MOST_TOLD = 4
"""Versions."""
MOST_NAMED = 8
"""Shards, or places."""


class JobHistory:
    """One rank's knowledge, alike on all. Training thread; `look` is collective."""

    def __init__(
        self,
        config: Config,
        group: Group,
        job: JobDirectory,
        store: LocalStore,
        host: str,
        former_nodes: FormerNodes | None = None,
        directory_is_new: bool = False,
        directory_is_another: bool = False,
    ) -> None:
        """`directory_is_new`: this start made it. `directory_is_another`: see `NodeResources`."""
        self.lineage: Lineage = ()
        """Empty before this run has begun."""
        self.name = ""
        """Of this run; the same on all ranks."""
        self.secret = ""
        """Of this run's ranks and agents: the name is in every manifest, this is nowhere."""
        self.found: list[tuple[Found, ...]] = []
        """What every rank found when it looked last."""
        self.parities: list[tuple[FoundParity, ...]] = []
        """The same, of what nodes keep for each other."""
        self.pins: list[tuple[Pin, ...]] = []
        """What is pinned on the local level of every rank's node."""
        self.suspects: dict[VersionId, str] = {}
        """Versions that were taken while replicas differed, or may have been, and in what."""
        self.nodes: list[str] = []
        """Every rank's, by name."""
        self.problems: list[str] = []
        """What was found and cannot be read."""
        self.damaged: set[ShardKey] = set()
        """Shards and parity of which that is known by name alone; also what is on a disk and proved
        damaged when it was read."""
        self.nameless: list[str] = []
        """Of what was found and cannot be read, seals in memory: each is of a version that was
        complete on its rank, and nobody can tell which."""
        self.newer: list[str] = []
        """Those of them that a newer tierckpt wrote."""
        self.unseen: list[str] = []
        """Where nobody could see what is there."""
        self._config, self._group, self._job = config, group, job
        self._store, self._host = store, host
        self._former_nodes = former_nodes
        self._directory_is_new, self._is_another = directory_is_new, directory_is_another
        self._next_generation = 1
        self._began = 0, 0
        """Generation and version that this run began with."""

    @property
    def job(self) -> str:
        """Id of the job whose lives they are."""
        return self._job.job

    @property
    def generation(self) -> int:
        """Of this run; 0 before it has begun."""
        return self.lineage[-1][0] if self.lineage else 0

    @property
    def began_at(self) -> int:
        """The version that this run started from."""
        return self._began[1]

    def is_own(self, generation: int) -> bool:
        """Whether a version of that generation was taken in this run, or a later one."""
        return generation >= self._began[0]

    def look(self, error_barrier: ErrorBarrier | None = None) -> None:
        """Take stock of all levels on all nodes; this is what a new run begins with. In a stretch
        of `error_barrier`, if that is given."""
        shared = self._config.persistent if self._group.rank == 0 else None
        try:
            mine = take_inventory(self._job, self._store, self._host, shared)
        except Exception as error:  # the other ranks wait for it
            mine = nothing_seen(self._host, error)
        inventories = self._gather(error_barrier or self._group, mine)
        token = inventories[0].token
        self.name, self.secret = token[:NAME_LETTERS], token[NAME_LETTERS:]
        self.found = [i.found for i in inventories]
        self.nodes = [i.host for i in inventories]
        self.parities = [i.parities for i in inventories]
        self.pins = [i.pins for i in inventories]
        self.suspects = {id_: text for i in inventories for id_, text in i.suspects}
        said = (f for i in inventories for f in i.found if f.facts.suspect)
        self.suspects.update((f.key.id, f.facts.suspect) for f in said)
        self.problems = _told(p for i in inventories for p in i.problems)
        self.damaged = {key for i in inventories for p in i.problems for key in p.keys}
        self.nameless = _told(p for i in inventories for p in i.problems if _is_seal(p))
        self.newer = _told(p for i in inventories for p in i.problems if p.newer)
        self.unseen = _told(p for i in inventories for p in i.unseen)
        self._next_generation = 1 + max(i.generation for i in inventories)

    def _gather(self, group: Group | ErrorBarrier, mine: Inventory) -> Sequence[Inventory]:
        """Every rank's, and what agents of nodes have on which no rank is."""
        known_nodes = self._former_nodes.known_nodes() if self._former_nodes else None
        told = group.all_gather_object((mine, known_nodes.mark if known_nodes else UNKNOWN))
        inventories, marks = zip(*told, strict=True)
        if self._former_nodes is None:
            return inventories
        theirs = self._former_nodes.look(group, known_nodes, marks)
        return [each.plus(more) for each, more in zip(inventories, theirs, strict=True)]

    def open_agent(self, place: Location) -> RemoteNode | None:
        """The agent of an absent node, for what is at that place; the caller closes it."""
        return self._former_nodes.open(place) if self._former_nodes else None

    def reject(self, bad: Collection[tuple[ShardKey, Location]]) -> None:
        """These copies proved damaged: of what is on a disk the name alone is known."""
        self.found = [tuple(f for f in each if (f.key, f.place) not in bad) for each in self.found]
        self.damaged |= {key for key, place in bad if place.level == LOCAL}

    @property
    def silent(self) -> list[str]:
        """Nodes without a rank that did not tell what they have, and why; the first few."""
        return self._former_nodes.silent if self._former_nodes else []

    def begin_afresh(self) -> None:
        """Start from nothing, in a generation of its own."""
        self.lineage = ((self._next_generation, 0),)
        self._began = self.lineage[-1]

    def go_on_from(self, lineage: Lineage, version: int) -> None:
        """Start from a version of the newest life in `lineage`."""
        # A live state may outlive every copy, and then its lives are found nowhere.
        generation = max([self._next_generation, *(1 + past for past, _ in lineage)])
        # Lives of which nothing is left any more cannot be confused with anything.
        there = {f.key.id.generation for each in self.found for f in each}
        there |= {p.key.id.generation for each in self.parities for p in each}
        oldest = min(there, default=generation)
        kept = tuple(entry for entry in lineage if entry[0] >= oldest)
        self.lineage = (*kept, (generation, version))
        self._began = self.lineage[-1]

    def take_again(self, version: int) -> None:
        """The version that was taken last is taken once more, of what is live now: in a generation
        of its own, so that neither takes the other's place before it is complete everywhere."""
        self.lineage = (*self.lineage, (self.generation + 1, version))

    def newest(self, level: str = "", limit: VersionId | None = None) -> VersionId | None:
        """The newest complete version that was found, on one level alone if that is named; None
        if that is newer than `limit`."""
        seen = [[f for f in each if level in ("", f.place.level)] for each in self.found]
        plan: RestorePlan | None = plan_restore(seen)
        return plan.id if plan and (limit is None or plan.id <= limit) else None

    def newer_suspects(self, than: VersionId) -> list[VersionId]:
        """Suspects that a restart could take, the newest at least, and which are newer; that one
        first."""
        plan = plan_restore(self.found, parities=self.parities)
        if plan is None or plan.id not in self.suspects:
            return []
        seen = {f.key.id for each in self.found for f in each} | {plan.id}
        return sorted((i for i in seen & self.suspects.keys() if than < i <= plan.id), reverse=True)

    def lineage_of(self, id_: VersionId) -> Lineage:
        """Of a version that was found."""
        found = (f.facts.lineage for each in self.found for f in each if f.key.id == id_)
        made = (p.facts.lineage for each in self.parities for p in each if p.key.id == id_)
        return next(found, None) or next(made, ((id_.generation, 0),))

    def newest_clean(self, limit: VersionId, level: str = "") -> VersionId | None:
        """The newest complete version up to `limit` that was found, and that is no suspect."""
        known = {f.key.id for each in self.found for f in each if f.key.id <= limit}
        known -= self.suspects.keys()
        seen = [
            [f for f in each if f.key.id in known and level in ("", f.place.level)]
            for each in self.found
        ]
        plan: RestorePlan | None = plan_restore(seen)
        return plan.id if plan else None

    def age_seconds(self, newest: VersionId | None, limit: VersionId) -> float:
        """What lay between the `newest` version of a level and `limit`, when they were taken;
        without end where that cannot be told, or the level has none. So a job that is killed
        again and again before an interval is over gets to the level all the same."""
        created: dict[VersionId, float] = {}
        for f in (f for each in self.found for f in each):
            if f.created_seconds is not None:
                created[f.key.id] = f.created_seconds
        if newest == limit:
            return 0.0
        if newest not in created or limit not in created:
            return math.inf
        return max(0.0, created[limit] - created[newest])

    def once_complete(self) -> VersionId | None:
        """The newest version of which anything tells that it was complete: one that is now, though
        perhaps damaged, be it in all manifests; or that was on all ranks' disks, as a shard says
        that was taken later; or parity, which is made of such only. Not one that was in memory
        alone, which is nowhere any more after a reboot."""
        found = [f for each in self.found for f in each]
        parities = [p for each in self.parities for p in each]
        lineages = {f.key.id: f.facts.lineage for f in found}
        lineages |= {p.key.id: p.facts.lineage for p in parities}
        known = {f.facts.complete for f in found} | {p.key.id for p in parities} | {self.newest()}
        there = {id_ for id_ in known if id_ is not None} | self._complete_by_name()
        lineage = lineages[max(lineages)] if lineages else ()
        return max((i for i in there if on_lineage(i, lineage)), default=None)

    def gone_from_disk(self) -> bool:
        """True when nothing is on any disk, although versions were on all ranks', as a shard says
        that was taken later, or this node's directory is not the one that it was. Not where the
        run before had its versions elsewhere."""
        found = [f for each in self.found for f in each]
        there = self.damaged or self.unseen or any(f.place.level == LOCAL for f in found)
        gone = self._directory_is_new or any(f.facts.complete for f in found)
        return gone and not (there or self._is_another)

    def _complete_by_name(self) -> set[VersionId]:
        """Versions whose manifests are all there, some damaged. A manifest has its name when all
        that it stands for is written, so its name tells what was there, whatever is in it now."""
        shards: dict[tuple[VersionId, int], dict[str, set[int]]] = {}
        for f in (f for each in self.found for f in each):
            runs = shards.setdefault((f.key.id, f.key.shards), {})
            runs.setdefault(f.facts.run_id, set()).add(f.key.shard)
        known = {key.id for key in self.damaged if isinstance(key, ParityKey)}
        lost: dict[tuple[VersionId, int], set[int]] = {}
        for key in self.damaged:
            if not isinstance(key, ParityKey):
                lost.setdefault((key.id, key.shards), set()).add(key.shard)
        for (id_, count), damaged in lost.items():
            others = shards.get((id_, count), {"": set()}).values()
            if any(len(damaged | sound) == count for sound in others):
                known.add(id_)
        return known

    def remains(self, without: Container[str] = ()) -> list[str]:
        """Which shards there are of the newest few versions, and which are nowhere; `without` those
        at some places, by their names. Those of two runs, which may have versions of one number,
        are counted apart, and it is said why."""
        there: dict[tuple[VersionId, int, str], dict[int, set[str]]] = {}
        for f in (f for each in self.found for f in each if f.place.where not in without):
            shards = there.setdefault((f.key.id, f.key.shards, f.facts.run_id), {})
            place = f.place.where if f.place.host == EVERYWHERE else f.place.host
            shards.setdefault(f.key.shard, set()).add(place)
        newest = sorted(there.items(), reverse=True)[:MOST_TOLD]
        runs = Counter(id_.version for id_, _, _ in dict(newest))
        texts = []
        for (id_, count, run_id), here in newest:
            gone = [s for s in range(count) if s not in here]
            noun = "shards" if gone[1:] else "shard"
            missing = f", {noun} {some(gone, MOST_NAMED)} missing" if gone else ""
            whose = _whose(run_id, here.values()) if runs[id_.version] > 1 else ""
            texts.append(f"{len(here)} of {count} shards of {id_}{whose}{missing}")
        if max(runs.values(), default=0) > 1:
            texts.append("shards of different runs of the job are no version together")
        return texts

    def incomplete(self) -> set[VersionId]:
        """Versions on local disks of which a shard is on none, nor any parity anywhere."""
        shards: dict[tuple[VersionId, str, int], set[int]] = {}
        for f in (f for each in self.found for f in each if f.place.level == LOCAL):
            shards.setdefault((f.key.id, f.facts.run_id, f.key.shards), set()).add(f.key.shard)
        whole = {id_ for (id_, _, count), there in shards.items() if len(there) == count}
        protected = {parity.key.id for each in self.parities for parity in each}
        return {id_ for id_, _, _ in shards} - whole - protected

    def metrics(self) -> dict[VersionId, float]:
        """What was measured of the versions in the past of this run that local disks have."""
        local = [f for each in self.found for f in each if f.place.level == LOCAL]
        known = {f.key.id: f.facts.metric for f in local if f.facts.metric is not None}
        there = {id_ for id_ in known if on_lineage(id_, self.lineage)} - self.incomplete()
        return {id_: known[id_] for id_ in there}

    def newest_protected(self, limit: VersionId) -> VersionId | None:
        """The version in the past of this run, up to `limit`, of which the nodes have the most
        parity, the newest of several; None without any."""
        keys = {parity.key for each in self.parities for parity in each}
        there = Counter(k.id for k in keys if k.id <= limit and on_lineage(k.id, self.lineage))
        return max(there, key=lambda id_: (there[id_], id_), default=None)


def _whose(run_id: str, places: Iterable[set[str]]) -> str:
    return (
        f" of run {run_id[:RUN_ID_LETTERS]} (on {some(sorted(set().union(*places)), MOST_NAMED)})"
    )


def _is_seal(problem: Problem) -> bool:
    """On disks a manifest's name tells what it was."""
    return problem.place.level in (MEMORY, AGENT) and not problem.keys


def _told(problems: Iterable[Problem]) -> list[str]:
    """A line for each; what several ranks met is said once."""
    return list(dict.fromkeys(f"{problem.place.where}: {problem.why}" for problem in problems))
