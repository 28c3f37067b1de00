"""The proof: a job's state at a boundary is restored, and trains on, bit for bit.

A job makes three steps, with a boundary after each, and a fourth step during which version 3
finishes copying. Then it is abandoned, as in a crash. A second job, made with another seed,
restores version 3 and makes the fourth step too. Before and after this step it must have the state
of the first job.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierckpt
from tests.support import exact
from tests.support.state_matrix.jobs import Case, Job

BOUNDARIES = 3


@dataclass
class Bench:
    """Folders of the two jobs of a case, and their events."""

    path: Path
    shm: Path
    on_disk: bool
    """Restore from disk, not from memory."""
    checkpointer: Callable[..., tierckpt.Checkpointer] = tierckpt.Checkpointer
    ranks: int = 1
    events: list[tierckpt.Event] = field(default_factory=list)

    def make(self, case: Case, seed: int) -> Job:
        seed_everything(seed)
        return case()

    def attach(self, job: Job) -> tierckpt.Checkpointer:
        return self.checkpointer(
            job.wrapper or job.model,
            job.optimizers,
            extra=job.extra,
            path=self.path / "ckpts",
            shm_dir=self.shm,
            # One version only: while it is written the next may be skipped.
            local_every_steps=BOUNDARIES * job.versions if self.on_disk else 0,
            local_every_seconds=0,
            agent="inline",  # the written bytes matter here, not their writer
            on_event=self.events.append,
        )

    def lose_memory(self) -> None:
        shutil.rmtree(self.shm / f"tierckpt-{os.getuid()}")

    def repeated_errors(self) -> list[str]:
        return [e.text() for e in self.events if e.severity >= logging.WARNING]


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def restores_and_trains_on(case: Case, bench: Bench) -> None:
    """Check one case. Raises AssertionError at a difference."""
    version, at_boundary, one_step_later = first_life(case, bench)
    if bench.on_disk:
        bench.lose_memory()
    job = bench.make(case, seed=2)
    for iteration in range(BOUNDARIES):
        job.prepare(iteration)
    assert exact.differences(at_boundary, job.image()), "another seed is another job"
    ckpt = bench.attach(job)
    restored = ckpt.restore()
    assert (restored, restored.version) == (BOUNDARIES, version), restored
    assert restored.levels == {"local" if bench.on_disk else "memory": bench.ranks}, restored
    nothing_differs(at_boundary, job)
    job.prepare(BOUNDARIES)
    job.iterate()
    nothing_differs(one_step_later, job)
    ckpt.abandon()
    assert bench.repeated_errors() == [], bench.repeated_errors()


def nothing_differs(expected: dict[str, Any], job: Job) -> None:
    """Name the differences, also in processes of ranks, where assertions are not rewritten."""
    found = exact.differences(expected, job.image())
    assert found == [], found


def first_life(case: Case, bench: Bench) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The version of the last boundary, and images of the state then and one step later."""
    job = bench.make(case, seed=1)
    ckpt = bench.attach(job)
    for iteration in range(BOUNDARIES):
        job.prepare(iteration)
        job.iterate()
        ckpt.step()
    version, at_boundary = ckpt.version, job.image()
    job.prepare(BOUNDARIES)
    job.iterate()
    one_step_later = job.image()
    ckpt.abandon()
    return version, at_boundary, one_step_later
