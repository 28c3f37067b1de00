"""Decisions at a boundary: votes, the levels that each version goes to, and when a job stops.

Pure. The agreement is one small vector of integers per rank, min-reduced over all ranks while the
next iteration computes, and read at the next boundary. Each decision is a function of such vectors
and of the version, so all ranks take, skip and forget the same versions without waiting for each
other.

`HaltRequest` says when a job is asked to take a last checkpoint and stop.

`StallTimeout` says how long a job waits for work elsewhere. A slow store is waited for as long as
it accepts bytes. A store that hangs is not: a job must come to its end. The agent reports since
when its flushes have made no progress. An agent that does not answer counts as making no progress.
"""

from __future__ import annotations

import enum
import json
import math
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain, compress, count
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from tierckpt._text import error_text
from tierckpt.config import AUTO, Config, Steps
from tierckpt.errors import FormatError

from .levels import (
    DONE,
    INTERVALS,
    LEDGERS,
    LOCAL,
    MEMORY,
    Cost,
    CostEstimate,
    Facts,
    Level,
)

if TYPE_CHECKING:
    from .tuning import Change, Tuner

__all__ = [
    "FORMAT_VERSION",
    "KIND",
    "LAST_SECONDS",
    "NEVER_SECONDS",
    "NO_HALT",
    "NO_METRIC",
    "PLACES",
    "SILENT",
    "VOID",
    "VOTE_WIDTH",
    "HaltRequest",
    "HaltVote",
    "LevelVote",
    "Reason",
    "StallTimeout",
    "Vote",
    "as_vote",
    "most_quiet_seconds",
    "of_vote",
]


KIND = "tierckpt-halt"
FORMAT_VERSION = 1
LAST_SECONDS = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""The latest Unix time with a valid date in every time zone."""

NEVER_SECONDS = 1 << 31
"""Stands for seconds until an unannounced end; larger than all others."""


class Reason(enum.IntEnum):
    """Why a job stops early. The smallest of several counts, so ranks agree by a minimum."""

    SIGNAL = 0
    PREEMPTION = 1
    NOW = 2
    TIME = 3
    VERSION = 4
    ALLOCATION = 5
    NONE = 9

    @property
    def is_interruption(self) -> bool:
        """True when a signal, a preemption or the end of the allocation interrupts the job, not a
        request."""
        return self in (Reason.SIGNAL, Reason.PREEMPTION, Reason.ALLOCATION)

    def text(self) -> str:
        """The reason, as text."""
        return {
            Reason.SIGNAL: "a rank received a signal to stop",
            Reason.PREEMPTION: "the cloud takes a node away",
            Reason.NOW: "a halt was requested",
            Reason.TIME: "the requested time has come",
            Reason.ALLOCATION: "its allocation ends",
            Reason.VERSION: "it has taken the version after which a halt was requested",
            Reason.NONE: "",
        }[self]


class HaltVote(NamedTuple):
    """One rank's vote on the end of the job."""

    reason: Reason = Reason.NONE
    silent: bool = False
    """The rank's script has evidently never called `should_exit()`."""
    seconds_left: int = NEVER_SECONDS
    """Seconds until the cloud takes this rank's node away."""


class EarlyEnd:
    """The early end of a job that has none; `halt.controller` has the other one."""

    reason = Reason.NONE
    """The reason why the job ends early; set on all ranks at the same boundary."""
    signal_name = ""
    """The name of the first signal that this rank received; empty if there was none."""

    def should_exit(self) -> bool:
        """The implementation of `Checkpointer.should_exit`."""
        return False

    def exit(self) -> NoReturn:
        """End the process of a program that never asks whether to end, after all is closed."""
        raise SystemExit(0)

    def seconds_to_wait(self) -> float | None:
        """Time that the end may take; None: no limit."""
        return None

    def seconds_for_others(self) -> float:
        """Time that the end may wait for other nodes and stores, after the last checkpoint is on
        disk."""
        return math.inf

    def has_to_end(self) -> bool:
        """True if nothing that hangs is waited for any more."""
        return False

    def disarm(self) -> None:
        """The end has started; it may take longer than an iteration."""

    def ask(self, request: HaltRequest) -> None:
        """Obey this request, in addition to those in directories."""
        raise NotImplementedError


NO_HALT = HaltVote()
"""The vote of a rank without a wish to end."""


