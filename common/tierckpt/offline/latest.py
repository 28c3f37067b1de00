"""The version that a restart takes, found without a model: `tierckpt.latest`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tierckpt._text import some
from tierckpt.coordination.proof_order import order_here
from tierckpt.errors import RestoreError

from .catalog import rows_of
from .folders import MissingPathError
from .jobs import refuse_several_jobs
from .survey import Survey, Where, survey


@dataclass(frozen=True)
class Latest:
    """A version as its manifests describe it. As an index it is `iteration`."""

    version: int
    """Completed optimizer steps."""
    iteration: int
    """The number that `restore()` would return."""
    metric: float | None
    """The metric of this version, see `Checkpointer.step`."""
    ranks: int
    """Number of ranks that took it, one shard each."""
    levels: tuple[str, ...]
    """The levels that a restart would read, cheapest first."""

    def __index__(self) -> int:
        return self.iteration

    __int__ = __index__


def latest(path: Where | Sequence[Where]) -> Latest | None:
    """The newest complete version that a restart from here finds; None if there is none, so that a
    job would start from scratch.

    For a script that must know the version before it makes model and optimizer: the stage of a
    curriculum, the size of a grown model, the position in a data stream. Only manifests are read.
    If `restore()` then finds damage, it uses an older version: compare its result. Not collective.
    Each process sees the files that its node sees: if each node has its own disk, call this after
    `restore()`, or add the `persistent_path`.

    Args:
        path: as for `tierckpt.load`.

    Raises RestoreError if there are files that no restart from here can take, or that cannot be
    read: this is not a fresh start; ConfigError for places of several jobs.
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
    refuse_several_jobs(there, shown)
    taken = [row for row in rows_of(there) if row.next]
    if not taken:
        if not there.copies:
            return None
        versions = some([f"v{v}" for v in sorted({c.key.id.version for c in there.copies})[-8:]])
        raise RestoreError(
            f"{shown}: there are shards of {versions}, but no version is complete here",
            "A restart needs the other nodes or levels. Add their paths, or call restore()",
        )
    iteration = next((row.iteration for row in taken if row.iteration is not None), None)
    if iteration is None:
        raise RestoreError(f"{shown}: v{taken[0].version} was retired while it was read")
    return Latest(
        version=taken[0].version,
        iteration=iteration,
        metric=next((row.metric for row in taken if row.metric is not None), None),
        ranks=taken[0].shards,
        levels=tuple(row.level for row in taken),
    )


def _is_there(place: Where) -> bool:
    """False for a directory that does not exist yet, if its job has nothing in memory."""
    try:
        survey(place)
    except MissingPathError:
        return False
    return True


def _refuse_unseen(there: Survey, shown: str) -> None:
    newer = [each for each in there.problems if each.newer]
    if newer:
        raise RestoreError(
            f"{shown}: a newer release of tierckpt wrote {newer[0].place.where}: {newer[0].why}",
            "Use that release, or another path",
        )
    if there.unseen:
        why = some([f"{each.place.where}: {each.why}" for each in there.unseen], 4)
        text = f"{shown}: not all places could be read: {why}"
        raise RestoreError(text, "Make them readable, and try again")


__all__ = ["Latest", "latest"]
