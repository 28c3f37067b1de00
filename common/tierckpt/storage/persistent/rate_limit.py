"""Rate limits of a node's flushes, checked before every window, and their cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tierckpt.errors import FlushCancelledError

from .clock import Clock, SystemClock

NAP_SECONDS = 0.5
"""Longest single sleep: a superseded flush that waits for its turn ends within this time."""


class Throttle:
    """A token bucket over bytes: the node's share of the store's bandwidth.

    Bytes let through by any moment t are at most `burst_bytes` + `rate` * (t - start). One per
    node; threads may share it.
    """

    def __init__(self, bytes_per_second: float, burst_bytes: int, now: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a bandwidth of {bytes_per_second} bytes a second is not positive")
        self.rate, self.burst_bytes = bytes_per_second, burst_bytes
        self._tokens, self._at = float(burst_bytes), now
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, now: float) -> float:
        """Take `nbytes` from the bucket; returns the seconds to wait before they may be sent."""
        with self._lock:
            gained = max(0.0, now - self._at) * self.rate
            self._tokens = min(float(self.burst_bytes), self._tokens + gained) - nbytes
            self._at = max(self._at, now)
            return max(0.0, -self._tokens / self.rate)


@dataclass(frozen=True)
class TimeSlots:
    """At most `at_once` of `nodes` nodes flush at any moment, without coordination.

    Time is divided into turns of `turn_seconds`, counted from the epoch, and a node has every k-th
    turn. Neighbours have different turns, because they tend to share a switch. This needs clocks
    that agree to well below a turn (NTP does), and equal settings on all nodes. A window that is
    being sent at the end of a turn is finished.

    Turns are short, so little is lost if a node has nothing to send in its turn, or finishes in the
    middle of it: of k turns, each node with s seconds of work finishes after ceil(s /
    `turn_seconds`) + 1 rounds.
    """

    node: int
    nodes: int
    at_once: int
    """0: no limit."""
    turn_seconds: float = 5.0
    """Long compared with a window and with differences of clocks: the rest waits for the next
    turn."""

    @property
    def count(self) -> int:
        """Number of turns in a round."""
        return 1 if self.at_once <= 0 else -(-self.nodes // self.at_once)

    def wait_seconds(self, now: float) -> float:
        """Seconds until this node's turn, at Unix time `now`; 0.0 during its turn."""
        position = (now / self.turn_seconds - self.node % self.count) % self.count
        if position < 1.0:
            return 0.0
        return (self.count - position) * self.turn_seconds


class FlushPacer:
    """Called with the size of every window before it is sent; returns when it may be sent.

    Raises FlushCancelledError as soon as `superseded()` is True. Calls `keep` while waiting, for
    regular work during a flush (`Lease.keep`). One per node.
    """

    def __init__(
        self,
        throttle: Throttle | None = None,
        turns: TimeSlots | None = None,
        superseded: Callable[[], bool] = lambda: False,
        keep: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self.throttle, self.turns = throttle, turns
        self.superseded, self.keep = superseded, keep
        self.clock: Clock = clock or SystemClock()

    def __call__(self, nbytes: int) -> None:
        """Wait for bandwidth, then for the node's turn: the turn may have ended while it waited."""
        self.sleep(0.0)
        if self.throttle:
            self.sleep(self.throttle.reserve(nbytes, self.clock.monotonic()))
        while self.turns and (wait := self.turns.wait_seconds(self.clock.now())):
            self.sleep(max(wait, 0.001))  # rounding could keep it just before its turn forever

    def sleep(self, seconds: float) -> None:
        """Sleep in short steps, with a check in each; also used between two attempts of a call."""
        end = self.clock.monotonic() + seconds
        while True:
            if self.superseded():
                raise FlushCancelledError("the flush was superseded by a newer version")
            self.keep()
            left = end - self.clock.monotonic()
            if left <= 0:
                return
            self.clock.sleep(min(left, NAP_SECONDS))
