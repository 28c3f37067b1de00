"""Agreement: how ranks come to know the same of every version, without waiting for each other.

At every boundary each rank casts its vote, and reads what came of those of the boundary before.
`policy` says what a vote is and what follows from it, `vote_exchange` how they come together; this
module keeps the books: the ledgers, this rank's own knowledge, and the vote under way.

For the training thread, but for `tell` and `last_word`, which the copier thread calls too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from tierckpt.config import Config
from tierckpt.core.halt_conditions import Reason
from tierckpt.core.ledger import BROKEN, DONE, PENDING, REMEMBERED, Ledger, superseded_by
from tierckpt.core.levels import AWAITED, INTERVALS, LEDGERS, LOCAL, MEMORY, PEER, PERSISTENT, Level
from tierckpt.core.tuning.autotune import FREE, UNKNOWN, CostEstimate
from tierckpt.core.votes import LevelVote, Vote, as_vote, of_vote
from tierckpt.format.ids import VersionId
from tierckpt.group import Group

from .ballot import PATIENCE_APART_SECONDS, PATIENCE_SECONDS, Ballot
from .vote_exchange import Ballots, RankGoneError, Rows


class Agreement:
    """See the module's text. Every rank's is alike, but for what it was told."""

    def __init__(
        self,
        group: Group,
        ballots: Ballots,
        config: Config,
        on_local_safe: Callable[[VersionId, int, float | None], None],
        on_local_broken: Callable[[], None],
    ) -> None:
        """Votes by `vote_exchange`, which it closes. `on_local_safe` hears of every version that
        became durable on all ranks, the size of its largest shard in bytes, and its metric;
        `on_local_broken`, that one did not, and is in the ledger."""
        self._group, self._ballots = group, ballots
        self._on_local_safe, self._on_local_broken = on_local_safe, on_local_broken
        self._ballot: Ballot | None = None
        self.rows: Rows = []
        """What ranks gave along with the votes that were read last."""
        self.turns = 0
        """Votes cast since all ranks last were at the same place for sure."""
        self._asked = False
        self.close_asked = False
        """The user wants the end; all ranks learn of it with every vote from now on."""
        self._every_seconds = {level: getattr(config, level).every_seconds for level in INTERVALS}
        self._known: dict[Level, dict[VersionId, int]] = {level: {} for level in LEDGERS}
        """By level: how the versions under way are doing here."""
        self._shards: dict[VersionId, tuple[int, float | None]] = {}
        """Bytes, and metric, of this rank's shards on their way to local."""
        self.restart()

    def restart(
        self,
        safe: Mapping[Level, VersionId | None] = MappingProxyType({}),
        broken: Iterable[VersionId] = (),
        ages_seconds: Mapping[Level, float] = MappingProxyType({}),
    ) -> None:
        """Begin with these versions as safe, after a restore; `broken` ones are on local disks.
        `ages_seconds`: what has passed of a level's interval already."""
        self.ledgers = {level: Ledger(safe=safe.get(level)) for level in LEDGERS}
        self.memory, self.local = self.ledgers[MEMORY], self.ledgers[LOCAL]
        self.peer, self.persistent = self.ledgers[PEER], self.ledgers[PERSISTENT]
        self.local.broken = sorted(broken)[-REMEMBERED:]
        now = time.monotonic()
        self._since = {level: now - ages_seconds.get(level, 0.0) for level in INTERVALS}
        """When each level took a version last (monotonic)."""
        self.parted: VersionId | None = None
        """The version at which this rank found that others are not where it is. From then on it
        neither votes nor reads, and takes no version, until a restore."""
        self.together: VersionId | None = None
        """The newest version at whose boundary all ranks were in the same iteration."""
        self.apart = False
        """The votes that were read last came from different iterations."""
        self.missing: list[int] = []
        """Ranks whose votes did not come, where that is known."""
        self._patience_lost = False
        self._ballot = None

    def open(self, id_: VersionId, levels: Iterable[Level]) -> None:
        """A version is being taken, on all ranks: to memory, and to these levels."""
        levels = {MEMORY, *levels}
        for level in AWAITED:
            if level in levels:
                self.ledgers[level].open.append(id_)
        self._since.update(dict.fromkeys(levels, time.monotonic()))

    def open_later(self, level: Level, id_: VersionId) -> None:
        """A version that is complete on local is on its way to a level after it, on all nodes."""
        self.ledgers[level].open.append(id_)

    def forget(self, id_: VersionId) -> None:
        """A version is to be taken again."""
        for ledger in map(self.ledgers.__getitem__, AWAITED):
            ledger.open = [i for i in ledger.open if i != id_]

    def ask(self) -> None:
        """The user wants a checkpoint; all ranks learn of it with the next vote."""
        self._asked = True

    def tell(self, level: Level, id_: VersionId, state: int) -> None:
        """How a version is doing on this rank (DONE, BROKEN). Any thread."""
        self._known[level][id_] = state

    def tell_shard(self, id_: VersionId, nbytes: int, metric: float | None) -> None:
        """How large this rank's shard is, of a version on its way to local, and the metric that
        rank 0's manifest has of it. Any thread."""
        self._shards[id_] = (nbytes, metric)

    # --- voting --------------------------------------------------------------------------------

    def launch(
        self,
        newest: VersionId,
        busy: Mapping[Level, bool] = MappingProxyType({}),
        halt: tuple[Reason, bool] = (Reason.NONE, False),
        figures: CostEstimate = UNKNOWN,
        adapter: int = 0,
        check: tuple[int, int, int, int] = (0, 0, 0, -1),
        unchanged: int = 0,
        own: Sequence[int] = (),
    ) -> None:
        """Cast this rank's vote.

        Args:
            newest: the version of this boundary, too young to judge.
            busy: True for a level that cannot take another version on this rank.
            halt: what `HaltController.vote` says.
            figures: what checkpoints cost here.
            adapter: see `Vote`.
            check: what `ReplicaMonitor.vote` says.
            unchanged: see `Vote`.
            own: what all ranks are to read of this one, see `Ballots`.
        """
        about, now = self._about(newest), time.monotonic()
        nbytes, metric = self._shard(about.get(LOCAL))
        vote = Vote(
            {
                level: self._vote_about(
                    level, about.get(level), busy.get(level, False), now, figures
                )
                for level in LEDGERS
            },
            no_request=int(not self._asked and halt[0] is Reason.NONE),
            less_bytes=-nbytes,
            metric=as_vote(metric),
            halt=halt[0],
            unattended=int(halt[1]),
            less_step_us=-figures.step_us,
            adapter=adapter,
            no_close=int(not self.close_asked),
            check=check[0],
            check_complement=check[1],
            place=check[2],
            place_complement=check[3],
            unchanged=unchanged,
        )
        self._asked = False
        if self.parted is not None:
            return
        self._cast(vote, newest, about, own)

    def _about(self, newest: VersionId) -> dict[Level, VersionId]:
        """By level, the oldest open version: those of which something can be known by now."""
        found = {}
        for level, ledger in self.ledgers.items():
            if ledger.open and (old := [id_ for id_ in ledger.open if id_ != newest]):
                found[level] = old[0]
        return found

    def _vote_about(
        self,
        level: Level,
        id_: VersionId | None,
        busy: bool,
        now_seconds: float,
        figures: CostEstimate,
    ) -> LevelVote:
        opened, known = self.ledgers[level].open, self._known[level]
        if opened and level.facts.one_at_a_time:  # what is broken, this rank does not write
            busy = busy or any(known.get(each) != BROKEN for each in opened)
        state = DONE if id_ is None else known.get(id_, PENDING)
        if level not in self._since:
            return LevelVote(state, int(not busy))
        every_seconds, cost = self._every_seconds[level], figures.levels.get(level, FREE)
        over = 0 < every_seconds <= now_seconds - self._since[level]
        return LevelVote(state, int(not busy), int(not over), -cost.us, -cost.steps)

    def vote_again(self, version: int) -> None:
        """At the boundary of `version`, on all ranks: learn now what became of each version that is
        open, one a vote. What is not done here by now is broken. Waits as `read` does."""
        apart, together = self.apart, self.together  # these votes say no iteration
        for _ in range(max(len(self.ledgers[level].open) for level in AWAITED)):
            if self.parted is not None:
                return
            opened = {level: self.ledgers[level].open for level in AWAITED}
            about = {level: ids[0] for level, ids in opened.items() if ids}
            nbytes, metric = self._shard(about.get(LOCAL))
            states = {level: self._state(level, id_) or BROKEN for level, id_ in about.items()}
            levels = {level: LevelVote(states.get(level, DONE)) for level in LEDGERS}
            vote = Vote(levels, less_bytes=-nbytes, metric=as_vote(metric))
            newest = VersionId(self.memory.open[-1].generation if self.memory.open else 0, version)
            self._cast(vote, newest, about)
            self.read()
            self.apart, self.together = apart, together

    def _cast(
        self,
        vote: Vote,
        newest: VersionId,
        about: dict[Level, VersionId],
        own: Sequence[int] = (),
    ) -> None:
        """Cast the vote; for the versions that it is about see `Ballot`."""
        self.turns += 1
        self._ballot = Ballot(self._ballots.all_reduce_min(vote.pack(), own), newest, about)

    def _shard(self, local: VersionId | None) -> tuple[int, float | None]:
        """The size of this rank's shard of a version on its way to local, and the metric."""
        return (0, None) if local is None else self._shards.get(local, (0, None))

    def _state(self, level: Level, id_: VersionId) -> int:
        return self._known[level].get(id_, PENDING)

    def undecided(self, level: Level) -> list[VersionId]:
        """Versions that are open there, and of which this rank was not told how they are doing."""
        return [id_ for id_ in self.ledgers[level].open if self._state(level, id_) == PENDING]

    def read(self) -> tuple[Vote, VersionId | None]:
        """What was agreed on since the last boundary, and the version that broke by it, if any.

        Waits `patience_seconds` at most; then this rank is `parted`.
        """
        self.rows = []
        if self._ballot is None:
            return Vote(), None
        try:
            if not self._ballot.came(0.0 if self._patience_lost else self.patience_seconds):
                self.missing = self._ballot.missing()
                self.part(self._ballot.newest)
                return Vote(), None
            agreed, self.rows = self._ballot.result(), self._ballot.rows()
        except RankGoneError:
            self._group.barrier()  # fails as the script, or its launcher, knows it of this library
            raise
        self._patience_lost, self.apart = False, agreed.apart
        if not self.apart:
            self.together = self._ballot.newest
        told = (-agreed.less_bytes, of_vote(agreed.metric))
        broken = {  # the last levels first: what follows from a version on local depends on them
            level: self._resolve(level, agreed.levels[level].state, id_, *told)
            for level, id_ in reversed(self._ballot.about.items())
        }
        for level, known in self._known.items():
            opened = self.ledgers[level].open
            for id_ in list(known):  # the copier thread may add one any time
                if id_ not in opened:
                    known.pop(id_, None)
        for id_ in list(self._shards):
            if id_ not in self.local.open:
                self._shards.pop(id_, None)
        return agreed, broken.get(MEMORY)

    @property
    def patience_seconds(self) -> float:
        """How long the training thread may wait for what needs other ranks' votes."""
        return PATIENCE_APART_SECONDS if self.apart else PATIENCE_SECONDS

    def passed(self, iterations: int) -> None:
        """This rank has so many iterations behind it, with a boundary or without. Any thread."""
        self._ballots.passed(iterations)

    def hopeless(self) -> bool:
        """The vote under way waits for a rank that waits for this one, as far as is known. Training
        thread, in a barrier."""
        return self._ballot is not None and self._ballot.passed_over()

    def lose_patience(self) -> None:
        """The training thread has waited so long for the vote under way already."""
        self._patience_lost = True

    def part(self, newest: VersionId) -> None:
        """Some rank is not where this one is, so this rank votes no more. No rank was told that
        `newest` is complete here, and it is broken now: else shards of different iterations could
        meet under its number. What is open of before may be complete on all ranks, and stays."""
        self._ballot, self.parted = None, newest
        self.break_open(newest)

    def break_open(self, id_: VersionId) -> None:
        """A version that no rank has voted about yet is none, whatever is told of it from now."""
        for level in AWAITED:
            self._resolve(level, BROKEN, id_)

    def even_out(self) -> None:
        """Collective: those whose iteration was cut short cast the votes that others wait for."""
        self._ballots.even_out()

    def void(self) -> None:
        """Before a restart: what was voted on last is forgotten."""
        self._ballot = None
        self.turns = 0

    def close(self) -> None:
        """At the end: who still waits for a vote, here or on another rank, gives up."""
        self._ballots.close()

    def _resolve(
        self,
        level: Level,
        state: int,
        candidate: VersionId,
        largest_bytes: int = 0,
        metric: float | None = None,
    ) -> VersionId | None:
        """See `Ledger.resolve`; and have follow what does, where it is about the local level."""
        ledger = self.ledgers[level]
        before = ledger.safe
        broken = ledger.resolve(state, candidate)
        if level == LOCAL and broken is not None:
            self._on_local_broken()
        elif level == LOCAL and ledger.safe is not None and ledger.safe != before:
            self._on_local_safe(ledger.safe, largest_bytes, metric)
        return broken

    def settle(self) -> None:
        """Learn the fate of everything that is open; what is not done by now is broken, but with
        the other nodes and on the persistent level, which nobody waits for.

        Collective and waiting: for the end, and for a save on demand.
        """
        mine: dict[Level, dict[VersionId, int]] = {}
        for level, ledger in self.ledgers.items():
            # What is safe here may be open on a rank that has read one vote less.
            known = {} if ledger.safe is None else {ledger.safe: DONE}
            mine[level] = {**known, **{i: self._state(level, i) for i in ledger.open}}
        everyone = self._group.all_gather_object((mine, dict(self._shards)))
        for level, ledger in self.ledgers.items():
            unknown = BROKEN if level.facts.awaited else PENDING
            for id_ in list(ledger.open):
                state = min(theirs[level].get(id_, unknown) for theirs, _ in everyone) or unknown
                told = [shards.get(id_, (0, None)) for _, shards in everyone]
                self._resolve(level, state, id_, max(nbytes for nbytes, _ in told), told[0][1])
        self._ballot = None

    # --- what follows for slots ----------------------------------------------------------------

    def protected(self, newest: VersionId) -> set[VersionId]:
        """Versions in memory that must not be overwritten, by what is known at this boundary."""
        return self.memory.protected() - {newest}

    def last_word(self, protected: set[VersionId]) -> set[VersionId]:
        """The same, after the vote of this very boundary. Copier thread; waits.

        When that vote is complete, every rank has entered this iteration, so what it says of the
        version before is final: sealed everywhere, it supersedes what is older; broken anywhere,
        it is void itself.
        """
        ballot = self._ballot
        if ballot is None or (about := ballot.about.get(MEMORY)) is None:
            return protected
        state = ballot.result().levels[MEMORY].state
        if state == DONE:
            return superseded_by(about, protected)
        return protected - {about} if state == BROKEN else protected

    def superseded_earlier(self, generation: int) -> bool:
        """True when no slot of a run before that generation's is needed any more."""
        safe = self.memory.safe
        return safe is not None and safe.generation == generation

    def needed(self) -> list[VersionId]:
        """Versions whose slots are out of reach at the next boundary.

        One vote is about one version. The next boundary's is about the oldest one then open, and
        proves what is older superseded (see `last_word`): usually the newest one now. Where a vote
        was lost, or one found a version still being copied, votes are behind; they come up again at
        a boundary that takes none.
        """
        opened = self.memory.open
        if not opened:
            return [self.memory.safe] if self.memory.safe else []
        decided = len(opened) > 1 and self._state(MEMORY, opened[0]) != PENDING
        return opened[1:] if decided else opened[:]
