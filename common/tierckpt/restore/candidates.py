"""Copies that a restore may still use, and the plan made from them.

Pure, and the same on all ranks: every rank knows all found and all rejected copies.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TypeVar

from tierckpt.core.copies import Found, FoundParity, Location, distinct
from tierckpt.core.restore_plan import RestorePlan, plan_restore
from tierckpt.errors import RestoreError
from tierckpt.format.ids import NO_RUN, ShardKey, VersionId

from .shard_reader import Failure, FaultScope

ENOUGH_IN_VAIN = 2
"""Number of ranks that must fail to reach an agent before no rank asks it. A single rank may be cut
off by itself."""

C = TypeVar("C", Found, FoundParity)
RankFailures = list[tuple[int, Failure]]
"""Failures, each with the rank that had it."""


class Candidates:
    """Copies by rank, without those that proved bad. One thread."""

    def __init__(
        self,
        found: Sequence[Sequence[Found]],
        parities: Sequence[Sequence[FoundParity]] = (),
        nodes: Sequence[str] = (),
        on_reject: Callable[[str], None] = lambda text: None,
        began: tuple[int, int] = NO_RUN,
        abandoned: bool = False,
    ) -> None:
        """`found` and `parities` are those of every rank. `nodes` has the node name of every rank;
        without it each rank counts as a node of its own. `on_reject` receives the reason for each
        rejected copy. `began` and `abandoned`: see `plan_restore`."""
        self._began, self._abandoned = began, abandoned
        self.found, self.parities, self._nodes = found, parities, nodes
        self._on_reject = on_reject
        self.rejected: list[str] = []
        """Descriptions of the copies that exist and cannot be used, with the reason."""
        self.bad: set[tuple[ShardKey, Location]] = set()
        """Copies that no rank may read any more."""
        self._unreachable: set[tuple[ShardKey, Location, int]] = set()
        """Copies that one rank could not reach, with that rank."""
        self._silent: dict[str, set[int]] = {}
        """By the name of an agent's location: the ranks that got no answer from the agent."""
        self._undecodable: dict[VersionId, str] = {}
        """Versions that cannot be decoded only because a key or a codec is missing here, with the
        reason."""
        self._readers: dict[tuple[ShardKey, Location], int] = {}
        """The rank that holds each copy fetched in the last attempt."""

    def plan(
        self, version: int | None = None, avoid: Container[VersionId] = ()
    ) -> RestorePlan | None:
        """Plan for the newest version, or for `version`, that is not in `avoid`: see
        `plan_restore`.

        Raises RestoreError if a newer version exists that cannot be decoded only because a key or a
        codec is missing: going back to an older version would let retention remove the newer one.
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
            self._began,
            self._abandoned,
        )
        if self._undecodable and (plan is None or plan.id not in self._undecodable):
            newest = max(self._undecodable)
            raise RestoreError(
                f"{newest} exists and cannot be decoded. {self._undecodable[newest]}. Nothing "
                "was changed, and no older version was taken instead",
                "Correct this and restart. If it is lost for good: restore(version=...) goes "
                f"back to an older version; another path, or moving away what is left of {newest}, "
                "starts without it",
            )
        return plan

    def look(
        self, found: Sequence[Sequence[Found]], parities: Sequence[Sequence[FoundParity]]
    ) -> None:
        """Replace the inventory; rejected copies stay rejected."""
        self.found, self.parities = found, parities

    def still_there(self, failures: RankFailures) -> RankFailures:
        """The failures without those of copies that had disappeared and are also not in the last
        inventory."""
        there = {(f.key, f.place) for each in distinct(self.found) for f in each}
        there |= {(p.key, p.place) for each in distinct(self.parities) for p in each}
        return [(r, f) for r, f in failures if not f.gone or (f.key, f.place) in there]

    def keep_readers(self, plan: RestorePlan) -> None:
        """Keep the readers of fetched copies for the next plan, so that nothing is fetched twice,
        even if another rank then has less to read."""
        shards = len(plan.sources)
        self._readers = {
            (ShardKey(plan.id, s.shard, shards), s.place): s.reader
            for s in plan.sources
            if not (s.rebuilt or s.place.mappable)
        }

    def reject(self, failures: RankFailures) -> None:
        """Exclude failed copies from later plans: a damaged copy on all ranks, an unreachable copy
        on the rank that could not reach it, and everything an agent has if the agent does not
        answer."""
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
            elif place.where not in self._silent:  # once for each agent
                self.note(f"{each.why}{by}")
            if each.silent:
                self._silent.setdefault(place.where, set()).add(rank)
            if each.undecodable:
                self._undecodable.setdefault(key.id, text)
        if out := self.left_out:  # otherwise every rank would wait for them again
            self.look(_without(self.found, out), _without(self.parities, out))

    def note(self, text: str) -> None:
        """Record that a copy, or something else that was found, was rejected."""
        self.rejected.append(text)
        self._on_reject(text)

    @property
    def left_out(self) -> set[str]:
        """Agents that no rank asks any more, by the name of their locations."""
        enough = min(ENOUGH_IN_VAIN, len(self.found))
        return {where for where, ranks in self._silent.items() if len(ranks) >= enough}


def _without(copies: Sequence[Sequence[C]], out: Container[str]) -> list[list[C]]:
    left = {
        id(each): [copy for copy in each if copy.place.where not in out]
        for each in distinct(copies)
    }
    return [left[id(each)] for each in copies]


__all__ = ["Candidates", "RankFailures"]
