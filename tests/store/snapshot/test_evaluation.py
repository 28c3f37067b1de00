"""An evaluation after the boundary: no layer is released, and the version completes all the same.

Jobs here release layer by layer, as with an adapter; so they release nothing by themselves.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import limits
from tests.support.late_copies import before_blocks
from tierckpt.format import ShardKey
from tierckpt.snapshot import Snapshot
from tierckpt.testing import TinyJob, run_in_child

PATIENCE_SECONDS = 60.0
STEPS = 8


@pytest.fixture(scope="module")
def course() -> dict[int, str]:
    job = TinyJob(None)
    return {step: job.run(step).fingerprint() for step in range(1, STEPS + 1)}


@pytest.fixture
def settings(shm_dir: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir)}


def layered(path: Path | str, settings: dict[str, Any], seed: int = 0) -> TinyJob:
    job = TinyJob(path, seed=seed, **settings)
    job.checkpointer._active.release_early = False
    return job


def versions_on_disk(path: Path) -> set[int]:
    keys = (ShardKey.parse(p.name.removesuffix(".manifest")) for p in path.glob("*.manifest"))
    return {key.id.version for key in keys if key}


def evaluate_until(job: TinyJob, done: Callable[[], bool]) -> None:
    """Work of scripts between two steps, without any call of the checkpointer."""
    job.model.eval()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline
        with torch.no_grad():
            job.model(torch.ones(8, 12))
        time.sleep(0.001)
    job.model.train()


def is_over(taken: Snapshot) -> bool:
    return not taken.open


def be_killed_in_the_evaluation(path: str, steps: int, settings: dict[str, Any]) -> None:
    with layered(path, settings | {"release": "backward"}) as job:
        job.run(steps)
        evaluate_until(job, lambda: steps in versions_on_disk(Path(path)))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("steps", [1, 4], ids=["while slots are made", "when all slots are there"])
def test_a_version_is_durable_without_a_further_call(
    steps: int, tmp_path: Path, settings: dict[str, Any], shm_dir: Path, course: dict[int, str]
) -> None:
    path = tmp_path / "c"
    status = run_in_child(be_killed_in_the_evaluation, str(path), steps, settings)
    assert status == -signal.SIGKILL
    settings["shm_dir"] = str(shm_dir / "after a reboot")
    (shm_dir / "after a reboot").mkdir()
    with layered(path, settings, seed=99) as job:
        restored = job.restore()
        assert (int(restored), restored.levels) == (steps, {"local": 1})
        assert job.fingerprint() == course[steps]
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]


def test_training_continues_as_if_nothing_had_been(
    tmp_path: Path, settings: dict[str, Any], course: dict[int, str]
) -> None:
    with layered(tmp_path / "c", settings) as job:
        for step in (3, 4, 6):
            job.run(step)
            taken = job.checkpointer._active.snapshot
            assert taken is not None
            evaluate_until(job, partial(is_over, taken))
            assert (taken.sealed, taken.clock.barrier) == (True, 0.0)
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]
        job.settle()
        assert {3, 4, 6} <= {e.version for e in job.heard("sealed")}
    assert not job.heard("failed")


def test_copier_and_training_may_release_the_same_layers_at_the_same_time(
    tmp_path: Path, settings: dict[str, Any], course: dict[int, str], monkeypatch: Any
) -> None:
    """Each block is copied once, and no version is torn, whichever thread is first."""
    limits.COPIER_QUIET.set(monkeypatch, 0.0)
    copied: list[tuple[int, int]] = []
    before_blocks(monkeypatch, lambda block: copied.append((job.checkpointer.version, block)))
    settings |= {"local_keep": 100}
    with layered(tmp_path / "c", settings) as job:
        for parameter in job.model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: job.checkpointer.adapter.handle.release([p])
            )
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]
        job.checkpointer.wait()
        assert not job.heard("failed")
    assert len(copied) == len(set(copied))
    with layered(tmp_path / "c", settings, seed=99) as job:
        for version in range(STEPS, 0, -1):
            assert job.restore(version=version) == version
            assert job.fingerprint() == course[version]
