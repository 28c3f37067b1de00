"""The levels of one job, without torch: for a training state, and for files of any program.

`JobBase`: one rank's event log, agreement, node resources and levels, and what callbacks are told
about the rank.

`Tiers`: the storage levels below shared memory, and their updates at the start of a run. `history`
has the versions that earlier runs of the job left there. `slot_handoff` hands new versions to this
node's agent, and `promotion` sends them to other nodes (`peers`) and to the persistent level.

`Promotion`: the next steps after a version is complete on all local disks. All ranks learn from
the votes, at the same boundary, that it is complete (`agreement`). Then older versions may be
removed, and the new one goes from the nodes' disks to other nodes and to the persistent level, as
in SCR. The agents do the work; here the ranks of a node give its agent the orders.

`SealedVersions`: versions that are sealed in memory, and become durable outside a boundary: at
once, or at the end.

`repair` makes a restored version redundant again, so that it survives the next loss. A rebuilt
shard is only in the memory of its rank. The rank puts it into a slot, and from there it goes the
way of every version: the agent commits it, the votes find the version complete on all nodes, and
the agents protect it. A shard with a damaged file, still in a slot of its rank, goes the same way.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from tierckpt import _process, stages
from tierckpt._children import module_path
from tierckpt.agent.address import AgentSettings
from tierckpt.agent.client import AgentClient
from tierckpt.agent.protocol import FlushOrder, PersistentSettings, SessionSettings
from tierckpt.callbacks import CallbackList, Job
from tierckpt.config import Config
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.ballots import Ballots
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.peers import FormerNodes, Groups, PeerSetup
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.coordination.versions import Reports, SlotHandoff
from tierckpt.core.decisions import most_quiet_seconds
from tierckpt.core.levels import (
    AGENT,
    BROKEN,
    DONE,
    INTERVALS,
    LEDGERS,
    LOCAL,
    MEMORY,
    PEER,
    PERSISTENT,
)
from tierckpt.core.restore_plan import Found, FoundParity, RestorePlan, distinct
from tierckpt.core.retention import Best, Spared
from tierckpt.core.version import Version
from tierckpt.events import Callback, EventLog
from tierckpt.format.ids import Lineage, ParityKey, ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group, Node
from tierckpt.lineage.run_notes import RunNotes
from tierckpt.restored import Restored
from tierckpt.storage.job_directory import JobDirectory, job_directory
from tierckpt.storage.local import LocalStore
from tierckpt.storage.marks import LocalPins
from tierckpt.storage.slot_pool import NoSlotError, SlotPool
from tierckpt.storage.slots import Slot, seal_area_bytes

from .node_resources import NodeResources

if TYPE_CHECKING:
    from tierckpt.erasure.groups import RedundancyGroup
    from tierckpt.restore.shards import ShardImage
    from tierckpt.restore.verification import VerifiedVersion

__all__ = [
    "Backlog",
    "JobBase",
    "Promotion",
    "Sealed",
    "SealedVersions",
    "Tiers",
    "agent_client",
    "flush_order",
    "place_in_job",
]


Order = functools.partial[FlushOrder]
"""Makes the order to a node's agent to flush a version, from the arguments about that version."""


def flush_order(
    config: Config, group: Group, node: Node, job: JobDirectory, host: str
) -> Order | None:
    """Return the flush order of this rank's node; None if another rank there gives the orders."""
    if node.first != group.rank:
        return None
    return functools.partial(
        FlushOrder,
        directory=config.directory,
        here=node.ranks,
        node=f"{host}, {job.path}{_device_of(job)}",
    )


def _device_of(job: JobDirectory) -> str:
    """Name the device of the job's folder: containers with the same host name may have different
    memories at the same path."""
    with contextlib.suppress(OSError):
        return f" on device {job.path.stat().st_dev:x}"
    return ""


