"""What a restart owes: computed from what was reported and what was destroyed, and nothing else.

The package's planner is not asked, nor is any file looked at. Ranks report what they were told
(`sealed`, `committed`); the driver reports what it did. From both follows the oldest version that
the next run may go on from, by the table "What dies, and what survives" in ARCHITECTURE.md and the
settings' own words ("keep so many of the newest complete versions"). Where reports come too late to
be sure, less is owed: a rank is killed before it has told all that it was told.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tests.chaos.plan import RANKS, Shape

Moment = tuple[int, int]
"""(life, version): a version that a run made. Later lives win."""
EVERYBODY = frozenset(range(RANKS))


@dataclass
class Truth:
    """Of one round."""

    shape: Shape
    keep_last: int
    """Of the local and of the persistent level."""
    parents: dict[int, Moment | None] = field(default_factory=dict)
    """By life: what it went on from; None after a fresh start."""
    places: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By life: the node of every rank."""
    _history: dict[int, int] = field(default_factory=dict)
    """By generation: the newest life of it."""
    _sealed: dict[Moment, set[int]] = field(default_factory=lambda: defaultdict(set))
    _local: dict[Moment, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Ranks that said so."""
    _parity: dict[Moment, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Nodes one of whose ranks said so."""
    _flushed: set[Moment] = field(default_factory=set)
    _gone: set[tuple[str, Moment, int]] = field(default_factory=set)
    """(level, version, rank): copies that are lost or damaged; of `persistent` all are rank 0's."""
    _hit: set[tuple[str, Moment]] = field(default_factory=set)
    """What was damaged, known to be complete or not."""

    # --- what is reported ----------------------------------------------------------------------

    def placed(self, life: int, nodes: tuple[int, ...]) -> None:
        """A run is about to begin, with its ranks on these nodes."""
        self.places[life] = nodes

    def began(self, life: int, generation: int, parent: tuple[int, int]) -> None:
        """A run went on from `parent` (generation, version); version 0 is a fresh start."""
        made_by = self._history.get(parent[0], 0)
        self.parents[life] = (made_by, parent[1]) if parent[1] else None
        self._history[generation] = life

    def heard(self, life: int, rank: int, event: str, level: str, version: int, said: str) -> None:
        """A rank was told of a version."""
        moment = (life, version)
        if event == "sealed":
            self._sealed[moment].add(rank)
        elif event == "committed" and level == "local":
            self._local[moment].add(rank)
        elif event == "committed" and level == "peer":
            self._parity[moment].add(self.places[life][rank])
        elif event == "committed" and level == "persistent" and said == "complete":
            self._flushed.add(moment)

    # --- what is done --------------------------------------------------------------------------

    def lost(self, level: str, node: int) -> None:
        """All that the node has on `memory`, or on `local`, parity included."""
        for moment in {*self._sealed, *self._local, *self._parity}:
            there = self.places[moment[0]]
            for rank in (rank for rank in EVERYBODY if there[rank] == node):
                self._gone.add((level, moment, rank))
                if level == "local":
                    self._gone.add(("parity", moment, rank))

    def damaged(self, level: str, rank: int, generation: int, version: int) -> None:
        """One copy has a wrong bit, or lacks its end. What may be made from it is worth nothing."""
        moment = (self._history.get(generation, 0), version)
        rank = 0 if level == "persistent" else rank
        self._gone.add((level, moment, rank))
        self._hit.add((level, moment))
        if level == "memory" and rank not in self._local[moment]:
            level = "local"
            self._gone.add((level, moment, rank))
        if level == "local":
            if self._parity[moment] != {*self.shape.nodes}:
                self._gone |= {("parity", moment, r) for r in EVERYBODY}
            if moment not in self._flushed:
                self._gone.add(("persistent", moment, 0))

    # --- what follows --------------------------------------------------------------------------

    def promised(self) -> int:
        """The oldest version that the next run may go on from; 0: a fresh start is right."""
        return max(self.owed().values())

    def owed(self) -> dict[str, int]:
        """By where it is (`disks`: local files, and parity): the newest sure version, or 0."""
        sure = {
            "memory": self._from_memory(),
            "disks": self._from_disks(),
            "persistent": self._from_persistent(),
        }
        return {
            place: max([version for _, version in moments], default=0)
            for place, moments in sure.items()
        }

    def _line(self) -> dict[int, float]:
        """The newest life and its ancestors; each with the newest version that counts."""
        life = max(self.parents, default=0)
        line: dict[int, float] = {life: float("inf")}
        while parent := self.parents.get(life):
            life, limit = parent
            line[life] = limit
        return line

    def _on_line(self, moments: set[Moment]) -> list[Moment]:
        """Without what a run began from: that it has it made again where it was lost is no version
        of its own, and nothing more is owed for it."""
        line = self._line()
        return sorted(
            m for m in moments if m[0] in line and self._began_at(m[0]) < m[1] <= line[m[0]]
        )

    def _began_at(self, life: int) -> int:
        parent = self.parents.get(life)
        return parent[1] if parent else 0

    def _from_memory(self) -> list[Moment]:
        """What all have sealed is overwritten only when all have sealed something newer.

        All may have, and not have told it yet; so nothing is owed once something newer was hit.
        """
        whole = {m for m, ranks in self._sealed.items() if ranks == EVERYBODY}
        newest = max((m for m in whole if m[0] in self._line()), default=None)
        if newest is None or not self._on_line({newest}):
            return []
        newer = [m for level, m in self._hit if level == "memory" and m > newest]
        there = all(self._intact("memory", newest, rank) for rank in EVERYBODY)
        return [newest] if there and not newer else []

    def _from_disks(self) -> list[Moment]:
        """The newest complete ones, and the newest that is protected, from files and parity.

        Something newer may have been protected, and not all have told it: then it took that one's
        place. It is as good, unless it was hit.
        """
        complete = {m for m, ranks in self._local.items() if ranks == EVERYBODY}
        everywhere = {*self.shape.nodes}
        protected = {m for m, nodes in self._parity.items() if nodes == everywhere}
        hit = {moment for level, moment in self._hit if level in ("local", "parity")}
        newest = sorted({*self._on_line(protected), *hit})[-1:]
        kept = {*self._kept("local", complete), *protected.intersection(newest)}
        return [moment for moment in kept if self._can_be_made(moment)]

    def _can_be_made(self, moment: Moment) -> bool:
        """From the files that are sure to be there; a node that lacks anything lacks all."""
        here = {r for r in self._local[moment] if self._intact("local", moment, r)}
        parity = {
            rank
            for rank in EVERYBODY
            if self.places[moment[0]][rank] in self._parity[moment]
            and self._intact("parity", moment, rank)
        }
        lacking = {self.places[moment[0]][rank] for rank in EVERYBODY - (here & parity)}
        return here == EVERYBODY or len(lacking) <= self.shape.survives

    def _from_persistent(self) -> list[Moment]:
        kept = self._kept("persistent", self._flushed)
        return [moment for moment in kept if self._intact("persistent", moment, 0)]

    def _kept(self, level: str, complete: set[Moment]) -> list[Moment]:
        """What retention leaves: what was hit may have been complete, too, and counted; also off
        the line, where an agent of a run before it was stopped, and finished when it woke."""
        hit = {moment for at, moment in self._hit if at == level}
        counted = sorted({*self._on_line(complete), *hit})
        return [moment for moment in counted[-self.keep_last :] if moment in complete]

    def _intact(self, level: str, moment: Moment, rank: int) -> bool:
        return (level, moment, rank) not in self._gone
