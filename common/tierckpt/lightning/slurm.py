"""The requeue of a Slurm job before its allocation ends, which Lightning promises.

Slurm sends a signal then (`#SBATCH --signal=SIGUSR1@90`). Lightning's handler writes a checkpoint
file and requeues the job; but Tierckpt handles that signal, and Lightning leaves a signal that has
a handler alone. So the job is requeued here, after its last version is stored.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from typing import Any

from tierckpt.checkpointer.checkpointer import Checkpointer
from tierckpt.core.halt_conditions import Reason
from tierckpt.halt.signals import Signals

logger = logging.getLogger("tierckpt")

FAILED = "Slurm has not requeued job %s: %s. Requeue it by hand: scontrol requeue %s"


def requeue_if_announced(trainer: Any, checkpointer: Checkpointer) -> None:
    """Requeue the job, on rank 0, if Lightning would, or if `halt_seconds_left` ended it. Called
    after the checkpointer is closed."""
    environment = trainer._accelerator_connector.cluster_environment
    if not (getattr(environment, "auto_requeue", False) and trainer.is_global_zero):
        return
    ends = checkpointer.exit_reason == Reason.ALLOCATION.text()
    if ends or (checkpointer.interrupted and _has_received(environment.requeue_signal)):
        _requeue(_job(os.environ))


def _has_received(number: signal.Signals) -> bool:
    """Whether a checkpointer received the signal; the handlers stay after its end."""
    owner = getattr(signal.getsignal(number), "__self__", None)
    return isinstance(owner, Signals) and owner.received == number


def _job(variables: Any) -> str:
    """The job's name for `scontrol`; that of one task of an array has two parts."""
    if array := variables.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{variables['SLURM_ARRAY_TASK_ID']}"
    return str(variables.get("SLURM_JOB_ID", ""))


def _requeue(job: str) -> None:
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        problem = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        logger.error(FAILED, job, problem, job)
    else:
        logger.warning("job %s ends early, and Slurm has requeued it", job)


__all__ = ["requeue_if_announced"]
