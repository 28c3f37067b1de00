"""Phases of a snapshot, without torch: the handoff of slots needs no more of a snapshot."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """State of a snapshot."""

    OPEN = "open"
    SEALED = "sealed"
    FAILED = "failed"


__all__ = ["Phase"]