class Promotion:
    """One rank's promotion of versions. All ranks receive the same facts, so all decide the same.

    Training thread. Nothing here waits (except `Backlog`), and nothing is collective. All arguments
    stay their owners'. Gives orders to the agent, and records the state of the peer level in the
    agreement.
    """

    def __init__(
        self,
        best: Best,
        agent: AgentClient,
        agreement: Agreement,
        peers: PeerSetup,
        history: JobHistory,
        order: Order | None,
        backlog: Backlog,
        spared: Spared | None = None,
    ) -> None:
        """`best`: the best versions of the local level. `order`: see `flush_order`. `backlog`: its
        `advance` is called at every boundary. `spared` receives versions complete on the local
        level."""
        self._best, self._agent, self._agreement = best, agent, agreement
        self._peers, self._history, self._order = peers, history, order
        self.backlog = backlog
        self.spared = spared or Spared()
        self.ordered: VersionId | None = None
        """The newest version that was handed over to be flushed."""

    def restart(self) -> None:
        """Start with a run that continues an earlier run: the best versions of that run stay."""
        self._best.restart(self._history.metrics())
        self.backlog.restart()

    def local_safe(self, version: Version, largest_bytes: int, metric: float | None) -> None:
        """Promote a version complete on all local levels, and retire older ones.

        `largest_bytes` is the size of its largest shard.
        """
        self._best.add(version.id, metric)
        self.spared.whole(version.id)
        self.retire()
        self.protect(version)
        if self._order is not None:
            self._agent.forward(version.id)
        self._flush(version, largest_bytes, metric)

    def retire(self) -> None:
        """Have the agent remove versions that are no longer needed. Called when one more version
        was found complete, or broken, on the local levels."""
        local, lineage = self._agreement.local, self._history.lineage
        opened = local.open  # it is tried again
        void = [id_ for id_ in local.broken if id_ not in opened]
        lost = [v for v in self._agreement.versions.flying if v.flush and v.id in void]
        for version in lost[:-1]:  # the newest may be committed again
            version.flush = None
        # A version that peers can rebuild stays until they can rebuild a newer one.
        keep = self._agreement.peer.protected() | self._best.versions | self.backlog.versions
        keep |= self.spared.versions
        self._agent.retire(local.safe, lineage, keep, void)

    def protect(self, version: Version) -> None:
        """Protect a version complete on all local levels: parity goes to other nodes."""
        if self._peers.ready:
            version.start(PEER)
            if not self._peers.protect(version.id):
                version.tell(PEER, DONE)

    def _flush(self, version: Version, largest_bytes: int, metric: float | None) -> None:
        facts, version.flush = version.flush, None
        for older in self._agreement.versions.flying:
            if older.id < version.id:
                older.flush = None  # it is broken
        if facts is None:
            return
        self.ordered = version.id
        order = None
        if self._order is not None:
            facts = replace(facts, metric=metric)
            order = self._order(facts=facts, largest_bytes=largest_bytes)
        self.backlog.add(version.id, order)


