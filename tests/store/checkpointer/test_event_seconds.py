"""Events report how a version's seconds were spent: an artificially slow part is reported as
slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.late_copies import before_blocks, without_the_engine
from tierckpt.snapshot import Binding, Staging, engine, snapshot
from tierckpt.storage import LocalStore
from tierckpt.testing import TinyJob

pytestmark = pytest.mark.usefixtures("by_layer")

SLOW_SECONDS = 0.1
"""Smallest reported time for a sleep of this length, even on a busy machine."""


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return function(*args, **kwargs)

    return slow


@pytest.mark.parametrize(
    ("owner", "name", "event", "told"),
    [
        (Staging, "take", "sealed", "boundary"),
        (Binding, "copy_block", "sealed", "copy"),
        (engine, "digest", "sealed", "checksum"),
        (snapshot.Snapshot, "barrier", "sealed", "sealed_after"),
        (LocalStore, "_write_manifest", "committed", "commit"),
    ],
)
def test_a_slow_call_is_reported(
    owner: Any,
    name: str,
    event: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    shm_dir: Path,
) -> None:
    settings = {"shm_dir": shm_dir, "agent": "inline", "local_every_steps": 1}
    with TinyJob(path, **settings) as job:
        job.checkpointer._active.release_early = told != "sealed_after"
        with monkeypatch.context() as patch:
            if told in ("copy", "checksum"):
                without_the_engine(patch)
            patch.setattr(owner, name, slowly(getattr(owner, name)))
            job.run(3)
    found = [e.seconds for e in job.events if e.name == event]
    assert found
    assert max(seconds[told] for seconds in found) >= SLOW_SECONDS
    for seconds in found:
        if event == "sealed":
            assert seconds["stall"] == seconds["boundary"] + seconds["barrier"]


def test_a_barrier_that_waits_is_reported(
    monkeypatch: pytest.MonkeyPatch, path: Path, shm_dir: Path
) -> None:
    """The step waits at the barrier while tensors that it would change are copied."""
    with TinyJob(path, shm_dir=shm_dir, agent="inline") as job:
        job.checkpointer._active.release_early = False
        with monkeypatch.context() as patch:
            before_blocks(patch, lambda _: time.sleep(SLOW_SECONDS))
            job.run(3)
    sealed = [e.seconds for e in job.events if e.name == "sealed"]
    assert max(seconds["barrier"] for seconds in sealed) >= SLOW_SECONDS
