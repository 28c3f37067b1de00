"""Machines: the nodes of a job, its spares, and repair."""

from __future__ import annotations

import math
from collections.abc import Generator
from random import Random
from typing import TYPE_CHECKING, Any

from tierckpt.simulation.scenario import Nodes

if TYPE_CHECKING:
    import simpy


class Machines:
    """Spare nodes, and which share of all nodes is bad.

    Bad nodes are counted, not named. A node that fails is a bad one with the probability of its
    kind's share of all failures.
    """

    def __init__(self, env: simpy.Environment, nodes: int, settings: Nodes, chance: Random) -> None:
        self._env, self._settings, self._chance = env, settings, chance
        self._returned = env.event()
        spares = 0 if math.isinf(settings.spares) else int(settings.spares)
        self.without_limit = math.isinf(settings.spares)
        self.in_job = nodes
        self.bad_in_job = round(nodes * settings.bad_share)
        self.bad_spares = round(spares * settings.bad_share)
        self.spares = spares
        all_bad = self.bad_in_job + self.bad_spares
        self.most_failure_factor = self._factor(min(all_bad, nodes))
        """Largest possible value of `node_failure_factor`: no good node gets bad."""

    @property
    def node_failure_factor(self) -> float:
        """Failures of all nodes in the job, relative to as many good ones."""
        return self._factor(self.bad_in_job)

    def _factor(self, bad: int) -> float:
        return 1 + bad / self.in_job * (self._settings.bad_factor - 1)

    def lose(self, count: int) -> None:
        """Take failed nodes out of the job, and begin their repair."""
        for _ in range(count):
            weight = self.bad_in_job * self._settings.bad_factor
            good = self.in_job - self.bad_in_job
            is_bad = bool(self.bad_in_job) and self._chance.random() * (weight + good) < weight
            self.bad_in_job -= is_bad
            comes_back = not math.isinf(self._settings.repair_seconds)
            if comes_back and (is_bad or not self.without_limit):
                self._env.process(self._repair(is_bad))

    def replace(self, count: int) -> Generator[Any, Any, None]:
        """Wait until so many spares have taken the places of lost nodes."""
        if self.without_limit:
            return
        while self.spares < count:
            yield self._returned
        for _ in range(count):
            takes_bad = self._chance.random() * self.spares < self.bad_spares
            self.spares -= 1
            self.bad_spares -= takes_bad
            self.bad_in_job += takes_bad

    def _repair(self, is_bad: bool) -> Generator[Any, Any, None]:
        settings = self._settings
        rate = 1 / settings.repair_seconds if settings.repair_seconds else math.inf
        yield self._env.timeout(self._chance.expovariate(rate) if rate < math.inf else 0.0)
        still_bad = is_bad and self._chance.random() >= settings.repair_cures
        if self.without_limit:
            self.bad_in_job += still_bad
            return
        self.spares += 1
        self.bad_spares += still_bad
        returned, self._returned = self._returned, self._env.event()
        returned.succeed()
