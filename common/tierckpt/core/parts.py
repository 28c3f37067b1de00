"""Parts: features of a checkpointer, which its loop does not know.

A part overrides the moments at which it has something to do. The loop asks each part once, when it
is made, and keeps a list for each moment: at a moment that a part does not override, or at which it
sleeps, it costs nothing. Parts are called in the order of the table,
`checkpointer.checkpointer.PARTS`.

A part may vote: `votes` names its numbers, of which all ranks read the minima one boundary later.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec import Struct

from tierckpt.core.decisions import Vote
from tierckpt.core.levels import Level
from tierckpt.format.ids import VersionId

if TYPE_CHECKING:
    from tierckpt.checkpointer.adapter import Adapter
    from tierckpt.checkpointer.loop import TrainingJob
    from tierckpt.config import Config
    from tierckpt.journal.replay import Replay
    from tierckpt.restored import Restored
    from tierckpt.state.training_state import TrainingState

__all__ = ["Boundary", "Part", "Parts", "Stalls", "VoteField"]


class VoteField(NamedTuple):
    """A number that a part adds to each rank's vote."""

    name: str
    silent: int = 0
    """The number of a rank without the part, or without anything to say."""


class Boundary(Struct):
    """One boundary. Parts read it, and answer the loop in the attributes that say so."""

    id: VersionId
    """The version of this boundary, whether it is taken or not."""
    run: str
    """The `run_id`."""
    start_seconds: float
    """By `time.perf_counter()`."""
    forced: bool
    """A version on demand, or the last one."""
    place: int
    """This rank's iteration: other ranks may be at another one."""
    agreed: Vote
    """The minima of the votes of the boundary before."""
    rows: list[tuple[int, ...]]
    """All ranks' `row` of the boundary before; empty if there was none."""
    number: int = 0
    """The boundary's own: the first of the checkpointer has 1."""
    again: bool = False
    """It repeats the boundary before: nobody had news, and only impatient parts are called."""
    levels: tuple[Level, ...] = ()
    """Where the version goes; empty: it is not taken."""
    sound: bool = True
    """The live state could be a version. An answer of `read`: False, if none may be taken."""
    why: str = ""
    """An answer of `read`: with `sound=False`, the reason."""
    postponed: bool = False
    """An answer of `read`: with `sound=False`, whether a due version stays due."""
    early: bool = False
    """Layers are copied from the boundary on."""
    wanted: bool = False
    """An answer of `vote`: this rank asks for a version."""
    row: Sequence[int] = ()
    """An answer of `vote`: numbers that all ranks read, on all ranks or none."""
    ends: bool = False
    """An answer of `read`: the job ends after this boundary, on all ranks."""


class Stalls(Struct):
    """For how long the training has waited since its start, by `time.perf_counter()`."""

    boundary_seconds: float = 0.0
    """At boundaries."""
    barrier_seconds: float = 0.0
    """Before changes of the state."""
    passed_seconds: float = 0.0
    """The end of the last boundary."""
    version: int = 0
    """Its version."""


