"""Facts of a version: all that a run knows before a byte is written, the same on every level.

The facts are taken at the boundary, travel with the snapshot, and are stored in the manifest of
every shard, in the manifest of parity, and in the version's record on the persistent level. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .ids import Lineage, ShardKey, VersionId
from .version_names import VersionName

ITERATION_COUNTS = ("calls", "steps")


@dataclass(frozen=True)
class VersionFacts:
    """The facts of one version; equal on all ranks, except `metric`."""

    job: str
    run_id: str
    """Random name of the job's run, the same on all ranks: generations alone can meet again when
    runs did not see each other's nodes."""
    id: VersionId
    """The run's generation, and the number of completed optimizer steps."""
    shards: int
    """Number of the job's ranks."""
    lineage: Lineage
    """This generation and its ancestors, and the versions they started from."""
    iteration: int
    """The number that `restore()` returns; `iteration_counts` is its unit."""
    iteration_counts: str
    """`calls` of `step()` by the user's loop, or optimizer `steps`, where the loop calls no
    boundaries."""
    metric: float | None = None
    """The user's measure at the boundary, a finite number; known to rank 0 alone, and to all when
    the version is complete."""
    complete: VersionId | None = None
    """The newest version that was known to be on all ranks' disks when this one was taken."""
    suspect: str = ""
    """The difference between replicas, in words, that was known when this version was taken."""

    @property
    def name(self) -> VersionName:
        """The version's name on the persistent level."""
        return VersionName(self.id, self.shards, self.run_id)

    def key(self, shard: int) -> ShardKey:
        """The name of one of the version's shards."""
        return ShardKey(self.id, shard, self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a record, with the names of FORMAT.md."""
        values: dict[str, Any] = {
            "job": self.job,
            "run_id": self.run_id,
            "version": self.id.version,
            "generation": self.id.generation,
            "shards": self.shards,
            "lineage": self.lineage,
            "iteration": self.iteration,
            "iteration_counts": self.iteration_counts,
        }
        if self.metric is not None and math.isfinite(self.metric):
            values["metric"] = self.metric
        if self.complete is not None:
            values["complete"] = (self.complete.generation, self.complete.version)
        if self.suspect:
            values["suspect"] = self.suspect
        return values

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> VersionFacts:
        """Read the fields that `to_json` made; ignore others. Raises KeyError, ValueError or
        TypeError if they are not a record of a version."""
        metric, complete = values.get("metric"), values.get("complete")
        if values["iteration_counts"] not in ITERATION_COUNTS:
            raise ValueError(f"iteration_counts is {values['iteration_counts']!r}")
        return VersionFacts(
            job=str(values["job"]),
            run_id=str(values["run_id"]),
            id=VersionId(int(values["generation"]), int(values["version"])),
            shards=int(values["shards"]),
            lineage=tuple((int(g), int(v)) for g, v in values["lineage"]),
            iteration=int(values["iteration"]),
            iteration_counts=values["iteration_counts"],
            metric=None if metric is None else float(metric),
            complete=None if complete is None else VersionId(*map(int, complete)),
            suspect=str(values.get("suspect", "")),
        )


__all__ = ["ITERATION_COUNTS", "VersionFacts"]
