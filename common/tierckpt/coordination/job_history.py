"""Job history: the present run of the job, the data of earlier runs, and the version to start
from.

Every start of a job is a run. Versions of two runs may have the same number and different bytes,
so each run has a generation (larger than any still found), a random name, and a lineage:
for each run, the version that it started from (docs/internals/agreement.md, "Runs").

Every rank receives all inventories at a restart, each different one once. The ranks of a node see
the same slots and files, and usually find the same. So ranks first exchange checksums of their
inventories, and of those that are equal only the first rank sends its own.

Records of rollbacks are kept on every node of the job. A node that was not there when a run went
back gets the record at the next restart. So it is lost only with all nodes and the persistent
level.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tierckpt import _process
from tierckpt._text import some
from tierckpt.agent.protocol import Mark
from tierckpt.config import Config
from tierckpt.core import restore_plan
from tierckpt.core.branches import (
    Rollback,
    RollbackRequest,
    check_alike,
    merged_rollbacks,
    pending_request,
    rollback_of_setting,
)
from tierckpt.core.levels import AGENT, LOCAL, MEMORY
from tierckpt.core.restore_plan import (
    EVERYWHERE,
    Found,
    FoundParity,
    Inventory,
    Location,
    Pin,
    Problem,
    distinct,
    newest_whole,
    plan_restore,
)
from tierckpt.format.ids import NO_RUN, Lineage, ParityKey, ShardKey, VersionId, on_lineage
from tierckpt.group import Group
from tierckpt.stages import mirrors
from tierckpt.storage import answers
from tierckpt.storage.inventory import nothing_seen, open_persistent, take_inventory
from tierckpt.storage.job_directory import JobDirectory
from tierckpt.storage.local import LocalStore
from tierckpt.storage.notes import RollbackFiles

from .error_barrier import ErrorBarrier
from .peers import UNKNOWN, FormerNodes
from .versions import Reports

if TYPE_CHECKING:
    from tierckpt.peer.remote_reads import RemoteNode

__all__ = ["Offer", "gather_inventories", "is_sender", "keep_rollback_record"]


class Offer(NamedTuple):
    """A rank's announcement of its inventory."""

    digest: bytes
    token: str
    """Rank 0's token; empty from the others, as no other is used."""
    mark: Mark
    """Mark of the list of nodes that the rank's agent knows, see `FormerNodes.look`."""


def gather_inventories(
    group: Group | ErrorBarrier, own: Inventory, mark: Mark
) -> tuple[list[Inventory], list[Mark]]:
    """Return every rank's inventory and mark. Collective, in two rounds.

    Ranks with equal inventories have one object. Only rank 0's has its token.
    """
    packed = restore_plan.pack_inventory(own)
    token = "" if group.rank else own.token
    offers: list[Offer] = group.all_gather_object(
        Offer(restore_plan.inventory_digest(packed), token, mark)
    )
    parts: list[bytes] = group.all_gather_object(packed if is_sender(offers, group.rank) else b"")
    return _put_together(offers, parts), [offer.mark for offer in offers]


def is_sender(offers: Sequence[Offer], rank: int) -> bool:
    """True for the first rank with its inventory."""
    return next(r for r, o in enumerate(offers) if o.digest == offers[rank].digest) == rank


def _put_together(offers: Sequence[Offer], parts: Sequence[bytes]) -> list[Inventory]:
    """Return the inventories by rank. The first rank has one of its own, for its token."""
    received: dict[bytes, Inventory] = {}
    for offer, part in zip(offers, parts, strict=True):
        if part:
            received[offer.digest] = restore_plan.unpack_inventory(part, offer.token)
    return [received[offer.digest] for offer in offers]


NAME_LETTERS = 16
RUN_ID_LETTERS = 8
"""Letters of the run's name that distinguish runs in messages."""
MAX_VERSIONS = 4
"""Number of versions named in a message."""
MAX_NAMED = 8
"""Number of shards or places named in a message."""