class HaltRequest(Struct, frozen=True):
    """Conditions to stop; one of them is enough. Times are Unix seconds."""

    now: bool = False
    after_version: int | None = None
    """Stop once this version, or a later one, is taken."""
    before_seconds: float | None = None
    """Stop early enough to be done at this moment: `seconds_left` before it, or else the job's
    `halt_seconds_left`. Without either, stop at the first boundary after this moment."""
    seconds_left: float | None = None
    """Seconds before that moment, or before the end of the scheduler's allocation, to stop."""

    def nonsense(self) -> str:
        """Return which value is invalid and what is valid instead; empty when all are valid."""
        if self.after_version is not None and self.after_version < 0:
            return f"after version {self.after_version}: versions are numbers from 0 on"
        for name in ("before_seconds", "seconds_left"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < math.inf:
                return f"{name} is {seconds:g}: it is a finite number of seconds, 0 or more"
        if self.before_seconds is not None and self.before_seconds >= LAST_SECONDS:
            return f"before_seconds is {self.before_seconds:g}: that is the year 9999, or later"
        return ""

    def with_margin(self, configured_seconds: float) -> HaltRequest:
        """Return the request with the job's `halt_seconds_left` filled in; 0 means not set."""
        asks = self.before_seconds is not None and self.seconds_left is None
        return replace(self, seconds_left=configured_seconds or None) if asks else self

    def reason(self, version: int, now_seconds: float, end_seconds: float | None) -> Reason:
        """Return the condition that the next boundary after `version` meets, or NONE. Pure.

        Ranks act at the next boundary on a condition found at this one, so the next version counts.
        `end_seconds` is the end of the allocation, if known.
        """
        if self.now:
            return Reason.NOW
        margin_seconds = self.seconds_left or 0
        if self.before_seconds is not None and now_seconds >= self.before_seconds - margin_seconds:
            return Reason.TIME
        if self.after_version is not None and version + 1 >= self.after_version:
            return Reason.VERSION
        last_seconds = None if self.seconds_left is None else end_seconds
        if last_seconds is not None and now_seconds >= last_seconds - margin_seconds:
            return Reason.ALLOCATION
        return Reason.NONE

    def unknown(self, end_seconds: float | None) -> bool:
        """True when the request counts back from an unknown end."""
        return bool(self.seconds_left) and self.before_seconds is None and end_seconds is None

    def text(self) -> str:
        """The conditions, as text."""
        parts = ["now"] if self.now else []
        if self.after_version is not None:
            parts.append(f"after version {self.after_version}")
        margin = f"{self.seconds_left:g} seconds" if self.seconds_left is not None else ""
        if self.before_seconds is not None:
            when = datetime.fromtimestamp(self.before_seconds).astimezone()
            how_long = margin or "the job's halt_seconds_left"
            parts.append(f"{how_long} before {when:%Y-%m-%d %H:%M:%S %Z}")
        if margin:
            parts.append(f"when {margin} of the allocation are left")
        return ", or ".join(parts)

    def merged(self, other: HaltRequest) -> HaltRequest:
        """Return this request with the values that `other` sets in place of its own."""
        plain = HaltRequest()
        changes = {
            name: value for name, value in asdict(other).items() if value != getattr(plain, name)
        }
        return replace(self, **changes)

    def encode(self) -> str:
        """Return the text of the request's file."""
        head = {"kind": KIND, "version": FORMAT_VERSION}
        return json.dumps({**head, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def decode(text: str) -> HaltRequest:
        """Read the text that `encode` made. Raises FormatError."""
        try:
            found = json.loads(text)
            if found["kind"] != KIND or found["version"] > FORMAT_VERSION:
                raise FormatError(f"no halt request that this release can read: {text[:80]!r}")
            after, before = found["after_version"], found["before_seconds"]
            left = found["seconds_left"]
            request = HaltRequest(
                now=bool(found["now"]),
                after_version=None if after is None else int(after),
                before_seconds=None if before is None else float(before),
                seconds_left=None if left is None else float(left),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise FormatError(f"not a halt request: {text[:80]!r} ({error_text(error)})") from error
        if wrong := request.nonsense():
            raise FormatError(f"not a halt request that a job can act on: {wrong}")
        return request


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
    """State of the oldest version of unknown outcome on this level. BROKEN < PENDING < DONE, so the
    minimum holds for all ranks."""
    free: int = 1
    """1 when this rank's level can take another version; of memory: at the next boundary."""
    time_left: int = 1
    """0 when a time-based version is due by this rank's clock."""
    less_us: int = 0
    """This and the next field: `levels.Cost` on this rank, negative, so that the minimum is the
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
    """Yield the index of each field of each level in a vector, before the defaults."""
    cast = count()
    for number, is_cast in enumerate(_CAST):
        yield next(cast) if is_cast else number % len(_SILENT) - len(_SILENT)


_pick = itemgetter(*_positions())
_OTHERS = sum(_CAST)
"""Index of the first number about no level."""
SILENT: Mapping[Level, LevelVote] = MappingProxyType(dict.fromkeys(LEDGERS, _SILENT))
"""The vote about each level of a rank with nothing to report."""
_CAST_SILENT = [*compress(chain.from_iterable(SILENT.values()), _CAST)]


@lru_cache(maxsize=64)  # most votes are about the levels as the votes before are
def _levels_of(cast: tuple[int, ...]) -> Mapping[Level, LevelVote]:
    """Return the vote about each level by the numbers before `_OTHERS`."""
    fields, make = _pick([*cast, *_SILENT]), tuple.__new__
    return MappingProxyType(
        {level: make(LevelVote, fields[start:end]) for level, start, end in _ROWS}
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
    less_step_us: int = 0
    """Duration of a step, from `levels.CostEstimate`, negative as `less_bytes` is."""
    adapter: int = 0
    """The adapter's vote, see `Adapter.vote`."""
    no_close: int = 1
    """0 when this rank's user called `close()` at a point where it could not be done."""
    place: int = 0
    """This and the next field: this rank's iteration; all ranks are in the same one if the minima
    are each other's complements."""
    place_complement: int = -1
    parts: tuple[int, ...] = ()
    """The numbers of the parts, see `core.parts`; empty: none were cast."""

    def pack(self) -> list[int]:
        """Return the vector to be reduced."""
        cast = compress(chain.from_iterable(self.levels.values()), _CAST)
        return [
            *(_CAST_SILENT if self.levels is SILENT else cast),
            self.no_request,
            self.less_bytes,
            self.metric,
            self.less_step_us,
            self.adapter,
            self.no_close,
            self.place,
            self.place_complement,
            *self.parts,
        ]

    @staticmethod
    def unpack(values: list[int]) -> Vote:
        """Read the vector that `pack` made."""
        levels = _levels_of(tuple(values[:_OTHERS]))
        about, parts = values[_OTHERS:VOTE_WIDTH], tuple(values[VOTE_WIDTH:])
        return tuple.__new__(Vote, (levels, *about, parts))  # as `_make`, which is slower

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
"""Without the parts."""
PLACES = slice(VOTE_WIDTH - 2, VOTE_WIDTH)
"""Of `place` and `place_complement` in the vector."""


class Decision(Struct, frozen=True):
    """The action of all ranks at one boundary."""

    take: tuple[Level, ...] = ()
    """Levels that take the version; includes `memory` whenever there is any."""
    skipped: tuple[tuple[Level, str], ...] = ()
    """(level, reason) of each due level that cannot take a version now. A level that stays due is
    named once, and again when its interval has passed another time."""
    again: frozenset[Level] = frozenset()
    """Levels that were already skipped at the previous boundary."""
    wait: bool = False
    """Wait for busy levels instead of skipping, as the user wants (`when_busy="wait"`)."""
    changes: tuple[Change, ...] = ()
    """Automatic intervals that change at this boundary."""


class Schedule(Struct, dict=True):
    """The levels' due versions. `decide` advances it alike on every rank."""

    config: Config
    last: dict[Level, int] = field(default_factory=lambda: dict.fromkeys(INTERVALS, 0))
    """The version that each level took last."""
    skipping: frozenset[Level] = frozenset()
    """Levels with a due version already reported as skipped."""
    requested: frozenset[Level] = frozenset()
    """Levels that have not yet taken the version that a user requested."""
    tuner: Tuner | None = None
    """Chooses the automatic intervals; None if there are none."""
    seen: int = 0
    """The version of the last boundary."""

    def __post_init__(self) -> None:
        """Start with the first intervals."""
        # A request goes to the levels that a save waits for, whatever their intervals are.
        used = [level for level in INTERVALS if level.facts.awaited or self.config.uses(level)]
        self._ways = {level: {level, level.source or level} for level in used}
        self._every_steps: dict[Level, Steps] = {
            level: getattr(self.config, level).every_steps for level in INTERVALS
        }
        if AUTO in self._every_steps.values():
            from tierckpt.core.tuning import Tuner

            self.tuner = Tuner(self.config)

    def usual(self) -> tuple[tuple[Level, ...], int]:
        """The levels that take every version, and the first version at which others may be due by
        steps; 0 if that is not known."""
        if self.tuner or self.requested or self.skipping or self.config.local.journal_steps:
            return (), 0
        take, changes_at = [], sys.maxsize
        for level in self._ways:
            every = self._every_steps[level]
            assert every != AUTO
            if every == 1:
                take.append(level)
            elif every:
                changes_at = min(changes_at, (self.last[level] // every + 1) * every)
        return tuple(take), changes_at

    def repeat(self, version: int, take: tuple[Level, ...]) -> None:
        """The version goes to these levels, the usual ones, and nothing else is due."""
        self.seen = version
        for level in take:
            self.last[level] = version

    def start_at(self, version: int) -> None:
        """Start after a restore: nothing is due before the intervals have passed again."""
        self.last, self.seen = dict.fromkeys(INTERVALS, version), version

    def due(self, version: int, agreed: Vote) -> set[Level]:
        """Return the levels where this version is due."""
        asked, due = agreed.no_request == 0, set[Level]()
        for level, goes_to in self._ways.items():
            wanted = asked or agreed.levels[level].time_left == 0
            if level == LOCAL and self.config.local.journal_steps:
                wanted = wanted or self._journal_needs(version)
            if wanted or (self._every_steps[level] and self._steps_passed(level, version)):
                due |= goes_to
        return due

    def _journal_needs(self, version: int) -> bool:
        """Whether the journal of gradients needs a version to start with, or a newer one."""
        most, last = self.config.local.journal_steps, self.last[LOCAL]
        return last == 0 or version - last >= most

    def _steps_passed(self, level: Level, version: int) -> bool:
        every = self._every_steps[level]
        if every == AUTO:
            assert self.tuner is not None
            return self.tuner.due(level, self.last[level], version)
        return _crossed(self.last[level], version, every)

    def decide(self, version: int, agreed: Vote) -> Decision:
        """Decide which levels take the version; a version that had to be skipped stays due."""
        tuner = self.tuner
        changes = () if tuner is None else tuner.heed(version, self.seen, agreed.figures)
        decision = self._decide(version, agreed)
        self.seen = version
        return replace(decision, changes=changes) if changes else decision

    def _decide(self, version: int, agreed: Vote) -> Decision:
        if agreed.no_request == 0:
            self.requested = frozenset(self.due(version, agreed))
        due = self.due(version, agreed) | self.requested
        if not due:
            return Decision()
        busy = {level for level in {MEMORY, *due} if not agreed.levels[level].free}
        wait = bool(busy) and self.config.when_busy == "wait"
        held = _held(due, busy) if busy and not wait else {}
        take = due - held.keys()
        if take:
            take.add(MEMORY)
        self.last.update(dict.fromkeys(take, version))
        self.requested -= take
        again = self.skipping
        fresh = (level for level in held if level not in again or self._one_more(level, version))
        skipped = tuple((level, held[level]) for level in fresh)
        self.skipping = frozenset(held)
        return Decision(
            tuple([level for level in INTERVALS if level in take]), skipped, again, wait
        )

    def _one_more(self, level: Level, version: int) -> bool:
        """True when a multiple of the interval lies between the previous boundary and this one."""
        every = self._every_steps[level]
        return every != AUTO and _crossed(self.seen, version, every)


def _held(due: Collection[Level], busy: Collection[Level]) -> dict[Level, str]:
    """Return the due levels that cannot take a version, each with the reason of a busy level."""
    held = {}
    for level in INTERVALS:
        way = (MEMORY, level.source or level, level)
        if level in due and (busy_ones := [each for each in way if each in busy]):
            held[level] = busy_ones[-1].facts.busy
    return held


def _crossed(last: int, version: int, every: int) -> bool:
    """True when a multiple of `every` lies in (last, version]."""
    return every > 0 and version // every > last // every


QUIET_SECONDS, SLOWEST_BYTES_PER_SECOND, MAX_QUIET_SECONDS = 600.0, 10e6, 1500.0
"""A disk or store has failed when it is quiet for QUIET_SECONDS plus the time that the node's
shards take at SLOWEST_BYTES_PER_SECOND (a file system may report nothing before it has written
all). The limit is MAX_QUIET_SECONDS: other ranks wait in a collective, and gloo ends that after
30 minutes."""


def most_quiet_seconds(nbytes: int) -> float:
    """Return how long a level may be quiet while it takes `nbytes` of a node."""
    return min(QUIET_SECONDS + nbytes / SLOWEST_BYTES_PER_SECOND, MAX_QUIET_SECONDS)


class StallTimeout:
    """One wait. All times come from one monotonic clock."""

    def __init__(self, quiet_seconds: float, now: float) -> None:
        """Start the wait at `now`, with no report yet."""
        self.quiet_seconds = quiet_seconds
        self._moved_at = now
        self._was_over = False

    def record_quiet(self, quiet_seconds: float, now: float) -> None:
        """Record that nothing has moved for `quiet_seconds`, possibly since before this wait."""
        self._moved_at = now - quiet_seconds

    def is_over(self, now: float) -> bool:
        """Check now and then whether the time is over; after an answer call `record_quiet` first.

        True only at the second time in a row: the whole machine may have been stopped, and then
        the process that has to answer continues in a moment.
        """
        over = now - self._moved_at > self.quiet_seconds
        was_over, self._was_over = self._was_over, over
        return over and was_over
