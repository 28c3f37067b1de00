"""How fast and when a node may flush, and whether it still should: asked before every window."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tierckpt.errors import FlushCancelledError

from .clock import Clock, SystemClock

NAP_SECONDS = 0.5
"""Longest sleep in one go: so soon a superseded flush ends that is waiting for its turn."""


class Throttle:
    """A token bucket over bytes: the node's share of the store's bandwidth.

    Bytes let through by any moment t are at most `burst_bytes` + `rate` * (t - start). One per
    node; threads may share it.
    """

    def __init__(self, bytes_per_second: float, burst_bytes: int, now: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a bandwidth of {bytes_per_second} bytes a second never ends")
        self.rate, self.burst_bytes = bytes_per_second, burst_bytes
        self._tokens, self._at = float(burst_bytes), now
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, now: float) -> float:
        """Take `nbytes` out; returns the seconds to wait before they may be sent."""
        with self._lock:
            gained = max(0.0, now - self._at) * self.rate
            self._tokens = min(float(self.burst_bytes), self._tokens + gained) - nbytes
            self._at = max(self._at, now)
            return max(0.0, -self._tokens / self.rate)


@dataclass(frozen=True)
class TimeSlots:
    """At most `at_once` of `nodes` nodes flush at any moment, with nobody to ask.

    Time is cut into turns of `turn_seconds`, counted from the epoch, and a node has every k-th.
    Neighbours have different turns: they tend to share a switch. It needs clocks that agree to
    well below a turn (NTP does), and equal settings everywhere; a window under way at the end of
    a turn is finished.

    Turns are short, so that little is lost when a node has nothing to do in its own, or is through
    in the middle of it: of k turns, each node with s seconds of work is through after
    ceil(s / `turn_seconds`) + 1 rounds.
    """

    node: int
    nodes: int
    at_once: int
    """0: no limit."""
    turn_seconds: float = 5.0
    """Many windows, and long beside what clocks differ by: what is left waits for the next turn."""

    @property
    def count(self) -> int:
        """How many turns there are before a node's comes again."""
        return 1 if self.at_once <= 0 else -(-self.nodes // self.at_once)

    def wait_seconds(self, now: float) -> float:
        """Seconds until it is this node's turn at Unix time `now`; 0.0 while it is."""
        position = (now / self.turn_seconds - self.node % self.count) % self.count
        if position < 1.0:
            return 0.0
        return (self.count - position) * self.turn_seconds


class FlushPacer:
    """Called with the size of every window before it is sent; returns when it may be.

    Raises FlushCancelledError as soon as `superseded()` is True. `keep` is called meanwhile, for
    what must be done now and then while a flush lasts (`Lease.keep`). One per node.
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
        """Wait for the node's bandwidth, then for its turn: it may be over when there is some."""
        self.sleep(0.0)
        if self.throttle:
            self.sleep(self.throttle.reserve(nbytes, self.clock.monotonic()))
        while self.turns and (wait := self.turns.wait_seconds(self.clock.now())):
            self.sleep(max(wait, 0.001))  # or rounding keeps it a hair before its turn for ever

    def sleep(self, seconds: float) -> None:
        """Sleep, and look up now and then; also for whoever waits between two tries."""
        end = self.clock.monotonic() + seconds
        while True:
            if self.superseded():
                raise FlushCancelledError("the flush was superseded by a newer version")
            self.keep()
            left = end - self.clock.monotonic()
            if left <= 0:
                return
            self.clock.sleep(min(left, NAP_SECONDS))