class Backlog:
    """One rank's queue of at most one version that waits for an earlier flush to end.

    Training thread. Waits only with `when_busy="wait"`, and never for a hanging store."""

    def __init__(
        self,
        config: Config,
        agent: AgentClient,
        agreement: Agreement,
        passed_over: Callable[[int, str], None],
    ) -> None:
        """`passed_over` is called with a dropped version, and the reason."""
        self._agent, self._agreement, self._passed_over = agent, agreement, passed_over
        self._patient = config.when_busy == "wait"
        self.restart()

    def restart(self) -> None:
        """Forget the version that waits: it is another run's."""
        self._waiting: tuple[VersionId, FlushOrder | None] | None = None

    @property
    def versions(self) -> set[VersionId]:
        """Versions that must stay on the local disks until they are flushed."""
        waiting = {self._waiting[0]} if self._waiting is not None else set()
        return {*self._agreement.persistent.open, *waiting}

    def add(self, id_: VersionId, order: FlushOrder | None) -> None:
        """Flush a version as soon as no other flush is in progress.

        `order` is for the node's agent; None: another rank of the node gives it.
        """
        self.advance()  # at this boundary the last flush may have been found complete
        if self._waiting is not None and self._patient:
            self._wait(*self._waiting)
        if self._waiting is not None:
            flushing = self._agreement.persistent.open[0].version
            why = f"v{flushing} is still being flushed by some node, and v{id_.version} is newer"
            self._passed_over(self._waiting[0].version, why)
        self._waiting = (id_, order)
        self.advance()

    def _wait(self, id_: VersionId, order: FlushOrder | None) -> None:
        """Wait for this node's agent; then flush `id_`, the version that has waited.

        If this node's store hangs, other ranks do not know it and order the flush. So this rank
        opens the version in the agreement as they do, and marks it as done on this node: a version
        that no agent flushes must not fill the local disks.
        """
        nbytes = order.largest_bytes * len(order.here) if order is not None else 0
        if self._agent.outlast(most_quiet_seconds(nbytes)):
            self.flush_last()
            return
        self._waiting = None
        self._agreement.versions.open(id_, [PERSISTENT]).tell(PERSISTENT, DONE)
        self._passed_over(id_.version, "this node's part of an older one is stuck: its store hangs")

    def advance(self) -> None:
        """Flush the waiting version if it may go now. Called at every boundary, when the votes have
        shown which nodes have ended the last flush."""
        if self._waiting is not None and not self._agreement.persistent.open:
            self.flush_last()

    def flush_last(self) -> None:
        """Order the waiting flush now, even if another is in progress; also at the end of the job,
        after which no boundary comes."""
        if self._waiting is None:
            return
        (id_, order), self._waiting = self._waiting, None
        version = self._agreement.versions.open(id_, [PERSISTENT])
        if order is None:
            version.tell(PERSISTENT, DONE)
        else:
            self._agent.flush(order)


