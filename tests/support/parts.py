"""Parts of a checkpointer, and boundaries made up for parts without a loop."""

from __future__ import annotations

import time
from typing import Any

from tierckpt.core import Boundary, HaltRequest, Vote
from tierckpt.format import VersionId
from tierckpt.journal import Journal
from tierckpt.replicas import ReplicaMonitor


def boundary_at(version: int, start_seconds: float | None = None) -> Boundary:
    """The boundary of v*version* in a run named `run`, which starts now by default."""
    start = time.perf_counter() if start_seconds is None else start_seconds
    return Boundary(VersionId(1, version), "run", start, False, version, Vote(), [])


def monitor_of(ckpt: Any) -> Any:
    return ckpt._parts.find(ReplicaMonitor)


def journal_of(ckpt: Any) -> Any:
    return ckpt._parts.find(Journal)


def halt_after(ckpt: Any, version: int) -> None:
    """The job is to end after this version."""
    ckpt._halt.ask(HaltRequest(after_version=version))
