"""The version that a restart would take, before there is a model: `tierckpt.latest`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tierckpt._text import some
from tierckpt.coordination.proof_order import order_here
from tierckpt.errors import RestoreError

from .catalog import rows_of
from .survey import MissingPathError, Survey, Where, survey


@dataclass(frozen=True)
class Latest:
    """A version, as its manifests describe it. As an index, `iteration`."""

    version: int
    """Completed optimizer steps."""
    iteration: int
    """What `restore()` would return."""
    metric: float | None
    """What was measured of it, see `Checkpointer.step`."""
    ranks: int
    """That took it, a shard each."""
    levels: tuple[str, ...]
    """Where a restart would take it from, cheapest first."""

    def __index__(self) -> int:
        return self.iteration

    __int__ = __index__


def latest(path: Where | Sequence[Where]) -> Latest | None:
    """The newest complete version that a restart from here finds; None where a job would start
    afresh, as nothing is there.

    For what a script has to know before it makes model and optimizer: the stage of a curriculum,
    the size of a grown model, the position in a stream of data. Reads manifests alone, so damage
    that only `restore()` finds can make that go on from an older version: compare what it returns.
    Not collective. Each process sees what its node sees: where nodes have disks of their own, ask
    after `restore()`, or give the `persistent_path` along.

    Args:
        path: as for `tierckpt.load`.

    Raises RestoreError where something is there that no restart from here can take, or that cannot
    be looked at: this is no fresh start.
    """
    given = [path] if isinstance(path, str | os.PathLike) else path
    order = order_here()
    places = [order.place_of(str(each)) if order else each for each in given]
    try:
        there = survey(places)
    except MissingPathError:
        if not (found := [each for each in places if _is_there(each)]):
            return None
        there = survey(found)
    shown = some([*map(str, given)])
    _refuse_unseen(there, shown)
    taken = [row for row in rows_of(there) if row.next]
    if not taken:
        if not there.copies:
            return None
        versions = some([f"v{v}" for v in sorted({c.key.id.version for c in there.copies})[-8:]])
        raise RestoreError(
            f"{shown}: there are shards of {versions}, and no version is complete here",
            "A restart needs the other nodes, or levels. Give their paths along, or ask restore()",
        )
    iteration = next((row.iteration for row in taken if row.iteration is not None), None)
    if iteration is None:
        raise RestoreError(f"{shown}: v{taken[0].version} was retired while it was looked at")
    return Latest(
        version=taken[0].version,
        iteration=iteration,
        metric=next((row.metric for row in taken if row.metric is not None), None),
        ranks=taken[0].shards,
        levels=tuple(row.level for row in taken),
    )


def _is_there(place: Where) -> bool:
    """False for a directory that nobody made yet, with nothing of its job in memory."""
    try:
        survey(place)
    except MissingPathError:
        return False
    return True


def _refuse_unseen(there: Survey, shown: str) -> None:
    newer = [each for each in there.problems if each.newer]
    if newer:
        raise RestoreError(
            f"{shown}: a newer tierckpt was here: {newer[0].place.where}: {newer[0].why}",
            "Use that one, or another path",
        )
    if there.unseen:
        why = some([f"{each.place.where}: {each.why}" for each in there.unseen], 4)
        raise RestoreError(f"{shown}: not all could be looked at: {why}", "Put that right")


__all__ = ["Latest", "latest"]