class Tiers:
    """One rank's access to the levels. Training thread.

    Owns its parts, but not `resources`, the slots in `pool`, `agreement` and `reports`.
    """

    def __init__(
        self,
        config: Config,
        group: Group,
        topology: JobTopology,
        groups: Groups,
        resources: NodeResources,
        agreement: Agreement,
        reports: Reports,
    ) -> None:
        """Make the parts, but start nothing yet. `groups`: see `redundancy_groups`."""
        self._config, self._group, self._node = config, group, topology.node(group.rank)
        self.resources, self.pool = resources, resources.pool
        self.agreement, self.reports = agreement, reports
        host, job = topology.hosts[group.rank], resources.job
        environment = topology.environment[self._node.first]
        may_start = topology.environment[group.rank] == environment
        self.agent = agent_client(config, group, job, self._node, environment, may_start)
        with contextlib.ExitStack() as undo:
            undo.callback(self.agent.close)
            self.agent.stall_watch.outlook = lambda: self.pool.outlook
            asks = config.uses("peer") and self._node.first == group.rank
            self.former_nodes = FormerNodes(self.agent, topology.hosts, asks)
            if config.persistent.path:
                import tierckpt.storage.persistent  # noqa: F401 (later, a step would do it)

            store = LocalStore(config.directory)
            directory = (resources.directory_is_new, resources.directory_is_another)
            self.history = JobHistory(
                config,
                group,
                job,
                store,
                host,
                self.former_nodes,
                *directory,
                lambda text: reports.notice(text, logging.WARNING),
            )
            self.run_notes = RunNotes(config, group, topology, reports)
            self.peers = PeerSetup(config, group, topology, self.agent, groups)
            kept = config.local.retention
            self.promotion = Promotion(
                Best(kept.keep_best, kept.best_is_low),
                self.agent,
                agreement,
                self.peers,
                self.history,
                flush_order(config, group, self._node, job, host),
                Backlog(config, self.agent, agreement, reports.passed_over),
                Spared(config.compared_steps > 0 and group.size > 1),
            )
            self.slot_handoff = SlotHandoff(group, resources.pool, self.agent, agreement, reports)
            undo.pop_all()

    def open(self) -> None:
        """Find the agent, if there is one; `meet` starts it otherwise. If nodes are to meet, all of
        them would wait there for its start, so it is started now, beside the restore."""
        if self.peers.slow_coding and self._group.rank == 0:
            self.reports.notice(self.peers.slow_coding, logging.WARNING)
        self._have_agent(self.agent.start if self.peers.groups else self.agent.find)

    def _have_agent(self, have: Callable[[bool], None]) -> None:
        if self._config.uses(LOCAL):
            try:
                have(self._node.first == self._group.rank)
            except OSError as error:
                self.reports.notice(f"the agent could not be started: {error}", logging.ERROR)

    def collect(self) -> None:
        """Process the agent's messages."""
        awaited = False
        for version in self.agreement.versions.flying:
            awaited = awaited or LOCAL in version.open or PERSISTENT in version.open
        for message in self.agent.poll(awaited):
            self.reports.on_agent_message(message)

    def tell_of_stalls(self) -> None:
        """Report what hangs, during a wait for the agent."""
        for problem in self.agent.problems():
            self.reports.on_agent_message(problem)

    # --- a run starts, on all ranks -----------------------------------------------------------

    def start_afresh(self) -> None:
        """Start a run that restores nothing; look first at versions of earlier runs. Collective."""
        self.history.look()
        self.history.start_afresh()
        self.meet()
        old = self.history.newest()
        self.history.forget()
        if old is not None and self._group.rank == 0:
            self.reports.notice(
                f"{self._config.path} holds {old} of an earlier run, and restore() was not "
                "called: this run starts afresh beside it. The files of the earlier run are kept, "
                "but will not be restored any more; delete them, or call restore() before the "
                "first step",
                logging.WARNING,
            )

    def continue_from(
        self, lineage: Lineage, result: Restored, error_barrier: ErrorBarrier | None
    ) -> None:
        """Start a run from the version that the live state equals: one of this job, of the newest
        run in `lineage`, or, with an empty lineage, of another job. Inside a block of
        `error_barrier`, if given. Collective."""
        self.run_notes.started_from = VersionId(lineage[-1][0], result.version) if lineage else None
        self.run_notes.fork = "" if lineage else self.run_notes.fork
        with _process.collector_paused():  # the history of many ranks is many objects
            self._learn_from_history(lineage, result)
        self.meet(error_barrier)

    def _learn_from_history(self, lineage: Lineage, result: Restored) -> None:
        self.history.continue_from(lineage, result.version)
        id_ = result.base or VersionId(result.generation, result.version)
        self._pin_as_elsewhere(id_)
        # Also if some shards came from other levels: those in memory may be the only copies.
        memory = id_ if MEMORY in result.levels else self.history.newest(MEMORY, id_)
        # Until a newer version is protected, a rebuilt one may have to be rebuilt again.
        peer = id_ if PEER in result.levels else self.history.newest_protected(id_)
        newest = {level: self.history.newest(level, id_) for level in INTERVALS if level != MEMORY}
        ages_seconds = {
            level: self.history.age_seconds(found, id_) for level, found in newest.items()
        }
        if PEER in result.levels:  # the rebuilt shards are on their way there (see `repair`)
            del ages_seconds[LOCAL]
        self.reports.restart(newest[PERSISTENT])
        safe = {MEMORY: memory, LOCAL: newest[LOCAL], PEER: peer}
        self.agreement.restart(safe, self.history.incomplete(), ages_seconds)
        self.promotion.restart()
        self.promotion.spared.restart(self.history.newest_clean(id_, LOCAL))

    def _pin_as_elsewhere(self, id_: VersionId) -> None:
        """Pin a version on this node that some other node has pinned. A node that gets the
        version only now, by a repair (see `repair`), does not have the mark yet."""
        pins = {pin for each in self.history.pins for pin in each if pin.version == id_}
        pins_here = self.history.pins[self._group.rank]
        is_first = self._node.first == self._group.rank
        if not (pins.difference(pins_here) and is_first and self._config.uses(LOCAL)):
            return
        try:
            LocalPins(self._config.directory).pin([id_], any(pin.everywhere for pin in pins))
        except OSError as error:
            text = f"{id_} is pinned on other nodes, and could not be pinned here: {error}"
            self.reports.notice(text, logging.ERROR)

    def meet(self, error_barrier: ErrorBarrier | None = None) -> None:
        """Start the nodes' agents where they are missing, and have them meet under the name of the
        new run. Inside a block of `error_barrier`, if given. Collective.

        They are not started earlier if nobody waits for them: a start takes 0.1 s of work, and more
        of memory traffic, while a restore needs the cores."""
        self._have_agent(self.agent.start)
        history, former_nodes = self.history, self.former_nodes.alive
        self.run_notes.write(history.name, history.generation)

        def complain(text: str) -> None:
            self.reports.notice(text, logging.ERROR)

        run = history.secret, history.generation
        self.peers.meet(error_barrier or self._group, *run, former_nodes, complain)


