"""Copies that come as late as possible, which reveal code that does not wait for them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tierckpt.snapshot import snapshot
from tierckpt.snapshot.copy_plan import Binding


def copy_late(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Copy nothing before the barrier; then each block takes `seconds`."""
    copy_block = Binding.copy_block

    def slowly(self: Binding, *args: Any) -> memoryview:
        time.sleep(seconds)
        return copy_block(self, *args)

    patch.setattr(Binding, "copy_block", slowly)
    patch.setattr(snapshot, "QUIET_SECONDS", 1e6)
