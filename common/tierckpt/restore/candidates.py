"""The copies that a restore may still take, and the plan that follows from them.

Pure, and alike on all ranks: each knows what all found and what all rejected, and plans alike.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeVar

from tierckpt.core.copies import Found, FoundParity, Location
from tierckpt.core.restore_plan import RestorePlan, plan_restore
from tierckpt.errors import RestoreError
from tierckpt.format.ids import ShardKey, VersionId

from .shard_reader import Failure, FaultScope

ENOUGH_IN_VAIN = 2
"""Ranks that asked an agent; one of them may be cut off from it alone."""

C = TypeVar("C", Found, FoundParity)
RankFailures = list[tuple[int, Failure]]
"""With the rank that each happened to."""


class Candidates:
    """Copies by rank, without those that proved bad. One thread."""

    def __init__(
        self,
        found: Sequence[Sequence[Found]],
        parities: Sequence[Sequence[FoundParity]] = (),
        nodes: Sequence[str] = (),
        on_reject: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`found` and `parities` are every rank's, and `nodes` names every rank's node; without it
        each rank is on one of its own. `on_reject` receives why, for each copy that is rejected."""
        self.found, self.parities, self._nodes = found, parities, nodes
        self._on_reject = on_reject
        self.rejected: list[str] = []
        """Copies that were there and cannot be used, and why."""
        self.bad: set[tuple[ShardKey, Location]] = set()
        """Copies that no rank is to read any more."""
        self._unreachable: set[tuple[ShardKey, Location, int]] = set()
        """With the rank that could not get at it."""
        self._silent: dict[str, set[int]] = {}
        """By the name of an agent's places: the ranks that got no answer from it."""
        self._undecodable: dict[VersionId, str] = {}
        """Versions that lack only a key or a module here, and which."""
        self._readers: dict[tuple[ShardKey, Location], int] = {}
        """The ranks that hold what was fetched at the last try."""

    def plan(
        self, version: int | None = None, avoid: Container[VersionId] = ()
    ) -> RestorePlan | None:
        """The newest version, or `version`, that is none of `avoid`: see `plan_restore`.

        Raises RestoreError where a newer one is there and cannot be decoded for want of a key or a
        module: to go back to an older one would be the beginning of the end of the newer one.
        """
        plan = plan_restore(
            self.found,
            frozenset(self.bad),
            version,
            self.parities,
            self._readers,
            frozenset(self._unreachable),
            self._nodes,
            avoid,
        )
        if self._undecodable and (plan is None or plan.id not in self._undecodable):
            newest = max(self._undecodable)
            raise RestoreError(
                f"{newest} is there and cannot be decoded. {self._undecodable[newest]}. Nothing "
                "was changed, and nothing older was taken in its place",
                "Put that right and start again. If it is gone for good: restore(version=...) goes "
                f"back to an older version; another path, or moving away what is left of {newest}, "
                "starts without it",
            )
        return plan

    def look(
        self, found: Sequence[Sequence[Found]], parities: Sequence[Sequence[FoundParity]]
    ) -> None:
        """Stock was taken anew; what was rejected stays rejected."""
        self.found, self.parities = found, parities

    def still_there(self, failures: RankFailures) -> RankFailures:
        """Without copies that were gone, and that the last look did not find either."""
        there = {(f.key, f.place) for each in self.found for f in each}
        there |= {(p.key, p.place) for each in self.parities for p in each}
        return [(r, f) for r, f in failures if not f.gone or (f.key, f.place) in there]

    def keep_readers(self, plan: RestorePlan) -> None:
        """The next plan leaves what is fetched with its readers of this one: nothing is fetched
        twice, whichever rank has less to read then."""
        shards = len(plan.sources)
        self._readers = {
            (ShardKey(plan.id, s.shard, shards), s.place): s.reader
            for s in plan.sources
            if not (s.rebuilt or s.place.mappable)
        }

    def reject(self, failures: RankFailures) -> None:
        """Plan without a damaged copy on any rank; without one that a rank could not get at on
        that rank; and on any without all that an agent has which does not answer."""
        for rank, each in sorted(failures, key=lambda f: f[1].blame is FaultScope.SIGHT):
            key, place = each.key, each.place
            if (key, place) in self.bad:
                continue
            if each.blame is FaultScope.SIGHT:
                self._unreachable.add((key, place, rank))
            else:
                self.bad.add((key, place))
            by = f" (as rank {rank} found, on node {each.node})" if len(self.found) > 1 else ""
            text = f"{key} on level {place.level} ({place.where}): {each.why}{by}"
            if not each.silent:
                self.note(text)
            elif place.where not in self._silent:  # once, whatever it has, and whoever asks
                self.note(f"{each.why}{by}")
            if each.silent:
                self._silent.setdefault(place.where, set()).add(rank)
            if each.undecodable:
                self._undecodable.setdefault(key.id, text)
        if out := self.left_out:  # or each rank would wait for them anew
            self.look(_without(self.found, out), _without(self.parities, out))

    def note(self, text: str) -> None:
        """A copy was rejected, or something that was found."""
        self.rejected.append(text)
        self._on_reject(text)

    @property
    def left_out(self) -> set[str]:
        """Agents that no rank is to ask any more, by the name of their places."""
        enough = min(ENOUGH_IN_VAIN, len(self.found))
        return {where for where, ranks in self._silent.items() if len(ranks) >= enough}


def _without(copies: Iterable[Iterable[C]], out: Container[str]) -> list[list[C]]:
    return [[copy for copy in each if copy.place.where not in out] for each in copies]


__all__ = ["Candidates", "RankFailures"]
