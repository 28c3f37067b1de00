"""Which versions are best, by a number that the user gives at boundaries (keep-best).

The number is rank 0's: ranks must keep the same versions, and what they measure differs. It goes
into the manifest of rank 0's shard, and along with the ballot to the other ranks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from tierckpt.format.ids import VersionId, newest_of_each

if TYPE_CHECKING:
    from tierckpt.format.version_names import VersionName

NO_METRIC = (1 << 63) - 1
"""As the bits of a float: not a number. No vote is larger, so rank 0's is the minimum of all."""

Version = TypeVar("Version", VersionId, "VersionName")


def as_vote(metric: float | None) -> int:
    """For the ballot: the metric's bits, or NO_METRIC."""
    if metric is None or not math.isfinite(metric):
        return NO_METRIC
    (bits,) = struct.unpack("<q", struct.pack("<d", metric))
    return int(bits)


def of_vote(bits: int) -> float | None:
    """The inverse of `as_vote`, after the reduction, if rank 0 alone gave one."""
    (metric,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(metric) if math.isfinite(metric) else None


def best_of(metrics: Mapping[Version, float], count: int, lowest: bool) -> set[Version]:
    """The `count` best; of equals the newer one is the better one. What is no number is not best.

    Pure.
    """
    known = sorted((v for v, m in metrics.items() if math.isfinite(m)), reverse=True)
    sign = 1.0 if lowest else -1.0
    return set(sorted(known, key=lambda version: sign * metrics[version])[: max(count, 0)])


class Best:
    """The best complete versions of one level; alike on all ranks. One thread."""

    def __init__(self, count: int, lowest: bool) -> None:
        self._count, self._lowest = count, lowest
        self._metrics: dict[VersionId, float] = {}

    def restart(self, metrics: Mapping[VersionId, float]) -> None:
        """Begin with the versions that an earlier life left."""
        self._metrics = dict(metrics)
        self._forget()

    def add(self, version: VersionId, metric: float | None) -> None:
        """A version is complete on all ranks."""
        if metric is not None:
            self._metrics[version] = metric
            self._forget()

    @property
    def versions(self) -> set[VersionId]:
        """Those that must stay."""
        return set(self._metrics)

    def _forget(self) -> None:
        """What is not among the best now never will be."""
        each = newest_of_each(self._metrics)
        metrics = {v: m for v, m in self._metrics.items() if v in each}
        best = best_of(metrics, self._count, self._lowest)
        self._metrics = {version: self._metrics[version] for version in best}