class JobHistory:
    """One rank's knowledge, equal on all ranks. Training thread; `look` is collective."""

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
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`directory_is_new`: this start made it. `directory_is_another`: see `NodeResources`.
        `on_wait` is called when a place does not answer."""
        self._on_wait = on_wait
        self.lineage: Lineage = ()
        """Lineage of this run; empty before the run has started."""
        self.name = ""
        """Name of this run; the same on all ranks."""
        self.secret = ""
        """Secret of this run's ranks and agents. Manifests have the name, but never the secret."""
        self.found: list[tuple[Found, ...]] = []
        """Shards that every rank found at the last look."""
        self.parities: list[tuple[FoundParity, ...]] = []
        """Parity that every rank found at the last look."""
        self.pins: list[tuple[Pin, ...]] = []
        """Pins on the local level of every rank's node."""
        self.suspects: dict[VersionId, str] = {}
        """Versions with replicas that differed, or may have, with the difference as text."""
        self.nodes: list[str] = []
        """Names of every rank's node."""
        self.problems: list[str] = []
        """Unreadable data that was found, as text."""
        self.damaged: set[ShardKey] = set()
        """Shards and parity of `problems` that are known by name alone, and those on a disk that
        were found damaged when they were read."""
        self.nameless: list[str] = []
        """Unreadable seals in memory, as text: each belongs to a version that was complete on its
        rank, but which version is unknown."""
        self.newer: list[str] = []
        """Data of `problems` that a newer tierckpt wrote."""
        self.unseen: list[str] = []
        """Places that no rank could look at, as text."""
        self.rollback: Rollback | None = None
        """The last record of a run that went back."""
        self._requests: tuple[RollbackRequest, ...] = ()
        """Requests to go back, found in the same places."""
        self._records_here: tuple[Rollback, ...] = ()
        """Records that this rank found at its own places."""
        self._config, self._group, self._job = config, group, job
        self._store, self._host = store, host
        self._former_nodes = former_nodes
        self._directory_is_new, self._is_another = directory_is_new, directory_is_another
        self._next_generation = 1
        self._start = 0, 0
        """Generation and version that this run started with."""

    @property
    def job(self) -> str:
        """Id of the job."""
        return self._job.job

    @property
    def generation(self) -> int:
        """Generation of this run; 0 before it has started."""
        return self.lineage[-1][0] if self.lineage else 0

    @property
    def start_version(self) -> int:
        """The version that this run started from."""
        return self._start[1]

    def is_own(self, generation: int) -> bool:
        """Whether a version of that generation was taken in this run, or a later one."""
        return generation >= self._start[0]

    def look(self, error_barrier: ErrorBarrier | None = None) -> None:
        """Take the inventory of all levels on all nodes, at the start of a run. Inside a block of
        `error_barrier`, if given. Collective."""
        shared = self._config.persistent if self._group.rank == 0 else None
        try:
            patience = answers.START_SECONDS
            second = mirrors(self._config.stages_here, self._job.job)
            own = take_inventory(
                self._job, self._store, self._host, shared, patience, self._on_wait, second
            )
        except Exception as error:  # the other ranks wait for this one
            own = nothing_seen(self._host, error)
        with _process.collector_paused():  # an object for every copy of every rank
            self._keep(self._gather(error_barrier or self._group, own))

    def _keep(self, inventories: Sequence[Inventory]) -> None:
        token = inventories[0].token
        self.name, self.secret = token[:NAME_LETTERS], token[NAME_LETTERS:]
        self.found = [i.found for i in inventories]
        self.nodes = [i.host for i in inventories]
        self.parities = [i.parities for i in inventories]
        self.pins = [i.pins for i in inventories]
        different = distinct(inventories)
        self.suspects = {id_: text for i in different for id_, text in i.suspects}
        said = (f for f in self._copies() if f.facts.suspect)
        self.suspects.update((f.key.id, f.facts.suspect) for f in said)
        problems = [p for i in different for p in i.problems]
        self.problems = _lines(problems)
        self.damaged = {key for p in problems for key in p.keys}
        self.nameless = _lines(p for p in problems if _is_seal(p))
        self.newer = _lines(p for p in problems if p.newer)
        self.unseen = _lines(p for i in different for p in i.unseen)
        records = [record for i in different for record in i.rollbacks]
        self._records_here = inventories[self._group.rank].rollbacks
        self.rollback = merged_rollbacks([*records, *([self.rollback] if self.rollback else [])])
        self._requests = tuple(request for i in different for request in i.requests)
        self._next_generation = 1 + max(i.generation for i in different)

    def rollback_requests(self) -> tuple[RollbackRequest, ...]:
        """Return the requests to go back that no run has carried out; the first one counts. Raises
        RestoreError if they contradict each other."""
        by_setting = rollback_of_setting(self._config.rollback_to)
        wishes = [*self._requests, *([by_setting] if by_setting else [])]
        left = pending_request(wishes, self.rollback)
        check_alike(left)
        return left

    def went_back(self, requests: Iterable[RollbackRequest]) -> Rollback:
        """Record that this run has carried out these requests. The caller stores the record."""
        earlier = self.rollback.honoured if self.rollback else ()
        honoured = (*earlier, *(each.name for each in requests))
        self.rollback = Rollback(*self._start, honoured)
        return self.rollback

    def keeps_record(self, places: int) -> bool:
        """True if that many places of this rank have the last record, and no request it names."""
        here = self._records_here
        stale = self.rollback and {each.name for each in self._requests} & {*self.rollback.honoured}
        return not stale and [*here] == [self.rollback] * places

    @property
    def rollback_run(self) -> tuple[int, int]:
        """The entry in the lineage of the last run that went back."""
        return self.rollback.entry if self.rollback else NO_RUN

    def _gather(self, group: Group | ErrorBarrier, own: Inventory) -> Sequence[Inventory]:
        """Gather every rank's inventory, and those of former nodes' agents."""
        known_nodes = self._former_nodes.known_nodes() if self._former_nodes else None
        mark = known_nodes.mark if known_nodes else UNKNOWN
        inventories, marks = gather_inventories(group, own, mark)
        if self._former_nodes is None:
            return inventories
        theirs = self._former_nodes.look(group, known_nodes, marks)
        pairs = zip(inventories, theirs, strict=True)
        return [each.plus(more) if more else each for each, more in pairs]

    def forget(self) -> None:
        """Drop the copies that were found, once a run has started: a job of many ranks has hundreds
        of thousands, which every full collection of garbage would visit. What follows from them
        stays. Not collective."""
        self.found, self.parities = [], []

    def _copies(self, level: str = "") -> list[Found]:
        """Return the shards that were found, on one level if named; those that all ranks of a node
        see, once for each different inventory."""
        return [f for each in distinct(self.found) for f in each if level in ("", f.place.level)]

    def _all_parities(self) -> list[FoundParity]:
        return [p for each in distinct(self.parities) for p in each]

    def open_agent(self, place: Location) -> RemoteNode | None:
        """Return the agent of a former node, to read from that place; the caller closes it."""
        return self._former_nodes.open(place) if self._former_nodes else None

    def reject(self, bad: Collection[tuple[ShardKey, Location]]) -> None:
        """Drop copies that were found damaged; those on a disk stay known by name."""
        left = {
            id(each): tuple(f for f in each if (f.key, f.place) not in bad)
            for each in distinct(self.found)
        }
        self.found = [left[id(each)] for each in self.found]
        self.damaged |= {key for key, place in bad if place.level == LOCAL}

    @property
    def silent(self) -> list[str]:
        """The first few former nodes that did not answer, with the reason."""
        return self._former_nodes.silent if self._former_nodes else []

    def start_afresh(self, refused: VersionId | None = None) -> None:
        """Start from nothing, in a new generation. `refused`: the newest version that was found, if
        the program gave up all of them: later runs do not take these, and retention removes them,
        once this run has versions of its own."""
        past = self.lineage_of(refused) if refused is not None else ()
        self.lineage = (*past, (self._next_generation, 0))
        self._start = self.lineage[-1]

    def continue_from(self, lineage: Lineage, version: int) -> None:
        """Start from a version of the newest run in `lineage`."""
        # A live state may outlive every copy, and then its runs are found nowhere.
        generation = max([self._next_generation, *(1 + past for past, _ in lineage)])
        # Runs of which no data is left cannot be confused with others.
        there = {f.key.id.generation for f in self._copies()}
        there |= {p.key.id.generation for p in self._all_parities()}
        oldest = min(there, default=generation)
        kept = tuple(entry for entry in lineage if entry[0] >= oldest)
        self.lineage = (*kept, (generation, version))
        self._start = self.lineage[-1]

    def take_again(self, version: int) -> None:
        """Start a new generation to take the last version once more, from the live state. So
        neither of the two replaces the other before it is complete on all ranks."""
        self.lineage = (*self.lineage, (self.generation + 1, version))

    def newest(self, level: str = "", limit: VersionId | None = None) -> VersionId | None:
        """Return the newest complete version that was found, on one level if named; None if it is
        newer than `limit`."""
        rollback = NO_RUN if limit is None else self.rollback_run
        newest = newest_whole(self._copies(level), rollback)
        return newest if newest and (limit is None or newest <= limit) else None

    def newer_suspects(self, than: VersionId) -> list[VersionId]:
        """Return suspect versions that are newer than `than`, if a restart could take the newest;
        newest first."""
        if not self.suspects:
            return []
        plan = plan_restore(self.found, parities=self.parities, rollback=self.rollback_run)
        if plan is None or plan.id not in self.suspects:
            return []
        seen = {f.key.id for f in self._copies()} | {plan.id}
        return sorted((i for i in seen & self.suspects.keys() if than < i <= plan.id), reverse=True)

    def lineage_of(self, id_: VersionId) -> Lineage:
        """Return the lineage of a version that was found."""
        found = (f.facts.lineage for f in self._copies() if f.key.id == id_)
        made = (p.facts.lineage for p in self._all_parities() if p.key.id == id_)
        return next(found, None) or next(made, ((id_.generation, 0),))

    def newest_clean(self, limit: VersionId, level: str = "") -> VersionId | None:
        """Return the newest complete version up to `limit`, not suspect."""
        copies = self._copies(level)
        return newest_whole(
            f for f in copies if f.key.id <= limit and f.key.id not in self.suspects
        )

    def age_seconds(self, newest: VersionId | None, limit: VersionId) -> float:
        """Return the seconds between the `newest` version of a level and `limit`; infinite if they
        are unknown or the level has none. So even a job killed again and again before an interval
        is over brings a version to the level."""
        created: dict[VersionId, float] = {}
        for f in self._copies():
            if f.created_seconds is not None:
                created[f.key.id] = f.created_seconds
        if newest == limit:
            return 0.0
        if newest not in created or limit not in created:
            return math.inf
        return max(0.0, created[limit] - created[newest])

    def once_complete(self) -> VersionId | None:
        """Return the newest version known to have been complete.

        Evidence is: all its manifests exist now, perhaps with damaged data; a later shard reports
        it as being on all ranks' disks; or parity of it exists, which is made of complete versions
        only. A version that was in memory alone leaves no evidence after a reboot."""
        found, parities = self._copies(), self._all_parities()
        lineages = {f.key.id: f.facts.lineage for f in found}
        lineages |= {p.key.id: p.facts.lineage for p in parities}
        known = {f.facts.complete for f in found} | {p.key.id for p in parities} | {self.newest()}
        there = {id_ for id_ in known if id_ is not None} | self._complete_by_name()
        lineage = lineages[max(lineages)] if lineages else ()
        return max((i for i in there if on_lineage(i, lineage)), default=None)

    def gone_from_disk(self) -> bool:
        """True when no disk has anything, although all ranks' disks had versions (a later shard
        reports so, or this start had to make this node's directory). False where the previous run
        had its versions elsewhere."""
        found = self._copies()
        there = self.damaged or self.unseen or any(f.place.level == LOCAL for f in found)
        gone = self._directory_is_new or any(f.facts.complete for f in found)
        return gone and not (there or self._is_another)

    def _complete_by_name(self) -> set[VersionId]:
        """Return the versions with all manifests, some damaged. A manifest gets its name
        after all data of its shard is written, so the name alone proves that the data was there."""
        shards: dict[tuple[VersionId, int], dict[str, set[int]]] = {}
        for f in self._copies():
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
        """Return a line for each of the newest few versions, with the shards that exist and those
        that do not, ignoring places named in `without`. Shards of two runs with the same version
        number are counted separately, and a line explains why."""
        there: dict[tuple[VersionId, int, str], dict[int, set[str]]] = {}
        for f in (f for f in self._copies() if f.place.where not in without):
            shards = there.setdefault((f.key.id, f.key.shards, f.facts.run_id), {})
            place = f.place.where if f.place.host == EVERYWHERE else f.place.host
            shards.setdefault(f.key.shard, set()).add(place)
        newest = sorted(there.items(), reverse=True)[:MAX_VERSIONS]
        runs = Counter(id_.version for id_, _, _ in dict(newest))
        texts = []
        for (id_, count, run_id), here in newest:
            gone = [s for s in range(count) if s not in here]
            noun = "shards" if gone[1:] else "shard"
            missing = f", {noun} {some(gone, MAX_NAMED)} missing" if gone else ""
            of_run = _of_run(run_id, here.values()) if runs[id_.version] > 1 else ""
            texts.append(f"{len(here)} of {count} shards of {id_}{of_run}{missing}")
        if max(runs.values(), default=0) > 1:
            texts.append("shards of different runs of the job do not make one version")
        return texts

    def incomplete(self) -> set[VersionId]:
        """Return versions on local disks that lack a shard and have no parity on any node."""
        shards: dict[tuple[VersionId, str, int], set[int]] = {}
        for f in self._copies(LOCAL):
            shards.setdefault((f.key.id, f.facts.run_id, f.key.shards), set()).add(f.key.shard)
        whole = {id_ for (id_, _, count), there in shards.items() if len(there) == count}
        protected = {parity.key.id for parity in self._all_parities()}
        return {id_ for id_, _, _ in shards} - whole - protected

    def metrics(self) -> dict[VersionId, float]:
        """Return the metrics of versions in the past of this run that local disks have."""
        local = self._copies(LOCAL)
        known = {f.key.id: f.facts.metric for f in local if f.facts.metric is not None}
        there = {id_ for id_ in known if on_lineage(id_, self.lineage)} - self.incomplete()
        return {id_: known[id_] for id_ in there}

    def newest_protected(self, limit: VersionId) -> VersionId | None:
        """Return the version in the past of this run, up to `limit`, of which the nodes have the
        most parity; the newest of several; None without any."""
        keys = {parity.key for parity in self._all_parities()}
        there = Counter(k.id for k in keys if k.id <= limit and on_lineage(k.id, self.lineage))
        return max(there, key=lambda id_: (there[id_], id_), default=None)