class Part:
    """A feature. Training thread, unless a moment says otherwise. Every method may be overridden;
    its exceptions reach the training loop."""

    votes: tuple[VoteField, ...] = ()
    """What `vote` returns, by position."""
    early = False
    """It is made as soon as the event log is open, before the ranks' votes and levels."""
    idle: frozenset[str] = frozenset()
    """Moments at which the part does nothing now, by name."""
    patient: frozenset[str] = frozenset()
    """Moments that may be left out at a boundary that repeats the last one, by name: the part only
    looks for news there. Its vote stays the same meanwhile."""
    rests_until: int = 0
    """The next boundary, by its `number`, at which the part has work if nobody has news. Until
    then its moments of a usual step (`STEP`) may be left out."""
    owner: Parts | None = None
    starts_with: frozenset[Level] = frozenset()
    """After state was loaded that no steps lead to: the levels that a version must go to."""

    @classmethod
    def of(cls, job: TrainingJob) -> Part | None:
        """The part of this job; None if its settings do without. It may be of another class, whose
        module is imported only here, with the same `votes`. With `early`, only `log` and what
        comes before it are there."""
        raise NotImplementedError

    @classmethod
    def check(cls, config: Config, state: TrainingState, adapter: Adapter) -> None:
        """Before the attach, on all ranks alike: raise ConfigError or UnsupportedStateError if the
        settings ask for the part and it cannot serve this training."""

    def sleep(self, *moments: str) -> None:
        """Have nothing to do at these moments, until `wake`."""
        self._set_idle(self.idle.union(moments))

    def wake(self, *moments: str) -> None:
        """Be called at these moments again."""
        self._set_idle(self.idle.difference(moments))

    def wait_for_looks(self, *moments: str) -> None:
        """Be patient at these moments from now on, and at no others."""
        self.patient = frozenset(moments)
        if self.owner is not None:
            self.owner.refresh()

    def rest_no_longer(self) -> None:
        """Leave out no moment of the part from now on."""
        self.rests_until = 0
        if self.owner is not None:
            self.owner.resting, self.owner.rest_until = False, 0

    def has_news(self) -> None:
        """Have the next boundary look at everything. Any thread."""
        if self.owner is not None:
            self.owner.looks = True

    def _set_idle(self, idle: frozenset[str]) -> None:
        if idle != self.idle:
            self.idle = idle
            if self.owner is not None:
                self.owner.refresh()

    # --- a boundary, in this order ---------------------------------------------------------------

    def boundary_begins(self, in_forward: bool) -> None:
        """An iteration has ended. `in_forward`: the forward pass of the next one starts."""

    def read(self, at: Boundary, least: Sequence[int]) -> None:
        """The votes of the boundary before are known: `least` has the minima of `votes`."""

    def apart(self) -> None:
        """Ranks are in different iterations: at each boundary until a restore."""

    def diverged(self, version: int, together: int | None, at: str, missing: Sequence[int]) -> None:
        """This rank found that other ranks do not come to the boundary of `version`.

        Args:
            version: the number of the version.
            together: the newest version with all ranks in the same iteration.
            at: this rank's position, as text.
            missing: the ranks that did not come, if known.
        """

    def suspicion(self) -> str:
        """The reason to doubt versions that are taken now; empty without one."""
        return ""

    def decided(self, at: Boundary) -> None:
        """All ranks have decided about the version; nothing of it is copied yet."""

    def vote(self, at: Boundary) -> Sequence[int]:
        """The numbers of `votes`."""
        raise NotImplementedError

    def voted(self, at: Boundary) -> None:
        """The vote was cast. The state does not change until `settle`."""

    def taken(self, snapshot: Any) -> None:
        """The copy of this `Snapshot` is about to start."""

    def boundary_ends(self, at: Boundary) -> None:
        """The next iteration starts."""

    # --- between two boundaries -------------------------------------------------------------------

    def optimizer_called(self) -> None:
        """A step of any optimizer of the process starts; called inside it."""

    def step_starts(self) -> None:
        """A step of an optimizer of the training starts; the same on all ranks."""

    def gradients_ready(self, label: str) -> None:
        """The optimizer of this label is about to change the state, and `settle` was called."""

    def stepped(self) -> None:
        """A step was made; its boundary comes later, in a forward pass."""

    def iteration_ends(self) -> None:
        """The loop has called `step()`."""

    def released(
        self,
        params: Sequence[Any],
        version: int,
        reduction: Any,
        launched_seconds: float | None,
    ) -> None:
        """The gradients of these parameters are being reduced; arguments as for `Handle.release`.
        Perhaps autograd's thread."""

    def name_reductions(self, names: Mapping[str, Sequence[str]]) -> None:
        """See `Handle.name_reductions`."""

    def settle(self) -> None:
        """Return when the state may change."""

    def sealed(self, snapshot: Any) -> None:
        """The version of this `Snapshot` is complete on this rank."""

    def saving(self, trained: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a version on demand. `trained`: a step was made since the boundary."""
        raise NotImplementedError

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all is durable or has failed; False if that takes longer."""
        raise NotImplementedError

    # --- start, restore, end ----------------------------------------------------------------------

    def attached(self, job: TrainingJob) -> None:
        """The checkpointer is complete."""

    def pause(self) -> None:
        """State is about to be loaded that no steps lead to."""

    def records_after(self, base: VersionId, *about: Any) -> Replay | None:
        """The recorded steps that follow the version `base`; see `Journal.records_after`."""
        raise NotImplementedError

    def unused_after(self, base: VersionId, rollback: tuple[int, int], strict: bool) -> str:
        """A warning about recorded steps after `base` that this restart does not make again."""
        raise NotImplementedError

    def found_versions(self) -> None:
        """This start found versions of the job, and has loaded one."""

    def start_elsewhere(self, order: Any, strict: bool, bar: Any, load_adapter: Any) -> Any:
        """This start found no version of the job: load one of another job, see `Forks`."""
        raise NotImplementedError

    def load_parts(self, source: str, selection: Any, strict: bool, bar: Any) -> Any:
        """Load parts of another job's version, see `Forks.load_parts`."""
        raise NotImplementedError

    def forget(self) -> None:
        """The state was replaced: forget what was seen of it."""

    def shared_changed(self) -> None:
        """Other tensors than before are shared by all ranks."""

    def continues_from(self, result: Restored, base: VersionId | None, generation: int) -> None:
        """The live state is that of `result`, of the version `base` (None: no version), and the run
        of this generation starts with it."""

    def restored(self, result: Restored) -> None:
        """`restore()` ends, on all ranks."""

    def drifted(self) -> Sequence[int] | None:
        """The ranks in the minority, from the discovery that replicas differ until they are equal
        again; empty without a majority, None if nothing differs."""
        return None

    def last_digest(self, version: int | None) -> int:
        """At the end, while nothing changes: what `compare_last` compares. None: the live state is
        no version."""
        raise NotImplementedError

    def compare_last(self, digests: Sequence[int]) -> None:
        """All ranks' results of `last_digest`."""

    def failure(self) -> Exception | None:
        """The error with which the job is to end, on all ranks; once."""
        return None

    def end(self, remove: bool) -> None:
        """The end: no copy is in progress. `remove`: the last version is durable. The last part of
        the table ends first: no signal waits for a disk."""

    def left(self, abandoned: bool) -> None:
        """The last call: only the event log is still open."""


STEP = (
    *("boundary_begins", "read", "decided", "vote", "voted", "boundary_ends", "iteration_ends"),
    *("optimizer_called", "step_starts", "gradients_ready", "stepped", "released", "settle"),
)
"""Moments of a usual step, by name."""

T = TypeVar("T")


class Parts:
    """The parts of one checkpointer: a list of methods for each moment. Training thread."""

    def __init__(self, table: Sequence[type[Part]]) -> None:
        """`table`: the kinds of parts, in order."""
        self._table = table
        self._all: list[Part | None] = [None] * len(table)
        self._at_work: list[Part] = []
        self._votes = [kind.votes for kind in table]
        self.silent = tuple(field.silent for fields in self._votes for field in fields)
        """The votes of a rank with silent parts."""
        self.numbers = self.silent
        """This rank's last votes: those of a boundary that repeats it, if no part votes anew."""
        self.refresh()

    def make(self, job: TrainingJob, early: bool) -> None:
        """Make the parts that are `early`, or the others."""
        try:
            for i, kind in enumerate(self._table):
                if kind.early == early and (part := kind.of(job)) is not None:
                    assert part.votes == kind.votes
                    part.owner, self._all[i] = self, part
        finally:
            self.refresh()

    def replace(self, part: Part, by: Part) -> None:
        """Put another part in the place of one that is no more than its beginning."""
        self._all[self._all.index(part)] = by
        by.owner = self
        self.refresh()

    def find(self, kind: type[T]) -> T | None:
        """The part of this kind, if there is one."""
        return next((each for each in self._all if isinstance(each, kind)), None)

    def _of(self, moment: Callable[..., Any], again: bool = False) -> list[Callable[..., Any]]:
        """The methods of the parts that override this one, and are awake; `again`: and are not
        patient."""
        name = moment.__name__
        parts = [each for each in self._all if each is not None and name not in each.idle]
        parts = [each for each in parts if not (again and name in each.patient)]
        return [getattr(p, name) for p in parts if getattr(type(p), name) is not moment]

    def _works(self, part: Part) -> bool:
        """Whether it has anything to do in a usual step."""
        names = [name for name in STEP if name not in part.idle and name not in part.patient]
        return any(getattr(type(part), name) is not getattr(Part, name) for name in names)

    def rest(self) -> None:
        """A boundary ends: ask the parts how long they rest."""
        self.rest_until = min((each.rests_until for each in self._at_work), default=sys.maxsize)

    def refresh(self) -> None:
        """Make the lists again."""
        of = self._of
        self.looks = True
        """The next boundary does not repeat the last one: a part may have news."""
        self.resting = False
        """All parts rest, until the next boundary: the moments of a usual step are left out."""
        self.rest_until = 0
        """The next boundary, by its number, that needs a part."""
        self._at_work = [each for each in self._all if each is not None and self._works(each)]
        self.boundary_begins_again = of(Part.boundary_begins, again=True)
        self.boundary_begins = of(Part.boundary_begins)
        self.apart, self.diverged = of(Part.apart), of(Part.diverged)
        self.suspicion, self.decided = of(Part.suspicion), of(Part.decided)
        self.voted, self.taken = of(Part.voted), of(Part.taken)
        self.boundary_ends_again = of(Part.boundary_ends, again=True)
        self.boundary_ends = of(Part.boundary_ends)
        self.optimizer_called, self.step_starts = of(Part.optimizer_called), of(Part.step_starts)
        self.gradients_ready = of(Part.gradients_ready)
        self.stepped, self.iteration_ends = of(Part.stepped), of(Part.iteration_ends)
        self.released, self.name_reductions = of(Part.released), of(Part.name_reductions)
        self.settle, self.sealed = of(Part.settle), of(Part.sealed)
        self.saving, self.drain = of(Part.saving), of(Part.drain)
        self.attached, self.pause = of(Part.attached), of(Part.pause)
        self.records_after, self.unused_after = of(Part.records_after), of(Part.unused_after)
        self.found_versions = of(Part.found_versions)
        self.start_elsewhere, self.load_parts = of(Part.start_elsewhere), of(Part.load_parts)
        self.forget, self.shared_changed = of(Part.forget), of(Part.shared_changed)
        self.continues_from, self.restored = of(Part.continues_from), of(Part.restored)
        self.drifted = of(Part.drifted)
        self.last_digest, self.compare_last = of(Part.last_digest), of(Part.compare_last)
        self.failure, self.end, self.left = of(Part.failure), of(Part.end), of(Part.left)
        starts = [each.starts_with for each in self._all if each is not None]
        self.starts_with: frozenset[Level] = frozenset().union(*starts)
        self._readers: list[tuple[Callable[[Boundary, Sequence[int]], None], slice]] = []
        self._voters: list[tuple[Callable[[Boundary], Sequence[int]], slice]] = []
        low = 0
        for part, fields in zip(self._all, self._votes, strict=True):
            high = low + len(fields)
            if part is not None and type(part).read is not Part.read:
                self._readers.append((part.read, slice(low, high)))
            if part is not None and fields:
                self._voters.append((part.vote, slice(low, high)))
            low = high
        again = {*of(Part.read, again=True), *of(Part.vote, again=True)}
        self.readers_again = [each for each in self._readers if each[0] in again]
        self.voters_again = [each for each in self._voters if each[0] in again]

    def first_failure(self) -> Exception | None:
        """The first error of a part with which the job is to end; None without one."""
        return next(filter(None, [failure() for failure in self.failure]), None)

    def read(self, at: Boundary) -> None:
        """Let the parts read the last votes."""
        least = self.numbers if at.again else at.agreed.parts or self.silent
        for read, own in self.readers_again if at.again else self._readers:
            read(at, least[own])

    def vote(self, at: Boundary) -> tuple[int, ...]:
        """This rank's numbers of all parts. Not needed at a boundary that repeats the last one, if
        there are no `voters_again`."""
        numbers = list(self.numbers if at.again else self.silent)
        for vote, own in self.voters_again if at.again else self._voters:
            numbers[own] = vote(at)
        before, self.numbers = self.numbers, tuple(numbers)
        if self.numbers != before and not at.again:
            self.looks = True  # for the parts that are to read it
        return self.numbers


def call(moment: Iterable[Callable[..., None]], *arguments: Any) -> None:
    """Call these methods. In each step the loop calls its own lists, which saves a call."""
    for method in moment:
        method(*arguments)
