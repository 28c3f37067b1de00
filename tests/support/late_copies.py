"""Copies that come as late as possible, which reveal code that does not wait for them.

The helpers act on both ways of copying: by the copy engine, here block by block, and by torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tierckpt.snapshot import (
    Binding,
    Job,
    Progress,
    Snapshot,
    Watch,
    at_boundary,
    copy_engine,
    snapshot,
)


def copy_by_layer(patch: pytest.MonkeyPatch) -> None:
    """Copy every version layer by layer, as large ones are, and none at its boundary."""
    patch.setattr(at_boundary, "MOST_BYTES", 0)


def copy_late(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Copy nothing before the barrier; then each block takes `seconds`."""
    before_blocks(patch, lambda _: time.sleep(seconds))
    patch.setattr(snapshot, "QUIET_SECONDS", 1e6)


def before_blocks(patch: pytest.MonkeyPatch, call: Callable[[int], object]) -> None:
    """Call `call` with the number of each block before it is copied, on the thread that copies."""
    copy_by_layer(patch)
    copy_block, copy_one = Binding.copy_block, Job.copy_one

    def with_torch(self: Binding, plan: Any, block: int, start: int) -> memoryview:
        call(block)
        return copy_block(self, plan, block, start)

    def by_the_engine(self: Job, block: int) -> float:
        call(block)
        return copy_one(self, block)

    patch.setattr(Binding, "copy_block", with_torch)
    patch.setattr(Job, "copy_one", by_the_engine)
    patch.setattr(Watch, "each", lambda self: True)


def without_the_engine(patch: pytest.MonkeyPatch) -> None:
    """Copy with torch."""
    patch.setattr(copy_engine, "find", lambda: None)


def copy_in_the_copier_only(patch: pytest.MonkeyPatch) -> None:
    """The training thread copies nothing in the barrier, and so never seals."""
    copy_by_layer(patch)
    work = Snapshot.work

    def copier_only(self: Snapshot, wait_seconds: float | None) -> Progress:
        if wait_seconds is None:
            self.release_all()
            return Progress.IDLE
        return work(self, wait_seconds)

    patch.setattr(Snapshot, "work", copier_only)