def _of_run(run_id: str, places: Iterable[set[str]]) -> str:
    return f" of run {run_id[:RUN_ID_LETTERS]} (on {some(sorted(set().union(*places)), MAX_NAMED)})"


def _is_seal(problem: Problem) -> bool:
    """True for a seal in memory; on disks a manifest's name identifies the shard."""
    return problem.place.level in (MEMORY, AGENT) and not problem.keys


def _lines(problems: Iterable[Problem]) -> list[str]:
    """Return a line for each problem; equal problems of several ranks give one line."""
    return list(dict.fromkeys(f"{problem.place.where}: {problem.why}" for problem in problems))


def keep_rollback_record(config: Config, rank: int, history: JobHistory, reports: Reports) -> None:
    """Store the record of the last run that went back at all places of this rank that lack it: the
    node's, and on rank 0 the persistent level. Not collective; a failure is reported."""
    hosts, record = history.nodes, history.rollback
    is_first = hosts.index(hosts[rank]) == rank
    persistent = config.persistent.path if rank == 0 else ""
    places = [config.directory] * is_first + [persistent] * bool(persistent)
    if record is None or history.keeps_record(len(places)):
        return
    for place in places:
        try:
            _store_rollback(place, record, config)
        except Exception as error:  # a client's own errors, too
            reports.notice(
                f"the rollback to v{record.version} could not be noted in {place}: {error}. A "
                "restart that sees no other place goes back once more while the request is still "
                "there: remove it. Without it, and before this run has a version, it continues "
                "from a newer version",
                logging.WARNING,
            )


def _store_rollback(place: str, record: Rollback, config: Config) -> None:
    persistent = config.persistent
    if place != persistent.path:
        RollbackFiles(place).store(record)
        return
    with contextlib.closing(open_persistent(persistent, tries=3)) as store:
        store.create()
        RollbackFiles(store).store(record)
