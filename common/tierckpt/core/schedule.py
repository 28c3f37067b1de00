"""Policy: what every rank concludes, alike, from the version and from what all ranks agreed on.

Pure. The agreement is one small vector of integers per rank, min-reduced over all ranks while the
next iteration computes, and read at the next boundary. Everything a rank may decide is a function
of such vectors and of the version, so all ranks take, skip and forget the same versions without
ever waiting for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tierckpt.config import AUTO, Config
from tierckpt.core.tuning.autotune import Change, Figures, Tuner
from tierckpt.format.ids import VersionId
from tierckpt.halt.request_file import Reason

from .best import NO_METRIC

LEVELS = ("memory", "local", "persistent")
"""Every version that a level takes, those before it take, too."""

PENDING, DONE, BROKEN = 0, 1, -1
"""State of one version on one level at one rank; the minimum over ranks is what all can say of
it: one broken rank breaks it for all, one pending rank keeps it pending."""


VOID = -1
"""What an adapter votes (see `Checkpointer.own_vote`) where there is no version of this boundary on
its rank, hence on none: the next one is due in its place."""


@dataclass(frozen=True)
class Vote:
    """One rank's vector; also, after the reduction, what all agreed on. Minimum is `and`."""

    slot_free: int = 1
    """This rank will have a slot for another version at the next boundary."""
    local_free: int = 1
    """This rank's local level can take another version."""
    memory_state: int = DONE
    """State of the oldest version whose seal is not known everywhere yet."""
    local_state: int = DONE
    """State of the oldest version whose commit is not known everywhere yet."""
    memory_time_left: int = 1
    """0 when this rank's clock says that a time-based version is due."""
    local_time_left: int = 1
    no_request: int = 1
    """0 when this rank's user asked for a checkpoint."""
    persistent_time_left: int = 1
    peer_state: int = DONE
    """State of the oldest version whose protection by peers is not known everywhere yet."""
    flush_state: int = DONE
    """Of the oldest version that some node may still be flushing: DONE when this one is through
    with it, whatever came of it."""
    less_bytes: int = 0
    """Of the version that `local_state` is about: the size of this rank's shard, negative, so that
    the minimum tells the largest."""
    metric: int = NO_METRIC
    """Of the same version: what rank 0's user measured, see `best.as_vote`; NO_METRIC from all
    others, so that the minimum tells rank 0's."""
    halt: int = Reason.NONE
    """Why this rank wants the job to end early, a `Reason`: NONE is the largest. A wish to end is
    a request for a checkpoint, too."""
    unattended: int = 0
    """1 when this rank's script has evidently never asked whether the job is to end."""
    less_step_us: int = 0
    """This and the next five: `tuning.Figures` of this rank, negative as `less_bytes` is."""
    less_memory_us: int = 0
    less_local_us: int = 0
    less_local_steps: int = 0
    less_persistent_us: int = 0
    less_persistent_steps: int = 0
    adapter: int = 0
    """An adapter's own, see `Checkpointer.own_vote`."""
    no_close: int = 1
    """0 when this rank's user called `close()` where it could not be done."""
    check: int = 0
    """This and the next one: the digest of what was looked at at the boundary before, see
    `replicacheck.as_vote`."""
    check_complement: int = 0
    place: int = 0
    """This and the next one: at which iteration this rank is, in the same way."""
    place_complement: int = -1
    unchanged: int = 0
    """So many of this rank's newest versions are, in what is striped, those before them."""

    def pack(self) -> list[int]:
        """As the vector to be reduced."""
        return [
            self.slot_free,
            self.local_free,
            # BROKEN must win over PENDING, PENDING over DONE: -1 < 0 < 1 does just that.
            self.memory_state,
            self.local_state,
            self.memory_time_left,
            self.local_time_left,
            self.no_request,
            self.persistent_time_left,
            self.peer_state,
            self.flush_state,
            self.less_bytes,
            self.metric,
            int(self.halt),
            self.unattended,
            self.less_step_us,
            self.less_memory_us,
            self.less_local_us,
            self.less_local_steps,
            self.less_persistent_us,
            self.less_persistent_steps,
            self.adapter,
            self.no_close,
            self.check,
            self.check_complement,
            self.place,
            self.place_complement,
            self.unchanged,
        ]

    @staticmethod
    def unpack(values: list[int]) -> Vote:
        """The inverse of `pack`."""
        return Vote(*values)

    @property
    def figures(self) -> Figures:
        """The largest of all ranks, each."""
        return Figures(
            -self.less_step_us,
            -self.less_memory_us,
            -self.less_local_us,
            -self.less_local_steps,
            -self.less_persistent_us,
            -self.less_persistent_steps,
        )


VOTE_WIDTH = len(Vote().pack())


def superseded_by(safe: VersionId, protected: set[VersionId]) -> set[VersionId]:
    """What of `protected` is left to protect once `safe` is known to be complete on all ranks."""
    return {safe, *(v for v in protected if v > safe)}


REMEMBERED = 16
"""Agents are told so many broken versions again, in case they missed when it was news."""


