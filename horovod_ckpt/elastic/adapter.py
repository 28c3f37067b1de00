"""Elastic Horovod's adapter: takes a version at every commit, whatever has changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from horovod_ckpt.adapter import HorovodAdapter
from tierckpt.hooks.iterations import STEPS_UNTIL_CALL

NOTHING_HEARD = 1
RARE_SECONDS = 1.0
"""Commits that are further apart ask for new hosts at once: a broadcast is nothing to them, and an
answer one commit later would be late."""
NO_COMMITS = (
    f"the optimizer made {STEPS_UNTIL_CALL} steps, and commit() of the state was not called: no "
    "checkpoint is taken until it is. Call state.commit() after optimizer.step(). A loop that "
    f"commits at every so many iterations, more than {STEPS_UNTIL_CALL}, need do nothing"
)
OVERWRITTEN = (
    "a commit was lost, as weights were changed after commit() had returned, before an optimizer's "
    "step (see the event that names them): they are copied while the next iteration runs, where "
    "Horovod's own state copies them inside commit(). From now on this rank's commits copy them "
    "there, too, and training waits for that. A write through .data is not noticed: where the loop "
    "makes one after commit(), call state.checkpointer.complete() before it"
)


class ElasticAdapter(HorovodAdapter):
    """The adapter of a checkpointer over the ranks that there are now."""

    is_elastic = True
    extra_syntax = "TorchState(..., {name}={it})"
    no_calls_notice = NO_COMMITS

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, is_quiet: Callable[[], bool]
    ) -> None:
        """`is_quiet()`: this rank has heard of no host that comes or goes."""
        super().__init__(model, optimizer)
        self._is_quiet = is_quiet
        self.agreed_vote = 0
        """NOTHING_HEARD when all ranks voted so at the boundary before."""
        self.passed_over = False
        """The last commit was no boundary."""
        self._voted_seconds = float("-inf")
        self._copies_at_once = False
        """The loop changes weights after a commit: each returns only when they are copied."""

    def vote(self) -> int:
        """NOTHING_HEARD, or something smaller."""
        now, before = time.monotonic(), self._voted_seconds
        self._voted_seconds = now
        return NOTHING_HEARD if self._is_quiet() and now - before < RARE_SECONDS else 0

    def boundary_passed(self, agreed_vote: int) -> None:
        """Keep what was agreed on."""
        self.agreed_vote = agreed_vote

    @property
    def half_way(self) -> bool:
        """True while there are gradients that no step has used."""
        return any(each._handles for each in self.handle.state.given.values())  # type: ignore[attr-defined]

    def compare_replicas(self) -> None:
        """Compare all of the state, before these ranks part: later ones could tell neither who
        differs nor since when. Collective. Raises ReplicaError, on all ranks, with
        `on_drift="stop"`."""
        self.handle.compare_replicas(not (self.half_way or self.handle.state.torn))

    def commit(self, step: Callable[[], None]) -> None:
        """Have a version taken by `Checkpointer.step`, also without an optimizer's step since the
        last one: values may have changed. Not between the backward passes of a step."""
        self.passed_over = self._between_passes()
        if self.passed_over:
            self.handle.count_call()
            self._count_misplaced()
            return
        handle = self.handle
        if not handle.steps_since_boundary and not self.half_way:
            handle.count_step()
        step()
        if handle.overwritten and not self._copies_at_once:
            self._copies_at_once = True
            handle.notice(OVERWRITTEN, logging.ERROR)
        # Whoever goes back finds something, whatever the loop does with the weights meanwhile.
        if self._copies_at_once or not handle.has_version:
            handle.complete()


__all__ = ["NOTHING_HEARD", "ElasticAdapter"]
