"""Votes: what a rank says at a boundary, as numbers that one reduction combines."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from tierckpt.core.tuning.autotune import CostEstimate

from .halt_conditions import Reason
from .ledger import DONE

NO_METRIC = (1 << 63) - 1
"""As the bits of a float: not a number. No vote is larger, so rank 0's is the minimum of all."""


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


VOID = -1
"""An adapter's vote (see `Adapter.vote`) where there is no version of this boundary on
its rank, hence on none: the next one is due in its place."""


@dataclass(frozen=True)
class Vote:
    """One rank's vector; also, after the reduction, what all agreed on. Minimum is `and`."""

    slot_free: int = 1
    """This rank will have a slot for another version at the next boundary."""
    local_free: int = 1
    """This rank's local level can take another version."""
    memory_state: int = DONE
    """State of the oldest version whose seal is not known everywhere yet."""
    local_state: int = DONE
    """State of the oldest version whose commit is not known everywhere yet."""
    memory_time_left: int = 1
    """0 when this rank's clock says that a time-based version is due."""
    local_time_left: int = 1
    no_request: int = 1
    """0 when this rank's user asked for a checkpoint."""
    persistent_time_left: int = 1
    peer_state: int = DONE
    """State of the oldest version whose protection by peers is not known everywhere yet."""
    flush_state: int = DONE
    """Of the oldest version that some node may still be flushing: DONE when this one is through
    with it, whatever came of it."""
    less_bytes: int = 0
    """Of the version that `local_state` is about: the size of this rank's shard, negative, so that
    the minimum tells the largest."""
    metric: int = NO_METRIC
    """Of the same version: what rank 0's user measured, see `as_vote`; NO_METRIC from all
    others, so that the minimum tells rank 0's."""
    halt: int = Reason.NONE
    """Why this rank wants the job to end early, a `Reason`: NONE is the largest. A wish to end is
    a request for a checkpoint, too."""
    unattended: int = 0
    """1 when this rank's script has evidently never asked whether the job is to end."""
    less_step_us: int = 0
    """This and the next five: `autotune.CostEstimate` of this rank, negative as `less_bytes` is."""
    less_memory_us: int = 0
    less_local_us: int = 0
    less_local_steps: int = 0
    less_persistent_us: int = 0
    less_persistent_steps: int = 0
    adapter: int = 0
    """The adapter's, see `Adapter.vote`."""
    no_close: int = 1
    """0 when this rank's user called `close()` where it could not be done."""
    check: int = 0
    """This and the next one: the digest of what was looked at at the boundary before, see
    `replica_check.as_vote`."""
    check_complement: int = 0
    place: int = 0
    """This and the next one: at which iteration this rank is, in the same way."""
    place_complement: int = -1
    unchanged: int = 0
    """So many of this rank's newest versions are, in what is striped, those before them."""

    def pack(self) -> list[int]:
        """As the vector to be reduced."""
        return [
            self.slot_free,
            self.local_free,
            # BROKEN must win over PENDING, PENDING over DONE: -1 < 0 < 1 does just that.
            self.memory_state,
            self.local_state,
            self.memory_time_left,
            self.local_time_left,
            self.no_request,
            self.persistent_time_left,
            self.peer_state,
            self.flush_state,
            self.less_bytes,
            self.metric,
            int(self.halt),
            self.unattended,
            self.less_step_us,
            self.less_memory_us,
            self.less_local_us,
            self.less_local_steps,
            self.less_persistent_us,
            self.less_persistent_steps,
            self.adapter,
            self.no_close,
            self.check,
            self.check_complement,
            self.place,
            self.place_complement,
            self.unchanged,
        ]

    @staticmethod
    def unpack(values: list[int]) -> Vote:
        """The inverse of `pack`."""
        return Vote(*values)

    @property
    def apart(self) -> bool:
        """After the reduction: ranks were not in the same iteration."""
        return self.place != ~self.place_complement

    @property
    def figures(self) -> CostEstimate:
        """The largest of all ranks, each."""
        return CostEstimate(
            -self.less_step_us,
            -self.less_memory_us,
            -self.less_local_us,
            -self.less_local_steps,
            -self.less_persistent_us,
            -self.less_persistent_steps,
        )


VOTE_WIDTH = len(Vote().pack())


__all__ = ["NO_METRIC", "VOID", "VOTE_WIDTH", "Vote", "as_vote", "of_vote"]
