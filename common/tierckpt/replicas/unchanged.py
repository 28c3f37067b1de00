"""Unchanged: versions that are bit for bit those before them, although steps were made.

An optimizer that steps nothing, a graph that is frozen as a whole, a capture that is stale: the
training gets nowhere, and each checkpoint is sound. A layer that is frozen is no such thing, nor a
learning rate that is zero for a while: what is meant is that nothing at all changes, neither a
parameter nor what an optimizer keeps, on any rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from tierckpt._text import some
from tierckpt.format.manifest import DIGEST_BYTES, Manifest
from tierckpt.snapshot.copy_plan import CopyPlan
from tierckpt.state.training_state import TrainingState, optimizer_class

IN_A_ROW = 3
"""So many versions that are as the one before are worth a word."""
NO_STRIPE = 1 << 31
"""Told by a rank that stores none of what would change: others tell."""
TEXT = (
    "v{first} to v{last} are bit for bit alike, in all parameters and all that optimizers keep, "
    "although {steps} optimizer steps were made: {who} changed nothing. {why}"
)
WHY = (
    "Have its parameters gradients when it steps (requires_grad, a loss that is not detached), and "
    "are they those of the model that is trained?"
)
WHY_ZERO = "Its learning rate is 0"


class Unchanged:
    """Of one rank. Training thread."""

    def __init__(self, state: TrainingState, say: Callable[[str, int], None]) -> None:
        """`say` is told what is to be said, and how loudly."""
        self._state, self._say = state, say
        self.forget()

    def forget(self) -> None:
        """The state is another one now."""
        self.count = 0
        """So many of the newest versions are, in this rank's stripe, those before them."""
        self._last: tuple[CopyPlan, bytes] | None = None
        self._runs: list[tuple[int, int]] = []
        """Where the digests of striped blocks are in a manifest's."""
        self._first = self._newest = 0
        self._said = False

    def sealed(self, plan: CopyPlan, manifest: Manifest) -> None:
        """A version is complete on this rank."""
        known = self._last is not None and self._last[0] is plan
        if not known:
            self._runs = _runs(plan.striped_blocks)
        striped = b"".join(manifest.digests[low:high] for low, high in self._runs)
        same = known and self._last is not None and self._last[1] == striped
        if same and manifest.id.version == self._newest:
            return  # it was taken again, and no step was made
        self._last = plan, striped
        self._first = self._first if same else manifest.id.version
        self._newest = manifest.id.version
        self.count = self.count + 1 if same else 0
        if not striped:
            self.count = NO_STRIPE

    def compare(self, least: int) -> None:
        """The smallest count of all ranks."""
        if not IN_A_ROW <= least < NO_STRIPE:
            self._said &= least >= NO_STRIPE
            return
        if self._said:
            return
        self._said = True
        steps = self._newest - self._first
        who = some([self._name(label) for label in self._state.optimizers])
        zero = all(
            float(group.get("lr", 1)) == 0
            for optimizer in self._state.optimizers.values()
            for group in optimizer.param_groups
        )
        why, severity = (WHY_ZERO, logging.INFO) if zero else (WHY, logging.WARNING)
        told = {"first": self._first, "last": self._newest, "steps": steps, "who": who}
        self._say(TEXT.format(**told, why=why), severity)

    def _name(self, label: str) -> str:
        optimizer = self._state.optimizers[label]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        names = some([self._state.name_of(p) for p in params])
        return f"{optimizer_class(optimizer)} {label!r} (of {names})"


def _runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Bytes of these blocks' digests, those as one that lie side by side; the header's is first."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        low = (1 + block) * DIGEST_BYTES
        if found and found[-1][1] == low:
            low = found.pop()[0]
        found.append((low, (2 + block) * DIGEST_BYTES))
    return found


__all__ = ["Unchanged"]