def agent_client(
    config: Config,
    group: Group,
    job: JobDirectory,
    node: Node,
    environment: str,
    may_start: bool = True,
) -> AgentClient:
    """This rank's client of the node's agent, which is not started here.

    `environment`: the environment of the node's first rank. `may_start`: this rank's environment
    is the same, so that this rank may start the agent too."""
    persistent = None
    if config.uses("persistent"):
        persistent = PersistentSettings(**asdict(config.persistent), node=node.index)
    return AgentClient(
        AgentSettings(
            root=str(job.root),
            folder=job.path.name,
            linger_seconds=config.agent_linger_seconds,
            peers=config.uses(PEER),
            module_path=tuple(module_path()),
        ),
        SessionSettings(
            directory=config.directory,
            shard=group.rank,
            shards=group.size,
            keep=config.local.keep,
            persistent=persistent,
            codecs=config.local.codecs,
            ranks=node.ranks,
            stages=tuple(map(str, stages.parse(config.stages_here))),
            trace_dir=os.path.abspath(config.trace_dir) if config.trace_dir else "",
        ),
        inline=config.agent == "inline",
        environment=environment,
        may_start=may_start,
    )


class Sealed(enum.IntEnum):
    """A version in memory compared with the live state; the minimum of all ranks counts."""

    NOT = 0
    """The version is missing or incomplete."""
    MOVED_ON = 1
    """The live state differs from it."""
    LIVE = 2
    """The live state equals it."""


IsLive = Callable[[Manifest, memoryview], bool]
"""Returns True if the live state equals the sealed version with this manifest and image."""


