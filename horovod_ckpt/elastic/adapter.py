"""The adapter of elastic Horovod: it takes a version at every commit, even without a step."""

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
"""If commits are further apart than this, each asks for new hosts at once: a broadcast costs little
compared with the interval, and the next commit would be too late."""
NO_COMMITS = (
    f"the optimizer made {STEPS_UNTIL_CALL} steps, and commit() of the state was not called: no "
    "checkpoint is taken until it is. Call state.commit() after optimizer.step(). If your loop "
    f"commits only every N iterations, and N is more than {STEPS_UNTIL_CALL}, ignore this"
)
OVERWRITTEN = (
    "a commit was lost, because weights were changed after commit() and before an optimizer's step "
    "(another event names them). Commits copy weights during the next iteration; Horovod's own "
    "state copies them inside commit(). From now on this rank's commits also copy inside commit(), "
    "and training waits for that. A write through .data is not noticed: if your loop makes one "
    "after commit(), call state.checkpointer.complete() before it"
)


class ElasticAdapter(HorovodAdapter):
    """The adapter of a checkpointer over the current ranks of an elastic job."""

    is_elastic = True
    repeats_steps = False
    extra_syntax = "TorchState(..., {name}={it})"
    no_calls_notice = NO_COMMITS

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, is_quiet: Callable[[], bool]
    ) -> None:
        """`is_quiet()`: True if this rank was not notified of a host that joins or leaves."""
        super().__init__(model, optimizer)
        self._is_quiet = is_quiet
        self.agreed_vote = 0
        """NOTHING_HEARD if all ranks voted so at the previous boundary."""
        self.passed_over = False
        """The last commit was no boundary."""
        self._voted_seconds = float("-inf")
        self._copies_at_once = False
        """True if the loop changes weights after commits: each commit returns after the copy."""

    def vote(self) -> int:
        """NOTHING_HEARD, or 0 if commits are rare or a host joins or leaves."""
        now, before = time.monotonic(), self._voted_seconds
        self._voted_seconds = now
        return NOTHING_HEARD if self._is_quiet() and now - before < RARE_SECONDS else 0

    def boundary_passed(self, agreed_vote: int) -> None:
        """Keep the smallest vote of all ranks."""
        self.agreed_vote = agreed_vote

    @property
    def half_way(self) -> bool:
        """True in the middle of an iteration: reductions were launched, and no step used them."""
        return any(each._handles for each in self.handle.state.given.values())  # type: ignore[attr-defined]

    def compare_replicas(self) -> None:
        """Compare the complete state before the group of ranks changes: a later group could not
        find out which ranks differ and since when. Collective. Raises ReplicaError, on all ranks,
        with `on_drift="stop"`."""
        self.handle.compare_replicas(not (self.half_way or self.handle.state.torn))

    def commit(self, step: Callable[[], None]) -> None:
        """Take a version by `step` (`Checkpointer.step`), also without an optimizer's step since
        the last one: values may have changed. Not between the backward passes of a step.
        Collective with several backward passes per step."""
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
        # So a restore finds a version, even if the loop changes the weights after the commit.
        if self._copies_at_once or not handle.has_version:
            handle.complete()


__all__ = ["NOTHING_HEARD", "ElasticAdapter"]
