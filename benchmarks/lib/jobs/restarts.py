"""Cold restarts: all processes end, and the job starts again from its checkpoints."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lib.jobs.plan import Losses, Plan, Start, compared, have_done, losses_of, starts_of
from lib.jobs.processes import JobError, Processes

LEAVE_SECONDS = 10
"""For the other processes, after the first one has ended."""
_UNDISTURBED: dict[tuple[str, str, int], Losses] = {}
"""Losses by model, launcher and steps: the same for all methods."""


def undisturbed(plan: Plan, limit_s: float) -> Losses:
    """The losses of the job without checkpoints and kills."""
    key = (plan.model, plan.launcher, plan.steps)
    if key not in _UNDISTURBED:
        calm = plan.calm()
        _run(calm, limit_s, lambda job: None)
        _UNDISTURBED[key] = losses_of(calm)
    return _UNDISTURBED[key]


def restarted(
    plan: Plan, limit_s: float, lose: Callable[[Processes], None] = lambda job: None
) -> tuple[list[Start], dict[str, Any]]:
    """Run a job that is killed, until it has done all steps; return its starts after the kills,
    and how its losses compare with those of an undisturbed job.

    lose: called before each start but the first one, to lose more than the processes.
    """
    calm = undisturbed(plan, limit_s)
    starts = starts_of(plan, _run(plan, limit_s, lose))
    return starts, compared(plan, calm)


def _run(plan: Plan, limit_s: float, lose: Callable[[Processes], None]) -> list[float]:
    """Start the job until it has ended; return the times of all starts but the first."""
    job, since = Processes(plan), []
    try:
        for number, last in enumerate([*plan.killed_at, plan.steps]):
            if number:
                lose(job)
            since.append(time.time())
            _run_once(job, limit_s)
            if not have_done(plan, last):
                raise JobError(job.last_words())
    finally:
        job.close()
    return since[1:]


def _run_once(job: Processes, limit_s: float) -> None:
    """Start all ranks, and return when they have ended."""
    job.start_ranks()
    try:
        job.all[0].wait(limit_s)
        for process in job.all:  # after a kill the others end as well, or are ended
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        job.family.kill()
    for process in job.all:
        process.kill()
        process.wait()
    job.all.clear()
