"""The version that a restart owes, computed from reports and destruction alone.

The package's planner is not asked, and no file is read. Ranks report the events that they received
(`sealed`, `committed`); the driver reports its faults. Both determine the oldest version from which
the next run may continue, by the table "What dies, and what survives" in ARCHITECTURE.md and the
settings' own words ("keep so many of the newest complete versions"). Where reports may be missing,
less is owed: a rank may be killed before it has recorded every event.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tests.chaos.plan import RANKS, Shape

Moment = tuple[int, int]
"""(run, version): a version that a run made. Later runs win."""
EVERYBODY = frozenset(range(RANKS))


@dataclass
class Truth:
    """Reports, damage and owed versions of one round."""

    shape: Shape
    keep_last: int
    """Number of versions to keep on the local and on the persistent level."""
    parents: dict[int, Moment | None] = field(default_factory=dict)
    """The version from which each run continued; None after a fresh start."""
    places: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The node of every rank, by run."""
    _history: dict[int, int] = field(default_factory=dict)
    """The newest run of each generation."""
    _sealed: dict[Moment, set[int]] = field(default_factory=lambda: defaultdict(set))
    _local: dict[Moment, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Ranks that reported the version as sealed."""
    _parity: dict[Moment, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Nodes with a rank that reported the version as committed."""
    _flushed: set[Moment] = field(default_factory=set)
    _gone: set[tuple[str, Moment, int]] = field(default_factory=set)
    """(level, version, rank) of lost or damaged copies; on `persistent` all belong to rank 0."""
    _hit: set[tuple[str, Moment]] = field(default_factory=set)
    """Damaged versions, whether known to be complete or not."""

    # --- reports -------------------------------------------------------------------------------

    def placed(self, life: int, nodes: tuple[int, ...]) -> None:
        """Record that a run is about to start, with its ranks on these nodes."""
        self.places[life] = nodes

    def began(self, life: int, generation: int, parent: tuple[int, int]) -> None:
        """Record the `parent` (generation, version) of a run; version 0 is a fresh start."""
        made_by = self._history.get(parent[0], 0)
        self.parents[life] = (made_by, parent[1]) if parent[1] else None
        self._history[generation] = life

    def heard(self, life: int, rank: int, event: str, level: str, version: int, said: str) -> None:
        """Record that a rank received an event about a version."""
        moment = (life, version)
        if event == "sealed":
            self._sealed[moment].add(rank)
        elif event == "committed" and level == "local":
            self._local[moment].add(rank)
        elif event == "committed" and level == "peer":
            self._parity[moment].add(self.places[life][rank])
        elif event == "committed" and level == "persistent" and said == "complete":
            self._flushed.add(moment)

    # --- faults --------------------------------------------------------------------------------

    def lost(self, level: str, node: int) -> None:
        """Record the loss of all that the node has on `memory`, or on `local`, parity included."""
        for moment in {*self._sealed, *self._local, *self._parity}:
            there = self.places[moment[0]]
            for rank in (rank for rank in EVERYBODY if there[rank] == node):
                self._gone.add((level, moment, rank))
                if level == "local":
                    self._gone.add(("parity", moment, rank))

    def damaged(self, level: str, rank: int, generation: int, version: int) -> None:
        """Record a wrong bit or missing end of one copy. Copies made from it count for nothing."""
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

    # --- conclusions ---------------------------------------------------------------------------

    def promised(self) -> int:
        """The oldest version from which the next run may continue; 0: a fresh start is right."""
        return max(self.owed().values())

    def owed(self) -> dict[str, int]:
        """The newest certain version, or 0, by place (`disks`: local files, and parity)."""
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
        """The newest run and its ancestors; each with the newest version that counts."""
        life = max(self.parents, default=0)
        line: dict[int, float] = {life: float("inf")}
        while parent := self.parents.get(life):
            life, limit = parent
            line[life] = limit
        return line

    def _on_line(self, moments: set[Moment]) -> list[Moment]:
        """Versions without the one from which a run started: its repair is no version of the run
        itself, and nothing more is owed for it."""
        line = self._line()
        return sorted(
            m for m in moments if m[0] in line and self._began_at(m[0]) < m[1] <= line[m[0]]
        )

    def _began_at(self, life: int) -> int:
        parent = self.parents.get(life)
        return parent[1] if parent else 0

    def _from_memory(self) -> list[Moment]:
        """A version sealed by all is overwritten only when all have sealed a newer one.

        All may have, without a report so far; so nothing is owed once a newer version was damaged.
        """
        whole = {m for m, ranks in self._sealed.items() if ranks == EVERYBODY}
        newest = max((m for m in whole if m[0] in self._line()), default=None)
        if newest is None or not self._on_line({newest}):
            return []
        newer = [m for level, m in self._hit if level == "memory" and m > newest]
        there = all(self._intact("memory", newest, rank) for rank in EVERYBODY)
        return [newest] if there and not newer else []

    def _from_disks(self) -> list[Moment]:
        """The newest complete versions, and the newest protected one, from files and parity.

        A newer version may have been protected without reports of all: it replaced the older one
        then. It is as good, unless it was damaged.
        """
        complete = {m for m, ranks in self._local.items() if ranks == EVERYBODY}
        everywhere = {*self.shape.nodes}
        protected = {m for m, nodes in self._parity.items() if nodes == everywhere}
        hit = {moment for level, moment in self._hit if level in ("local", "parity")}
        newest = sorted({*self._on_line(protected), *hit})[-1:]
        kept = {*self._kept("local", complete), *protected.intersection(newest)}
        return [moment for moment in kept if self._can_be_made(moment)]

    def _can_be_made(self, moment: Moment) -> bool:
        """True if the files that certainly exist suffice; a node that lacks one lacks all."""
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
        """Versions that retention leaves. Damaged ones may have been complete, too, and counted;
        also those off the line, if an agent of a previous run was stopped and finished later."""
        hit = {moment for at, moment in self._hit if at == level}
        counted = sorted({*self._on_line(complete), *hit})
        return [moment for moment in counted[-self.keep_last :] if moment in complete]

    def _intact(self, level: str, moment: Moment, rank: int) -> bool:
        return (level, moment, rank) not in self._gone
