"""Shared store: a file system or object store that is sometimes slow, or does not answer."""

from __future__ import annotations

from collections.abc import Generator
from random import Random
from typing import TYPE_CHECKING, Any

from tierckpt.simulation.scenario import Failures

if TYPE_CHECKING:
    import simpy

    Steps = Generator[simpy.Event, Any, None]

ROUNDING_SECONDS = 1e-5
"""Less than this is not waited for: after years of seconds the clock cannot show 1e-9."""
KEPT = 64
"""Changes of the speed that are remembered, for flushes that began before them."""


class SharedStore:
    """The store's speed, relative to its bandwidth: 1, less while it is slow, 0 while it is out."""

    def __init__(self, env: simpy.Environment, failures: Failures, chance: Random) -> None:
        self._env, self._chance = env, chance
        self._history: list[tuple[float, float]] = [(0.0, 1.0)]
        self._changed = env.event()
        self.outages = 0
        out, slow = failures.store_out_every_seconds, failures.store_slow_every_seconds
        self._rates = 1 / out, 1 / slow
        self._failures = failures
        if any(self._rates):
            env.process(self._life())

    @property
    def speed(self) -> float:
        """The speed now."""
        return self._history[-1][1]

    def transfer(self, seconds: float) -> Steps:
        """Wait as long as a transfer takes that needs `seconds` at full speed."""
        while seconds > ROUNDING_SECONDS:
            speed, began, changed = self.speed, self._env.now, self._changed
            if speed:
                yield self._env.timeout(seconds / speed) | changed
            else:
                yield changed
            seconds -= (self._env.now - began) * speed

    def is_complete(self, began: float, seconds: float) -> bool:
        """True if a transfer that began then is complete now."""
        done, now = 0.0, self._env.now
        for number, (since, speed) in enumerate(self._history):
            ends = [*self._history[number + 1 : number + 2], (now, 0.0)][0][0]
            done += max(0.0, min(ends, now) - max(since, began)) * speed
        return done >= seconds - ROUNDING_SECONDS

    def _life(self) -> Steps:
        out, slow = self._rates
        while True:
            yield self._env.timeout(self._chance.expovariate(out + slow))
            is_out = self._chance.random() * (out + slow) < out
            self.outages += is_out
            factor = 0.0 if is_out else 1 / self._failures.store_slow_factor
            mean = self._failures.store_out_seconds if is_out else self._failures.store_slow_seconds
            self._set(factor)
            yield self._env.timeout(self._chance.expovariate(1 / mean) if mean else 0.0)
            self._set(1.0)

    def _set(self, speed: float) -> None:
        self._history = [*self._history[-KEPT:], (self._env.now, speed)]
        changed, self._changed = self._changed, self._env.event()
        changed.succeed()