@dataclass
class Ledger:
    """What is known, on every rank alike, of the versions taken to one level, oldest first."""

    safe: VersionId | None = None
    """The newest version known to be complete on all ranks: never overwritten, never deleted."""
    open: list[VersionId] = field(default_factory=list)
    """Versions taken whose fate is not known everywhere yet."""
    broken: list[VersionId] = field(default_factory=list)
    """The last `REMEMBERED` versions that are known to be incomplete on some rank."""

    def resolve(self, state: int, candidate: VersionId | None) -> VersionId | None:
        """Take in the agreed state of `candidate`, which was the oldest open one when voting.

        Returns the version when it broke, else None.
        """
        if candidate is None or candidate not in self.open or state == PENDING:
            return None
        self.open.remove(candidate)
        self.broken = [v for v in self.broken if v != candidate]  # it may have been taken again
        if state == BROKEN:
            self.broken = [*self.broken, candidate][-REMEMBERED:]
            return candidate
        self.safe = candidate
        return None

    def protected(self, also_safe: VersionId | None = None) -> set[VersionId]:
        """Versions that must not be overwritten; `also_safe` is one just learned to be safe."""
        known = {*self.open, *([self.safe] if self.safe else [])}
        return known if also_safe is None else superseded_by(also_safe, known)


@dataclass(frozen=True)
class Decision:
    """What to do at a boundary."""

    take: tuple[str, ...] = ()
    """Levels the version goes to; `memory` whenever there is any."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(level, reason) of what is due and cannot be taken now. One that stays due is named once,
    until another one is due behind it."""
    again: frozenset[str] = frozenset()
    """Of these levels one was skipped at the boundary before, too."""
    wait: bool = False
    """The user prefers to wait (`when_busy="wait"`) for what is busy."""
    changes: tuple[Change, ...] = ()
    """Automatic intervals that are others from now on."""


@dataclass
class Schedule:
    """When versions are due. Advanced by `decide` on every rank alike."""

    config: Config
    last_memory: int = 0
    last_local: int = 0
    last_persistent: int = 0
    skipping: frozenset[str] = frozenset()
    """Levels whose due version was already reported as skipped."""
    requested: frozenset[str] = frozenset()
    """Levels that a user's request has not reached yet."""
    tuner: Tuner = field(init=False)
    """Of intervals that are automatic."""
    seen: int = 0
    """The version of the last boundary."""

    def __post_init__(self) -> None:
        """Begin with the first intervals."""
        self.tuner = Tuner(self.config)

    def start_at(self, version: int) -> None:
        """After a restore: nothing is due before the intervals have passed again."""
        self.last_memory = self.last_local = self.last_persistent = self.seen = version

    def due(self, version: int, agreed: Vote) -> set[str]:
        """Levels that want this version."""
        asked = agreed.no_request == 0
        due = set()
        if (
            asked
            or agreed.memory_time_left == 0
            or self._steps_passed("memory", self.last_memory, version)
        ):
            due.add("memory")
        if (
            asked
            or agreed.local_time_left == 0
            or self._steps_passed("local", self.last_local, version)
        ):
            due.add("local")
        if self.config.uses("persistent") and (
            asked
            or agreed.persistent_time_left == 0
            or self._steps_passed("persistent", self.last_persistent, version)
        ):
            due |= {"local", "persistent"}
        return due

    def _steps_passed(self, level: str, last: int, version: int) -> bool:
        every = getattr(self.config, level).every_steps
        if every == AUTO:
            return self.tuner.due(level, last, version)
        return _crossed(last, version, every)

    def decide(self, version: int, agreed: Vote) -> Decision:
        """Take or skip; a version that had to be skipped stays due."""
        changes = self.tuner.heed(version, self.seen, agreed.figures)
        decision = self._decide(version, agreed)
        self.seen = version
        return replace(decision, changes=changes) if changes else decision

    def _decide(self, version: int, agreed: Vote) -> Decision:
        if agreed.no_request == 0:
            self.requested = frozenset(self.due(version, agreed))
        due = self.due(version, agreed) | self.requested
        if not due:
            return Decision()
        busy = not agreed.slot_free or ("local" in due and not agreed.local_free)
        wait = busy and self.config.when_busy == "wait"
        skipped: list[tuple[str, str]] = []
        take = set(due)
        if not wait and not agreed.slot_free:
            skipped = [
                (level, "on some rank all slots (buffers in memory) are still in use")
                for level in sorted(due)
            ]
            take = set()
        elif not wait and "local" in due and not agreed.local_free:
            why = "some rank is still writing the version before"
            skipped = [(level, why) for level in sorted(due - {"memory"})]
            take &= {"memory"}
        if take:
            self.last_memory = version
            take.add("memory")
        if "local" in take:
            self.last_local = version
        if "persistent" in take:
            self.last_persistent = version
        self.requested -= take
        again = self.skipping
        fresh = tuple(s for s in skipped if s[0] not in again or self._one_more(s[0], version))
        self.skipping = frozenset(level for level, _ in skipped)
        return Decision(tuple(level for level in LEVELS if level in take), fresh, again, wait)

    def _one_more(self, level: str, version: int) -> bool:
        """A multiple of the interval lies between the boundary before and this one."""
        every = getattr(self.config, level).every_steps
        return every != AUTO and _crossed(self.seen, version, every)


def _crossed(last: int, version: int, every: int) -> bool:
    """True when a multiple of `every` lies in (last, version]."""
    return every > 0 and version // every > last // every
