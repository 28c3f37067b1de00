"""What started this process: enough to prove that another run of the job is over, and no more.

A launcher's name for what it starts proves nothing: two jobs in one Slurm allocation have its
number, two torchruns may be given one `--rdzv-id`. What does prove it:

- *A process* that was in that run and is in this one. Elastic Horovod's survivors are.
- *A launcher's own process* that started ranks of both. torchrun's agent ends those of one round
  before it starts those of the next. (The claims of those ranks have to be gone, too.)
- *A scheduler's count of attempts*: Slurm ends one attempt of a job before it begins the next.

Standard library only. Nothing here waits, and nothing is raised: what cannot be told proves
nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tierckpt._host import boot_id

MOST_STARTERS = 256
"""Kept of a run: the smallest, so that of two runs that share some the same are kept. Every node
reads the claims of all."""
_OF_A_WORKER = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT", "RANK")
"""torchrun gives them to a worker; its agent does not have these values itself."""
_LETTERS = 16


@dataclass(frozen=True)
class Launch:
    """See the module's text. Of one process."""

    name: str = ""
    """For people; empty where the launcher gives none."""
    job: str = ""
    """Of a scheduler that counts its attempts, and runs one at a time; else empty."""
    attempt: int = 0
    starters: tuple[str, ...] = ()
    """This process, and the process of its launcher, wherever they are: one way only, by hash."""

    def supersedes(self, other: Launch) -> bool:
        """True when the scheduler ended what `other` is of before it began this."""
        return bool(self.job) and self.job == other.job and self.attempt > other.attempt


def launch_of(environment: Mapping[str, str], in_use: bool = False) -> Launch:
    """Of this process. `in_use`: it is in another run yet, so that it proves of none that it is
    over."""
    slurm = _slurm_job(environment)
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    attempt = int(restarts) if slurm and restarts.isdigit() else 0
    own = [] if in_use else [process_mark("self")]
    starters = tuple(filter(None, [*own, _torchrun_agent(environment)]))
    return Launch(_name(environment), slurm, attempt, starters)


def smallest(starters: Iterable[str]) -> tuple[str, ...]:
    """Of those of all ranks, what is told of a run."""
    return tuple(sorted(set(starters))[:MOST_STARTERS])


def _name(environment: Mapping[str, str]) -> str:
    get = environment.get
    if job := get("SLURM_JOB_ID"):
        step = get("SLURM_STEP_ID", "")
        return f"Slurm step {job}.{step}" if step else f"Slurm job {job}"
    run = get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):  # the latter is torchrun's own, for all that are given no name
        return f"torchrun {run}"
    address, port = get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return f"Horovod {address}:{port}" if address and port else ""


def _slurm_job(environment: Mapping[str, str]) -> str:
    """Numbers are a cluster's own."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_UID", "SLURM_JOB_ID")
    values = [environment.get(name, "") for name in names]
    return "/".join(values) if values[0] and values[-1] else ""


def process_mark(process: str | int) -> str:
    """Of a process of this machine, `self` or its number: no other one ever has the same. Empty
    where that cannot be told."""
    boot = boot_id()
    with contextlib.suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{process}/stat").read_text()
        # The name, in brackets, may have anything in it.
        number, begun = stat.split()[0], stat.rpartition(")")[2].split()[19]
        space = os.stat("/proc/self/ns/pid").st_ino
        text = f"{boot} {space} {number} {begun}"
        return hashlib.sha256(text.encode()).hexdigest()[:_LETTERS] if boot else ""
    return ""


def _torchrun_agent(environment: Mapping[str, str]) -> str:
    """The nearest ancestor that was not started as this rank, as a script around it is."""
    mine = [environment.get(name) for name in _OF_A_WORKER]
    if not mine[0] or not _proc_is_ours():
        return ""
    process = os.getppid()
    with contextlib.suppress(OSError, IndexError, ValueError):
        while process > 0:
            theirs = _environment_of(process)
            if [theirs.get(name) for name in _OF_A_WORKER] != mine:
                return process_mark(process)
            stat = Path(f"/proc/{process}/stat").read_text()
            process = int(stat.rpartition(")")[2].split()[1])
    return ""


def _proc_is_ours() -> bool:
    """Whether the numbers there are those that this process sees: a container may have the host's.
    Raises nothing."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self") == str(os.getpid())
    return False


def _environment_of(process: int) -> dict[str, str]:
    """What it was started with. Raises OSError where it is another user's, or gone."""
    pairs = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


__all__ = ["Launch", "launch_of", "process_mark", "smallest"]
