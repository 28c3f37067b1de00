"""The live state: its place in the training, its values beside the tensors, and its equality with a
stored version.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from msgspec import Struct

from tierckpt._text import some
from tierckpt.coordination.versions import Reports
from tierckpt.core.parts import Parts, call
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.hooks.iterations import Iterations
from tierckpt.restored import Restored
from tierckpt.snapshot.staging import Staging, normal_mode
from tierckpt.state.training_state import TrainingState

from .adapter import Adapter, own_method


class Position(Struct):
    """The place of the live state in the training."""

    version: int = 0
    """Completed optimizer steps, up to the last boundary."""
    iteration: int = 0
    """The result of `restore()`, plus the calls of `step()` since then (`boundary="explicit"`)."""
    ahead: int = 0
    """1 if the live state contains an optimizer step before the `step()` call of its iteration."""
    released: int = 0
    """Number of released layers: the progress of a rank if forward passes are boundaries."""
    metric: float | None = None
    """The metric of the live state; the optimizer's next step clears it."""


class LiveState:
    """The live state of this rank. Training thread."""

    def __init__(
        self,
        group: Group,
        adapter: Adapter,
        state: TrainingState,
        position: Position,
        iterations: Iterations,
        capture: Staging,
        parts: Parts,
        reports: Reports,
    ) -> None:
        """All arguments stay their owners'."""
        self.adapter, self.state = adapter, state
        self.position, self.iterations = position, iterations
        self._group, self._capture, self._reports = group, capture, reports
        self._parts = parts
        self._resumes = own_method(adapter, "resume_iteration")

    # --- its place ------------------------------------------------------------------------------

    @property
    def steps_made(self) -> int:
        """Completed optimizer steps, including those since the last boundary."""
        return self.position.version + self.iterations.steps

    @property
    def iteration(self) -> int:
        """Calls of `step()` up to the live state, including one still to come."""
        return self.position.iteration + self.position.ahead

    def resume_iteration(self) -> int:
        """The number that `restore()` will return: calls of `step()`, or optimizer steps."""
        if not self.iterations.explicit:
            return self.position.version
        return self.iteration if self._resumes is None else self._resumes(self.iteration)

    def continue_from(self, result: Restored) -> None:
        """Set the place to that of `result`, after its values were loaded."""
        position = self.position
        position.version, position.iteration, position.metric = result.version, int(result), None
        position.ahead = position.released = 0
        self.iterations.continue_from(result)
        self.forget()

    def forget(self) -> None:
        """Forget what is known of the values before: others were loaded."""
        self._capture.forget()
        call(self._parts.forget)

    # --- its values -----------------------------------------------------------------------------

    def measured(self) -> float | None:
        """The metric on rank 0, if it is a finite number; None on other ranks."""
        metric = self.position.metric
        metric = None if metric is None or self._group.rank else as_number(metric)
        return metric if metric is not None and math.isfinite(metric) else None

    def packed(self) -> Any:
        """The adapter's values, after a last check which parameters are each rank's own."""
        if self.state.placements.untrained:
            self.keep_apart()
        return self.adapter.pack()

    def keep_apart(self) -> None:
        """Look for untrained parameters that are trained now but not reduced. They counted as equal
        on all ranks, and are each rank's own from now on."""
        trained = self.adapter.newly_unreduced()
        mistaken = self.state.placements.assumed_replicated(trained)
        if not mistaken:
            return
        self.state.placements.keep_apart(mistaken)
        self._capture.forget()
        call(self._parts.shared_changed)
        names = some([self.state.name_of(param) for param in mistaken])
        self._reports.notice_of_all(self.adapter.newly_unreduced_notice.format(names=names))

    def equals(self, manifest: Manifest, image: memoryview) -> bool:
        """True if the live state equals the sealed image bit for bit, or the adapter wants the
        version of the boundary in its place."""
        if self.adapter.keeps_boundary():
            return True
        facts, live = manifest.facts, (self.resume_iteration(), self.iterations.counts)
        if (facts.iteration, facts.iteration_counts) != live or facts.metric != self.measured():
            return False
        with normal_mode():
            return self._capture.is_unmoved(manifest, image, self.packed())


def as_number(metric: Any) -> float:
    """Convert to a float. Raises TypeError for anything but one number."""
    try:
        return float(metric.detach() if isinstance(metric, torch.Tensor) else metric)
    except (TypeError, ValueError, RuntimeError):
        text = f"metric must be one number or a one-element tensor, not a {type(metric).__name__}"
        raise TypeError(text) from None


__all__ = ["LiveState", "Position", "as_number"]
