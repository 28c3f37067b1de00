"""Unchanged versions: equal bit for bit to the version before, although steps were made.

The optimizer steps nothing, the whole graph is frozen, or a CUDA graph is stale: the training makes
no progress, and each checkpoint is sound. A frozen layer does not count, nor a learning rate of
zero for a while: nothing may change, neither a parameter nor an optimizer's state, on any rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from tierckpt._text import some
from tierckpt.core.parts import Boundary, Part, VoteField
from tierckpt.format.manifest import DIGEST_BYTES
from tierckpt.snapshot.copy_plan import CopyPlan
from tierckpt.state.training_state import TrainingState, optimizer_class

if TYPE_CHECKING:
    from tierckpt.checkpointer.loop import TrainingJob
    from tierckpt.snapshot.snapshot import Snapshot

IN_A_ROW = 3
"""This many versions in a row that equal the one before cause a warning."""
NO_STRIPE = 1 << 31
"""The count of a rank that stores nothing that could change: other ranks decide."""
TEXT = (
    "v{first} to v{last} are equal bit for bit, in all parameters and all optimizer state, "
    "although {steps} optimizer steps were made: {names} changed nothing. {why}"
)
WHY = (
    "Do its parameters have gradients when it steps (requires_grad, a loss that is not detached), "
    "and are they those of the trained model?"
)
WHY_ZERO = "Its learning rate is 0"


class Unchanged(Part):
    """One rank's part. Training thread."""

    votes = (VoteField("unchanged"),)
    patient = frozenset(("read", "vote"))

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Of every job."""
        return cls(job.state, job.reports.notice_of_all)

    def __init__(self, state: TrainingState, say: Callable[[str, int], None]) -> None:
        """`say` takes text and severity."""
        self._state, self._say = state, say
        self.forget()

    def forget(self) -> None:
        """The state was replaced."""
        self.count = 0
        """Number of the newest versions that equal the one before in this rank's stripe."""
        self._last: tuple[CopyPlan, bytes] | None = None
        self._runs: list[tuple[int, int]] = []
        """Positions of the striped blocks' digests among a manifest's."""
        self._first = self._newest = 0
        self._said = False

    def sealed(self, snapshot: Snapshot) -> None:
        """Compare it with the version before."""
        plan, manifest = snapshot.plan, snapshot.manifest
        assert manifest is not None
        same_plan = self._last is not None and self._last[0] is plan
        if not same_plan:
            self._runs = _runs(plan.striped_blocks)
        striped = b""
        for low, high in self._runs:  # one or two
            striped += manifest.digests[low:high]
        same = same_plan and self._last is not None and self._last[1] == striped
        version = manifest.facts.id.version
        if same and version == self._newest:
            return  # it was taken again, and no step was made
        self._last = plan, striped
        self._first = self._first if same else version
        self._newest = version
        self.count = self.count + 1 if same else 0
        if not striped:
            self.count = NO_STRIPE
        elif self.count == IN_A_ROW and not self._said:
            self.has_news()

    def vote(self, at: Boundary) -> Sequence[int]:
        """The number of this rank's newest versions that equal the one before."""
        return (self.count,)

    def read(self, at: Boundary, least: Sequence[int]) -> None:
        """Take the smallest count of all ranks."""
        (count,) = least
        if not IN_A_ROW <= count < NO_STRIPE:
            self._said &= count >= NO_STRIPE
            return
        if self._said:
            return
        self._said = True
        steps = self._newest - self._first
        names = some([self._name(label) for label in self._state.optimizers])
        zero = all(
            float(group.get("lr", 1)) == 0
            for optimizer in self._state.optimizers.values()
            for group in optimizer.param_groups
        )
        why, severity = (WHY_ZERO, logging.INFO) if zero else (WHY, logging.WARNING)
        facts = {"first": self._first, "last": self._newest, "steps": steps, "names": names}
        self._say(TEXT.format(**facts, why=why), severity)

    def _name(self, label: str) -> str:
        optimizer = self._state.optimizers[label]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        names = some([self._state.name_of(p) for p in params])
        return f"{optimizer_class(optimizer)} {label!r} (of {names})"


def _runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Byte ranges of these blocks' digests, adjacent ones joined. The header's digest is first."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        low = (1 + block) * DIGEST_BYTES
        if found and found[-1][1] == low:
            low = found.pop()[0]
        found.append((low, (2 + block) * DIGEST_BYTES))
    return found


__all__ = ["Unchanged"]
