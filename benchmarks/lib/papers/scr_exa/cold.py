"""Cold restarts: the whole job is killed every ten epochs, and started again from its checkpoints.

The processes are new, and so is their Python: its start is measured apart, since it is the same for
all methods. For the disk the memory is lost, too, as when the machine has lost its power.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.papers.scr_exa.jobs import (
    JobError,
    Losses,
    Plan,
    Watched,
    compared,
    figures_of,
    losses_of,
    python,
    starts_of,
)
from lib.training.launchers import LAUNCHERS

LEAVE_SECONDS = 10
"""For the other processes, after the first one has ended."""
_UNDISTURBED: dict[tuple[str, str, int], Losses] = {}
"""Losses by model, launcher and steps: the same for all methods."""


def measure(plan: Plan, lose_memory: bool, limit_s: float) -> dict[str, Any]:
    """Run the job with its kills, and the undisturbed one if that was not yet run; return the
    seconds of its restarts, and whether its losses are the same."""
    key = (plan.model, plan.launcher, plan.steps)
    if key not in _UNDISTURBED:
        calm = plan.calm()
        _run(calm, lose_memory, limit_s)
        _UNDISTURBED[key] = losses_of(calm)
    starts = starts_of(plan, _run(plan, lose_memory, limit_s))
    return {**compared(plan, _UNDISTURBED[key]), **figures_of(starts)}


def _run(plan: Plan, lose_memory: bool, limit_s: float) -> list[float]:
    """Start the job until it has ended; return the times of all starts but the first."""
    plan.make_folders()
    job, since = Watched(plan), []
    try:
        for number in range(len(plan.killed_at) + 1):
            if number and lose_memory:
                job.family.kill()  # with the agent
                shutil.rmtree(plan.memory)
                Path(plan.memory).mkdir()
            since.append(time.time())
            _run_once(job, limit_s)
            if not job.have_done([*plan.killed_at, plan.steps][number]):
                raise JobError(job.last_words())
    finally:
        job.family.kill()
        shutil.rmtree(plan.memory, ignore_errors=True)
    return since[1:]


def _run_once(job: Watched, limit_s: float) -> None:
    """Start all ranks, and return when they have ended."""
    plan = job.plan
    processes = LAUNCHERS[plan.launcher].start(
        plan.world, python(plan.command()), job.environment, job.output
    )
    try:
        processes[0].wait(limit_s)
        for process in processes:  # after a kill the others end as well, or are ended
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        job.family.kill()
    for process in processes:
        process.kill()
        process.wait()
