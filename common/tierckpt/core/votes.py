"""Votes: one rank's numbers at a boundary, which one reduction combines."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain, compress, count
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from tierckpt.core.tuning.autotune import Cost, CostEstimate

from .halt_conditions import NEVER_SECONDS, Reason
from .ledger import DONE
from .levels import LEDGERS, Facts, Level

NO_METRIC = (1 << 63) - 1
"""As the bits of a float: not a number. No vote is larger, so rank 0's is the minimum of all."""


def as_vote(metric: float | None) -> int:
    """Return the metric's bits for the ballot, or NO_METRIC."""
    if metric is None or not math.isfinite(metric):
        return NO_METRIC
    (bits,) = struct.unpack("<q", struct.pack("<d", metric))
    return int(bits)


def of_vote(bits: int) -> float | None:
    """Return the metric of the reduced bits, if rank 0 alone gave one; inverse of `as_vote`."""
    (metric,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(metric) if math.isfinite(metric) else None


VOID = -1
"""An adapter's vote (see `Adapter.vote`) where this boundary has no version on its rank, hence on
no rank: the next boundary's version is due in its place."""


class LevelVote(NamedTuple):
    """One rank's vote about one level."""

    state: int = DONE
    """State of the oldest version whose outcome on this level is not known to all ranks. BROKEN <
    PENDING < DONE, so the minimum is the state that holds for all ranks."""
    free: int = 1
    """1 when this rank's level can take another version; of memory: at the next boundary."""
    time_left: int = 1
    """0 when a time-based version is due by this rank's clock."""
    less_us: int = 0
    """This and the next field: `autotune.Cost` on this rank, negative, so that the minimum is the
    largest cost."""
    less_steps: int = 0


def _fields_of(facts: Facts) -> tuple[bool, ...]:
    """Return for each field of `LevelVote` whether ranks vote on it; if not, it is the default."""
    interval = facts.interval
    timed, lasting = interval is not None, interval is not None and interval.lasting
    return True, bool(facts.busy), timed, timed, lasting


_SILENT = LevelVote()
_CAST = [cast for level in LEDGERS for cast in _fields_of(level.facts)]
_ROWS = [(level, n * len(_SILENT), (n + 1) * len(_SILENT)) for n, level in enumerate(LEDGERS)]


def _positions() -> Iterator[int]:
    """Yield the index of each field of each level in a vector that is followed by the defaults."""
    cast = count()
    for number, is_cast in enumerate(_CAST):
        yield next(cast) if is_cast else number % len(_SILENT) - len(_SILENT)


_pick = itemgetter(*_positions())
_OTHERS = sum(_CAST)
"""Index of the first number that is about no level."""
SILENT: Mapping[Level, LevelVote] = MappingProxyType(dict.fromkeys(LEDGERS, _SILENT))
"""The vote about each level of a rank with nothing to report."""
_CAST_SILENT = [*compress(chain.from_iterable(SILENT.values()), _CAST)]


@lru_cache(maxsize=64)  # most votes are about the levels as the votes before are
def _levels_of(cast: tuple[int, ...]) -> Mapping[Level, LevelVote]:
    """Return the vote about each level by the numbers before `_OTHERS`."""
    fields, make = _pick([*cast, *_SILENT]), tuple.__new__
    return MappingProxyType(
        {level: make(LevelVote, fields[begin:end]) for level, begin, end in _ROWS}
    )


class Vote(NamedTuple):
    """One rank's vector; after the reduction, the agreement of all. A minimum acts as `and`."""

    levels: Mapping[Level, LevelVote] = SILENT
    """The vote about each level, in the order of `LEDGERS`."""
    no_request: int = 1
    """0 when this rank's user asked for a checkpoint."""
    less_bytes: int = 0
    """Size of this rank's shard of the version that the local level's state is about, negative, so
    that the minimum is the largest."""
    metric: int = NO_METRIC
    """Metric of the same version: the value of rank 0's user, see `as_vote`; NO_METRIC from all
    other ranks, so that the minimum is rank 0's."""
    halt: int = Reason.NONE
    """A `Reason` why this rank wants the job to stop early; NONE is the largest. Such a wish also
    requests a checkpoint."""
    unattended: int = 0
    """1 when this rank's script has evidently never asked whether the job should stop."""
    halt_seconds: int = NEVER_SECONDS
    """Seconds until the cloud takes this rank's node away, see `HaltVote`."""
    less_step_us: int = 0
    """Duration of a step, from `autotune.CostEstimate`, negative as `less_bytes` is."""
    adapter: int = 0
    """The adapter's vote, see `Adapter.vote`."""
    no_close: int = 1
    """0 when this rank's user called `close()` at a point where it could not be done."""
    check: int = 0
    """This and the next field: the digest of the slice hashed at the previous boundary, see
    `replica_check.as_vote`."""
    check_complement: int = 0
    place: int = 0
    """This and the next field: this rank's iteration, in the same way."""
    place_complement: int = -1
    unchanged: int = 0
    """Number of this rank's newest versions whose striped state equals the version before them."""

    def pack(self) -> list[int]:
        """Return the vector to be reduced."""
        cast = compress(chain.from_iterable(self.levels.values()), _CAST)
        return [
            *(_CAST_SILENT if self.levels is SILENT else cast),
            self.no_request,
            self.less_bytes,
            self.metric,
            int(self.halt),
            self.unattended,
            self.halt_seconds,
            self.less_step_us,
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
        """Read the vector that `pack` made."""
        levels = _levels_of(tuple(values[:_OTHERS]))
        return tuple.__new__(Vote, (levels, *values[_OTHERS:]))  # as `_make`, which is slower

    @property
    def apart(self) -> bool:
        """True after the reduction when ranks were not in the same iteration."""
        return self.place != ~self.place_complement

    @property
    def figures(self) -> CostEstimate:
        """The largest costs over all ranks."""
        costs = {level: Cost(-v.less_us, -v.less_steps) for level, v in self.levels.items()}
        return CostEstimate(-self.less_step_us, costs)


VOTE_WIDTH = len(Vote().pack())


__all__ = ["NO_METRIC", "SILENT", "VOID", "VOTE_WIDTH", "LevelVote", "Vote", "as_vote", "of_vote"]
