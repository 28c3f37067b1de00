"""Agreement: all ranks learn the same about every version, without waiting for each other.

At every boundary each rank casts its vote, and reads the result of the previous boundary's votes.
`decisions` defines a vote and the decisions that follow from it, and `ballots` the reduction. This
module keeps the state: the ledgers, this rank's own knowledge, and the vote under way.

All methods are for the training thread, except `tell` and `last_word`, which the copier thread
also calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from tierckpt.config import Config
from tierckpt.core.decisions import (
    NO_METRIC,
    PLACES,
    SILENT,
    VOTE_WIDTH,
    LevelVote,
    Vote,
    as_vote,
    of_vote,
)
from tierckpt.core.levels import (
    AWAITED,
    BROKEN,
    DONE,
    FREE,
    INTERVALS,
    LEDGERS,
    LOCAL,
    MEMORY,
    PEER,
    PENDING,
    PERSISTENT,
    UNMEASURED,
    CostEstimate,
    Level,
)
from tierckpt.core.version import Version, Versions, superseded_by
from tierckpt.format.ids import VersionId
from tierckpt.group import Group

from .ballots import (
    VOTE_PATIENCE_APART_SECONDS,
    VOTE_PATIENCE_SECONDS,
    Ballot,
    Ballots,
    RankGoneError,
    Rows,
)


class Agreement:
    """The ledgers and votes of one rank. Equal on every rank, except this rank's own reports."""

    def __init__(
        self,
        group: Group,
        ballots: Ballots,
        config: Config,
        on_local_safe: Callable[[Version, int, float | None], None],
        on_local_broken: Callable[[], None],
        on_slower_votes: Callable[[str], None] = lambda why: None,
        silent: tuple[int, ...] = (),
    ) -> None:
        """Vote by `ballots`, which this object closes. `on_local_safe` is called for every version
        that became durable on all ranks, with the size of its largest shard in bytes and its
        metric; `on_local_broken` after one did not and is in the ledger as broken;
        `on_slower_votes` with the reason when votes take another way, see `Ballots.recover`.
        `silent`: the numbers of parts that say nothing."""
        self._group, self._ballots = group, ballots
        self._on_local_safe, self._on_local_broken = on_local_safe, on_local_broken
        self._on_slower_votes, self._problem = on_slower_votes, ballots.problem
        self._silent = silent
        self._ballot: Ballot | None = None
        self.rows: Rows = []
        """Integers that ranks gave along with the votes read last."""
        self.turns = 0
        """Votes cast since all ranks were last certain to be at the same boundary."""
        self._asked = False
        self.reported = 0
        """The iterations that other ranks know this one to have completed."""
        self.close_asked = False
        """See `ask_close`."""
        self._every_seconds = {level: getattr(config, level).every_seconds for level in INTERVALS}
        self._timed = any(self._every_seconds.values())
        """Some level takes versions by time."""
        self._due_seconds = math.inf
        """The first moment of one, as of the last vote that was not repeated."""
        self.versions = Versions()
        self.restart()

    def restart(
        self,
        safe: Mapping[Level, VersionId | None] = MappingProxyType({}),
        broken: Iterable[VersionId] = (),
        ages_seconds: Mapping[Level, float] = MappingProxyType({}),
    ) -> None:
        """Start with these versions as safe, after a restore; `broken` ones are on local disks.
        `ages_seconds`: the part of each level's interval that has already passed."""
        # The copier may still be with versions of the run before: their slots are not free.
        copied = [each for each in self.versions.flying if each.snapshot is not None]
        self.versions = Versions(safe, broken, copied)
        self.ledgers = self.versions.ledgers
        self.memory, self.local = self.ledgers[MEMORY], self.ledgers[LOCAL]
        self.peer, self.persistent = self.ledgers[PEER], self.ledgers[PERSISTENT]
        now = time.monotonic()
        self._since = {level: now - ages_seconds.get(level, 0.0) for level in INTERVALS}
        """Time when each level last took a version (monotonic)."""
        self.diverged: VersionId | None = None
        """The version at which this rank found that others are at another iteration. From then on
        it neither votes nor reads, and takes no version, until a restore."""
        self.divergence_is_reported = False
        """The present value of `diverged` needs no report; set by the reader."""
        self.together: VersionId | None = None
        """The newest version with all ranks in the same iteration."""
        self.apart = False
        """The votes read last came from different iterations."""
        self.missing: list[int] = []
        """Ranks without a vote, where known."""
        self._patience_lost = False
        self._ballot = None
        self._repeatable: tuple[Vote, list[int], tuple[int, ...]] | None = None
        """The last vote, as it was packed, and its numbers of parts, if the next one may be the
        same: it has no news but versions that are complete in memory. Its place, and parts of the
        first, are those of an earlier one."""

    def open(self, id_: VersionId, levels: Iterable[Level]) -> Version:
        """All ranks take a version to memory and to these levels."""
        levels = {MEMORY, *levels}
        if self._timed:
            self._since.update(dict.fromkeys(levels, time.monotonic()))
        return self.versions.open(id_, levels.intersection(AWAITED))

    def ask(self) -> None:
        """Request a checkpoint for the user; the next vote reports it to all ranks."""
        self._asked, self._repeatable = True, None

    def ask_close(self) -> None:
        """The user called `close()`; every vote from now on reports it to all ranks."""
        self.close_asked, self._repeatable = True, None

    def tell(self, level: Level, id_: VersionId, state: int) -> None:
        """Record this rank's state of a version (DONE, BROKEN), if it is in flight. Any thread."""
        if (version := self.versions.find(id_)) is not None:
            version.tell(level, state)

    # --- voting --------------------------------------------------------------------------------

    def launch(
        self,
        newest: VersionId,
        busy: Mapping[Level, bool] = MappingProxyType({}),
        figures: CostEstimate = UNMEASURED,
        adapter: int = 0,
        place: int = 0,
        wanted: bool = False,
        parts: tuple[int, ...] = (),
        own: Sequence[int] = (),
    ) -> None:
        """Cast this rank's vote.

        Args:
            newest: the version of this boundary, too young to judge.
            busy: True for a level that cannot take another version on this rank.
            figures: costs of checkpoints on this rank.
            adapter: see `Vote`.
            place: this rank's iteration.
            wanted: this rank asks for a version.
            parts: see `Vote`; empty: they say nothing.
            own: integers of this rank that all ranks read, see `Ballots`.
        """
        about = self._about(newest) if self.versions.flying else {}
        nbytes, metric = _shard(about[LOCAL]) if LOCAL in about else (0, None)
        vote = Vote(
            self._votes_about(about, busy, figures),
            no_request=int(not (self._asked or wanted)),
            less_bytes=-nbytes,
            metric=NO_METRIC if metric is None else as_vote(metric),
            less_step_us=-figures.step_us,
            adapter=adapter,
            no_close=int(not self.close_asked),
            place=place,
            place_complement=~place,
            parts=parts or self._silent,
        )
        self._asked = False
        if self.diverged is not None:
            return
        values = vote.pack()
        self._cast(values, newest, about, own)
        plain = vote.levels is SILENT or all(map(_is_plain, vote.levels.values()))
        if plain and not own and about.keys() <= {MEMORY} and vote.no_request and vote.no_close:
            assert self._ballot is not None
            timed = [self._since[level] + s for level, s in self._every_seconds.items() if s > 0]
            self._due_seconds = min(timed, default=math.inf)
            self._ballot.is_plain, self._repeatable = True, (vote, values, vote.parts)

    def repeat(self, newest: VersionId, place: int, parts: tuple[int, ...]) -> bool:
        """After `read_same`: cast the same vote as the last time, but for the place and the numbers
        of parts. False, and nothing is cast, if there is other news. Arguments as for `launch`."""
        if self._repeatable is None:
            return False
        flying = self.versions.flying
        about = {MEMORY: flying[0]} if flying and flying[0].id != newest else {}
        repeatable = vote, values, own = self._repeatable
        cast = self._ballots.repeat(place) if parts == own else None
        if cast is None:
            values = [*values[:VOTE_WIDTH], *parts]
            values[PLACES] = place, ~place
            cast, repeatable = self._ballots.all_reduce_min(values), (vote, values, parts)
        else:
            self.reported = place
        self.turns += 1
        self._ballot, self._repeatable = Ballot(cast, newest, about, True), repeatable
        return True

    def repeat_alone(self, newest: VersionId, place: int) -> bool:
        """`read_same` and `repeat`, while no version is open and the parts' numbers are the last
        ones. False, and nothing is read or cast, where one of them would not do it."""
        ballot = self._ballot
        if self._repeatable is None or ballot is None or self.versions.flying:
            return False
        if self._timed and time.monotonic() >= self._due_seconds:
            return False
        if (cast := self._ballots.repeat(place)) is None:
            return False
        self._patience_lost, self.apart, self.together = False, False, ballot.newest
        self.rows, self.reported = [], place
        self.turns += 1
        self._ballot = Ballot(cast, newest, {}, True)
        return True

    def _about(self, newest: VersionId) -> dict[Level, Version]:
        """Return, by level, the oldest open version with a state that can be known by now."""
        found: dict[Level, Version] = {}
        for version in self.versions.flying:
            if version.id != newest:
                for level in version.open:
                    found.setdefault(level, version)
        return found

    def _votes_about(
        self, about: Mapping[Level, Version], busy: Mapping[Level, bool], figures: CostEstimate
    ) -> Mapping[Level, LevelVote]:
        if not (self.versions.flying or self._timed or figures.levels or any(busy.values())):
            return SILENT
        opened, now, votes = set[Level](), time.monotonic(), dict(SILENT)
        for version in self.versions.flying:
            opened |= version.open
        for level in LEDGERS:
            is_busy = busy.get(level, False)
            reports = level in opened or is_busy or self._every_seconds.get(level)
            if reports or level in figures.levels:
                votes[level] = self._vote_about(level, about.get(level), is_busy, now, figures)
        return votes

    def _vote_about(
        self,
        level: Level,
        version: Version | None,
        busy: bool,
        now_seconds: float,
        figures: CostEstimate,
    ) -> LevelVote:
        if level.facts.one_at_a_time:  # this rank does not write a broken version
            busy = busy or any(each.here(level) != BROKEN for each in self.versions.on(level))
        state = DONE if version is None else version.here(level)
        if level not in self._since:
            return LevelVote(state, int(not busy))
        every_seconds, cost = self._every_seconds[level], figures.levels.get(level, FREE)
        over = 0 < every_seconds <= now_seconds - self._since[level]
        return LevelVote(state, int(not busy), int(not over), -cost.us, -cost.steps)

    def vote_again(self, version: int) -> list[Version]:
        """Vote once for each open version at the boundary of `version`, on all ranks, to learn its
        outcome now; returns the memory versions that broke. A version not done on this rank counts
        as broken. Waits as `read`."""
        broken: list[Version] = []
        apart, together = self.apart, self.together  # these votes do not name an iteration
        for _ in range(max(len(self.versions.on(level)) for level in AWAITED)):
            if self.diverged is not None:
                break
            about = {level: found[0] for level in AWAITED if (found := self.versions.on(level))}
            nbytes, metric = _shard(about.get(LOCAL))
            states = {level: each.here(level) or BROKEN for level, each in about.items()}
            levels = {level: LevelVote(states.get(level, DONE)) for level in LEDGERS}
            metric_vote = as_vote(metric)
            vote = Vote(levels, less_bytes=-nbytes, metric=metric_vote, parts=self._silent)
            opened = self.memory.open
            newest = VersionId(opened[-1].generation if opened else 0, version)
            self._cast(vote.pack(), newest, about)
            _, lost = self.read()
            broken += [lost] if lost else []
            self.apart, self.together = apart, together
        return broken

    def _cast(
        self,
        values: list[int],
        newest: VersionId,
        about: dict[Level, Version],
        own: Sequence[int] = (),
    ) -> None:
        """Cast the vote; for `about` see `Ballot`."""
        self.turns += 1
        self._repeatable = None
        self._ballot = Ballot(self._ballots.all_reduce_min(values, own), newest, about)

    def read_same(self) -> Vote | None:
        """As `read`, in the usual case: all ranks have cast the same vote, without news but a
        version that is complete in memory, and the next one may be the same. None, and nothing is
        read, in all others. Place and parts of the result are those of an earlier vote."""
        ballot = self._ballot
        if self._repeatable is None or ballot is None or not ballot.pending.is_unanimous():
            return None
        if self._timed and time.monotonic() >= self._due_seconds:
            return None
        flying = self.versions.flying
        for each in flying:
            # Nothing is to be learnt of it but that it is complete in memory, as it is here.
            here = each.open == IN_MEMORY and each.here(MEMORY) == DONE
            if not here or each.snapshot is not None or each.flush is not None:
                return None
        self._patience_lost, self.apart, self.together = False, False, ballot.newest
        if flying and (version := ballot.about.get(MEMORY)) is not None:
            self.memory.resolve(DONE, version)
            self.versions.land()
        self.rows = []
        return self._repeatable[0]

    def read(self) -> tuple[Vote, Version | None]:
        """Return the agreement since the last boundary, and the memory version it broke, if any.

        Waits at most `patience_seconds`; then this rank is `diverged`.
        """
        self.rows = []
        ballot = self._ballot
        if ballot is None:
            return Vote(), None
        try:
            if not (
                ballot.is_here()
                or ballot.came(0.0 if self._patience_lost else self.patience_seconds)
            ):
                self.missing = ballot.missing()
                self.part(ballot.newest)
                return Vote(), None
            agreed, self.rows = ballot.result(), ballot.rows()
        except RankGoneError:
            if not self._ballots.recover():
                # Fails with the error that the script or its launcher expects.
                self._group.barrier()
                raise
            agreed, self.rows = ballot.result(), ballot.rows()
            self._report_recovery()
        self._patience_lost, self.apart = False, agreed.apart
        if not self.apart:
            self.together = ballot.newest
        if not ballot.about:
            return agreed, None
        shard = (-agreed.less_bytes, of_vote(agreed.metric))
        broken = None
        # Last levels first: the effects of a version on local depend on them.
        for level in LAST_FIRST:
            if (version := ballot.about.get(level)) is not None:
                state = agreed.levels[level].state
                decided = self._resolve(level, state, version, *shard)
                if decided and level == MEMORY and state == BROKEN:
                    broken = version
        self.versions.land()
        return agreed, broken

    def _report_recovery(self) -> None:
        if self._problem != self._ballots.problem:
            self._problem = self._ballots.problem
            self._on_slower_votes(self._problem)

    @property
    def patience_seconds(self) -> float:
        """The time that the training thread may wait for other ranks' votes."""
        return VOTE_PATIENCE_APART_SECONDS if self.apart else VOTE_PATIENCE_SECONDS

    def passed(self, iterations: int) -> None:
        """Report that this rank has completed `iterations`, with a boundary or not. Any thread."""
        self._ballots.passed(iterations)
        self.reported = iterations

    def hopeless(self) -> bool:
        """Return whether the vote under way waits for a rank that waits for this one, as far as is
        known. Training thread, in a barrier."""
        return self._ballot is not None and self._ballot.passed_over()

    def lose_patience(self) -> None:
        """Record that the training thread has already waited too long for the vote under way."""
        self._patience_lost = True

    def part(self, newest: VersionId) -> None:
        """Stop voting, because another rank is at another iteration. `newest` breaks: no rank was
        told that it is complete here, and shards of different iterations must not meet under its
        number. Older open versions may be complete on all ranks, and stay open."""
        self._ballot, self.diverged, self.divergence_is_reported = None, newest, False
        self.break_open(newest)

    def break_open(self, id_: VersionId) -> None:
        """Break a version that no rank has voted about yet, whatever is reported of it later."""
        if (version := self.versions.find(id_)) is not None:
            for level in AWAITED:
                self._resolve(level, BROKEN, version)

    def even_out(self) -> None:
        """Cast the votes that other ranks wait for, if this rank's iteration was cut short.
        Collective."""
        self._repeatable = None  # another vote is the last one now
        self._ballots.even_out()
        self._report_recovery()

    def void(self) -> None:
        """Forget the last vote, before a restore."""
        self._ballot = None
        self.turns = 0

    def close(self) -> None:
        """End voting: any thread here or on another rank that waits for a vote gives up."""
        self._ballots.close()

    def _resolve(
        self,
        level: Level,
        state: int,
        version: Version,
        largest_bytes: int = 0,
        metric: float | None = None,
    ) -> bool:
        """Resolve a version, see `Ledger.resolve`; on the local level, call the handlers."""
        ledger = self.ledgers[level]
        before = ledger.safe
        if not ledger.resolve(state, version):
            return False
        if level == LOCAL and state == BROKEN:
            self._on_local_broken()
        elif level == LOCAL and ledger.safe != before:
            self._on_local_safe(version, largest_bytes, metric)
        return True

    def settle(self, final: bool = True) -> None:
        """Learn the outcome of all open versions. A version not done counts as broken, except on
        the peer and persistent levels, which no caller waits for. Without `final` it stays open.

        Collective and waiting: for the end of the job, for a save on demand, and for jobs that do
        not vote.
        """
        own: dict[Level, dict[VersionId, int]] = {}
        for level, ledger in self.ledgers.items():
            # A version safe here may be open on a rank that has read one vote less.
            known = {} if ledger.safe is None else {ledger.safe: DONE}
            on = self.versions.on(level)
            own[level] = {**known, **{each.id: each.here(level) for each in on}}
        shards = {each.id: _shard(each) for each in self.versions.flying}
        gathered = self._group.all_gather_object((own, shards))
        for level in LEDGERS:
            unknown = BROKEN if level.facts.awaited and final else PENDING
            for version in self.versions.on(level):
                id_ = version.id
                state = min(theirs[level].get(id_, unknown) for theirs, _ in gathered) or unknown
                found = [theirs.get(id_, (0, None)) for _, theirs in gathered]
                largest_bytes = max(nbytes for nbytes, _ in found)
                self._resolve(level, state, version, largest_bytes, found[0][1])
        self.versions.land()
        self._ballot = None

    # --- what follows for slots ----------------------------------------------------------------

    def protected(self, newest: VersionId) -> set[VersionId]:
        """Return versions in memory that must not be overwritten, as known at this boundary."""
        return self.memory.protected() - {newest}

    def last_word_now(self, protected: set[VersionId]) -> set[VersionId] | None:
        """As `last_word`; None instead of a wait. Training thread."""
        ballot = self._ballot
        if ballot is not None and ballot.is_plain and ballot.pending.is_unanimous():
            about = ballot.about.get(MEMORY)  # all have voted that it is complete
            return protected if about is None else superseded_by(about.id, protected)
        return self.last_word(protected) if ballot is None or ballot.is_here() else None

    def last_word(self, protected: set[VersionId], waits: bool = True) -> set[VersionId]:
        """Return `protected`, corrected by the vote of this very boundary. Copier thread. Waits for
        it, or with `waits=False` returns `protected` if it is not complete.

        When that vote is complete, every rank has entered this iteration, so its result about the
        previous version is final: sealed on all ranks, it supersedes older ones; broken on one, it
        need not be kept itself.
        """
        ballot = self._ballot
        if ballot is None or (about := ballot.about.get(MEMORY)) is None:
            return protected
        if not (waits or ballot.is_here()):
            return protected
        try:
            state = ballot.result().levels[MEMORY].state
        except RuntimeError:  # a rank is gone, or this one closes
            if waits:
                raise
            return protected
        if state == DONE:
            return superseded_by(about.id, protected)
        return protected - {about.id} if state == BROKEN else protected

    def superseded_earlier(self, generation: int) -> bool:
        """True when no slot of a run before that generation's is needed any more."""
        safe = self.memory.safe
        return safe is not None and safe.generation == generation


LAST_FIRST = LEDGERS[::-1]
IN_MEMORY = {MEMORY}


def _is_plain(vote: LevelVote) -> bool:
    """The vote about a level says nothing that the next boundary's would not."""
    return vote.state == DONE and vote[1:] == PLAIN[1:]


PLAIN = LevelVote()


def _shard(local: Version | None) -> tuple[int, float | None]:
    """Return the size and metric of this rank's shard of a version on its way to local."""
    return (0, None) if local is None else (local.nbytes, local.metric)