class SealedVersions:
    """This rank's part of them. Training thread, while no copy is in progress."""

    def __init__(self, config: Config, group: Group, levels: Tiers) -> None:
        """All arguments stay their owners'."""
        self._config, self._group, self._levels = config, group, levels
        self._pool, self._agreement = levels.pool, levels.agreement

    def commit(self, id_: VersionId, is_live: IsLive) -> Sealed:
        """Commit a version if all ranks have sealed it and it equals the live state of all.
        Collective; returns the minimum of all ranks.

        NOT: the version is void on all ranks now, and must be taken. MOVED_ON: it stays as it is,
        and the live state must be taken as another version.
        """
        slot = self._pool.find(id_)
        manifest = slot.manifest() if slot is not None else None
        sealed = self._look(slot, manifest, is_live)
        found: Sealed = min(self._group.all_gather_object(sealed))
        if found is Sealed.NOT:
            # A rank that has sealed it voids it: all shards of a version are of one step.
            self._pool.void(id_)
            self._agreement.versions.forget(id_)
        if found is Sealed.LIVE:
            assert manifest is not None
            version = self._agreement.versions.open(id_, ())
            if self._config.uses("persistent") and id_ != self._levels.promotion.ordered:
                version.flush = manifest.facts
            self._commit(version)
        return found

    def commit_as_it_is(self, id_: VersionId | None) -> bool:
        """Commit a version as it was sealed, also by the previous run. Collective.

        False, with nothing changed, if some rank does not have its shard in memory.
        """
        slot = None if id_ is None else self._pool.find(id_)
        manifest = None if slot is None else slot.manifest()
        key = None if id_ is None else ShardKey(id_, self._group.rank, self._group.size)
        if not all(self._group.all_gather_object(manifest is not None and manifest.key == key)):
            return False
        assert id_ is not None
        self._commit(self._agreement.versions.open(id_, ()))
        return True

    def _commit(self, version: Version) -> None:
        """Commit a version that all ranks have in memory, unless it is on local or on its way."""
        slot = self._pool.find(version.id)
        assert slot is not None
        there = version.id == self._agreement.local.safe or LOCAL in version.open
        if self._config.uses("local") and not there:
            version.start(LOCAL)
            self._levels.slot_handoff.commit_sealed(version, slot)

    def _look(self, slot: Slot | None, manifest: Manifest | None, is_live: IsLive) -> Sealed:
        """Compare the version in this rank's slot with the live state."""
        memory = self._agreement.memory
        if slot is None or manifest is None or manifest.id not in (memory.safe, *memory.open):
            return Sealed.NOT
        try:
            with slot.image() as image:
                return Sealed.LIVE if is_live(manifest, image) else Sealed.MOVED_ON
        except Exception:  # other ranks wait; the new version meets this error and reports it
            return Sealed.MOVED_ON

    def settle(self, id_: VersionId) -> None:
        """Agree on the result of this version; promote it if local had it before. Collective."""
        self._agreement.settle()
        version = self._agreement.versions.find(id_)
        waits = version is not None and version.flush is not None
        if waits and id_ == self._agreement.local.safe:  # was on local before
            assert version is not None
            slot = self._pool.find(id_)
            manifest = slot.manifest() if slot is not None else None
            facts = (manifest.image_bytes, manifest.facts.metric) if manifest else (0, None)
            gathered = self._group.all_gather_object(facts)
            largest_bytes = max(nbytes for nbytes, _ in gathered)
            self._levels.promotion.local_safe(version, largest_bytes, gathered[0][1])

    def commit_newest(self) -> bool:
        """Hand the newest version in memory to the agent, if the local level lacks it. Returns True
        if it did. Not collective."""
        memory, local = self._agreement.memory, self._agreement.local
        taken = [*memory.open, *filter(None, [memory.safe])]
        newest = max((i for i in taken if self._pool.find(i) is not None), default=None)
        if newest is None or not self._config.uses("local") or newest in (*local.open, local.safe):
            return False
        slot = self._pool.find(newest)
        if slot is None:  # removed by another process just now
            return False
        version = self._agreement.versions.open(newest, ())
        self._levels.slot_handoff.commit_sealed(version, slot)
        return True


def repair(attempt: VerifiedVersion, group: Group, levels: Tiers) -> bool:
    """Make a loaded version complete and protected again.

    Necessary if a part of it was lost or damaged on a disk, or came from a node outside the
    job; or if some of its parity is missing, because an earlier run was killed before it had made
    or repaired it.

    Returns False if a repair is impossible and a new version must be taken. Training thread; all
    ranks do the same, and none waits for another.
    """
    id_, agreement = attempt.plan.id, levels.agreement
    if any(source.place.level == AGENT for source in attempt.plan.sources):
        return False  # that agent ends soon, and its node may be gone then
    lacking = shards_to_mend(attempt.plan, levels.history.found)
    if lacking != frozenset() and not was_lost(attempt.plan, levels.history.damaged):
        return True  # it never was on all disks, or has another number of ranks
    if any(source.rebuilt for source in attempt.plan.sources) and not levels.peers.ready:
        return True  # the parity it was rebuilt from still protects it; a new version has none
    if lacking is None:
        return False
    parities = parities_to_mend(attempt.plan, levels.peers.groups, levels.history.parities)
    if not lacking and not parities:
        return True
    levels.peers.mend(id_, parities)
    version = agreement.versions.open(id_, [LOCAL] if lacking else [])
    if not lacking:
        levels.promotion.protect(version)
        return True
    if group.rank not in lacking:
        version.tell(LOCAL, DONE)
        return True
    protected = agreement.memory.protected()
    # Two slots with one version would leave none for the next.
    slot = None if attempt.plan.sources[group.rank].rebuilt else levels.pool.find(id_)
    try:
        if slot is None:
            image, pinned = attempt.images[group.rank], levels.agent.pinned()
            slot = keep(image, levels.pool, protected, pinned)
    except (OSError, NoSlotError) as error:
        version.tell(LOCAL, BROKEN)
        text = f"the shard to repair cannot be kept in memory: {error}"
        levels.reports.not_committed_later(id_, text)
    else:
        levels.slot_handoff.commit_sealed(version, slot)
    return True


def was_lost(plan: RestorePlan, damaged: Collection[ShardKey]) -> bool:
    """True if a part of the version was on a disk of the job and is not there any more.

    Pure. A rebuilt shard was on a disk; so was a shard that only some ranks fetched from the
    persistent level, because only versions that are on all disks go there. `damaged`: see
    `JobHistory`.
    """
    levels = plan.levels
    apart = "persistent" in levels and len(levels) > 1
    shards = {ShardKey(plan.id, source.shard, len(plan.sources)) for source in plan.sources}
    return apart or any(s.rebuilt for s in plan.sources) or not shards.isdisjoint(damaged)


def shards_to_mend(plan: RestorePlan, found: Sequence[Sequence[Found]]) -> frozenset[int] | None:
    """Shards that are not on the disk of the node of their rank.

    Pure: every rank has the same result. `found`: the sound shards that each rank found. None if
    this version cannot be protected again and a new one must be taken: it has another number of
    ranks, or some rank's shard is on another node and no longer in memory.
    """
    shards = len(plan.sources)
    if shards != len(found):
        return None
    lacking = set()
    for source in plan.sources:
        key = ShardKey(plan.id, source.shard, shards)
        here = {(f.key, f.facts.run_id) for f in found[source.shard] if f.place.level == "local"}
        if source.rebuilt or (key, plan.run_id) not in here:
            if not (source.direct or source.rebuilt):
                return None
            lacking.add(source.shard)
    return frozenset(lacking)


def parities_to_mend(
    plan: RestorePlan,
    groups: Iterable[RedundancyGroup],
    found: Sequence[Sequence[FoundParity]],
) -> frozenset[int]:
    """Shards without the version's parity for `groups` on the disk of their rank's node.

    Pure. Sound parity is left as it is: while it is made again it would be missing.
    """
    left_of = {rebuilt.group: rebuilt.left for rebuilt in plan.rebuilds}
    damaged = {
        p.key
        for each in distinct(found)
        for p in each
        if p.place.level == "local" and p.key not in left_of.get(p.group, {p.key})
    }
    lost = set()
    for group in groups:
        code = (group.ranks, group.code.k, group.code.m)
        for rank in group.ranks:
            key = ParityKey(plan.id, rank, len(plan.sources))
            here = (p for p in found[rank] if p.place.level == "local")
            there = {(p.key, p.facts.run_id, (p.group, p.k, p.m)) for p in here}
            if key in damaged or (key, plan.run_id, code) not in there:
                lost.add(rank)
    return frozenset(lost)


def keep(image: ShardImage, pool: SlotPool, protected: set[VersionId], pinned: set[str]) -> Slot:
    """Copy a sound shard into a slot of this rank, with the seal of the original.

    `protected` and `pinned` as in `SlotPool.choose`; raises the errors of that method.
    """
    manifest = image.manifest
    seal_bytes = seal_area_bytes(manifest.data_blocks, len(manifest.facts.lineage))
    slot = pool.choose(protected, pinned, seal_bytes, manifest.image_bytes)
    sealed = None
    try:
        with slot.image() as room:
            room[: manifest.image_bytes] = image.view[: manifest.image_bytes]
        slot.seal(manifest.encode())
        sealed = manifest.id
    finally:
        pool.filled(slot, sealed)
    return slot


def place_in_job(config: Config, group: Group, node: Node) -> Job:
    """This rank's place in its job."""
    levels = tuple(str(e) for e in LEDGERS if e == MEMORY or config.uses(e))
    job_id = job_directory(config).job
    return Job(job_id, group.rank, group.size, node.ranks.index(group.rank), levels)


class JobBase:
    """One rank's event log, agreement with the other ranks, place on its node, and levels.

    Made in three steps: the constructor, `enter` and `connect`. Each of them is known to `undo` as
    soon as it holds something. After the last step the owner ends them: it closes the agent, and
    calls `leave` and `close_log`. Training thread.
    """

    agreement: Agreement
    reports: Reports
    resources: NodeResources
    pool: SlotPool
    levels: Tiers
    history: JobHistory
    agent: AgentClient
    sealed: SealedVersions

    def __init__(
        self,
        config: Config,
        group: Group,
        topology: JobTopology,
        callbacks: CallbackList,
        on_event: Callback | None,
        undo: contextlib.ExitStack,
    ) -> None:
        """Open the event log. The callbacks, and the exporters of the settings, learn of the job
        before its first event. Raises OSError if `events_dir` cannot be used."""
        self.config, self.group, self.node = config, group, topology.node(group.rank)
        self.callbacks = callbacks
        self.topology, self._undo = topology, undo
        if config.export:
            from tierckpt.exporters.exporter import exporters_of

            for exporter in exporters_of(config.export):
                callbacks.add(exporter)
        undo.callback(callbacks.close)
        callbacks.attach(place_in_job(config, group, self.node))
        by_child = config.agent != "inline"
        folder = config.events_dir or None
        self.log = EventLog(group.rank, folder, on_event, callbacks, by_child)
        undo.callback(self.log.close)

    def enter(
        self,
        ballots: Ballots,
        slots: int,
        version: Callable[[], int],
        silent: tuple[int, ...] = (),
    ) -> None:
        """Vote by `ballots` from now on, and take this rank's place on its node, with `slots`
        slots. Events are about `version()`; `silent` as for `Agreement`. Collective; raises the
        errors of `NodeResources`."""
        config, group = self.config, self.group
        self.agreement = Agreement(
            group,
            ballots,
            config,
            lambda *safe: self.levels.promotion.local_safe(*safe),
            lambda: self.levels.promotion.retire(),
            lambda text: self.reports.notice_of_all(text),
            silent,
        )
        self._undo.callback(self.agreement.close)
        self.reports = Reports(config, self.log, self.callbacks, self.agreement, version)
        if ballots.problem and group.rank == 0:
            self.reports.notice(ballots.problem, logging.INFO)
        self.resources = NodeResources(config, group, self.topology, slots, self.reports)
        self._undo.callback(self.resources.release)
        self.pool = self.resources.pool

    def connect(self, groups: Groups) -> None:
        """Make the levels, and find the node's agent. `groups`: see `redundancy_groups`."""
        config, group, topology = self.config, self.group, self.topology
        parts = self.resources, self.agreement, self.reports
        self.levels = Tiers(config, group, topology, groups, *parts)
        self.history, self.agent = self.levels.history, self.levels.agent
        self._undo.callback(self.agent.close, abandoned=True)
        self.levels.open()
        self.sealed = SealedVersions(config, group, self.levels)

    def leave(self, remove: bool) -> None:
        """Leave the other ranks and the node, after the agent is closed; emit what threads have
        reported until their end. `remove`: free memory. Not collective."""
        self.levels.run_notes.close()
        self.reports.say()
        self.resources.leave(remove)
        self.group.close()

    def close_log(self) -> None:
        """Close the event log, and the callbacks."""
        self.log.close()
        self.callbacks.close()
