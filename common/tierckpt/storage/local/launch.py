"""The origin of this process, as proof that another run of the job has ended.

A launcher's name for a launch proves nothing: two jobs in one Slurm allocation have the same
number, and two torchruns may be given the same `--rdzv-id`. These facts prove it:

- *A process* that was in that run and is in this one, such as a survivor in elastic Horovod.
- *A launcher's process* that started ranks of both. torchrun's agent ends the ranks of one round
  before it starts those of the next. (The claims of those ranks must be gone, too.)
- *A scheduler's count of attempts*: Slurm ends one attempt of a job before it begins the next.

Standard library only. Nothing waits or raises: facts that cannot be read prove nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tierckpt._host import boot_id, process_stat
from tierckpt._milestones import ATTEMPT_VARIABLE

MOST_STARTERS = 256
"""Starters kept of a run: the smallest, so that two runs that share some keep the same ones. Every
node reads the claims of all."""
_OF_A_WORKER = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "RANK")
"""Variables that torchrun sets for a worker, as MASTER_PORT; its agent does not have these values
itself."""
_LETTERS = 16


@dataclass(frozen=True)
class Launch:
    """Origin of one process, see the module's docstring."""

    name: str = ""
    """The launcher's name for this launch, for messages; may be empty."""
    job: str = ""
    """Job of a scheduler that counts attempts and runs one at a time; else empty."""
    attempt: int = 0
    starters: tuple[str, ...] = ()
    """Hashes that identify this process and its launcher's process, across all machines."""

    def supersedes(self, other: Launch) -> bool:
        """True if the scheduler ended the attempt of `other` before it began this one."""
        return bool(self.job) and self.job == other.job and self.attempt > other.attempt


def launch_of(environment: Mapping[str, str], in_use: bool = False) -> Launch:
    """The launch of this process. `in_use` means that the process is still in another run, so it
    does not prove that any run has ended."""
    slurm = _slurm_job(environment)
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    attempt = int(restarts) if slurm and restarts.isdigit() else 0
    own = [] if in_use else [process_mark("self")]
    starters = tuple(filter(None, [*own, _torchrun_agent(environment)]))
    return Launch(_name(environment), slurm, attempt, starters)


def smallest(starters: Iterable[str]) -> tuple[str, ...]:
    """The starters that are recorded for a run, from those of all ranks."""
    return tuple(sorted(set(starters))[:MOST_STARTERS])


def _name(environment: Mapping[str, str]) -> str:
    get = environment.get
    if job := get("SLURM_JOB_ID"):
        step = get("SLURM_STEP_ID", "")
        return f"Slurm step {job}.{step}" if step else f"Slurm job {job}"
    run = get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):  # "none" is torchrun's default for runs without a name
        return f"torchrun {run}"
    address, port = get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return f"Horovod {address}:{port}" if address and port else ""


def _slurm_job(environment: Mapping[str, str]) -> str:
    """Job of Slurm; its numbers are unique in a cluster only."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_UID", "SLURM_JOB_ID")
    values = [environment.get(name, "") for name in names]
    return "/".join(values) if values[0] and values[-1] else ""


def process_mark(process: str | int) -> str:
    """Id of a process of this machine (`self` or its number) that no other process ever has. Empty
    if it cannot be read."""
    boot = boot_id()
    with contextlib.suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{process}/stat").read_text()
        # The name, in brackets, may contain any character.
        number, begun = stat.split()[0], stat.rpartition(")")[2].split()[19]
        space = os.stat("/proc/self/ns/pid").st_ino
        text = f"{boot} {space} {number} {begun}"
        return hashlib.sha256(text.encode()).hexdigest()[:_LETTERS] if boot else ""
    return ""


def _torchrun_agent(environment: Mapping[str, str]) -> str:
    """The nearest ancestor that was not started as this rank, unlike a script around it."""
    # `tierckpt run`, an ancestor started as this rank, changes the port for its later attempts.
    port = "MASTER_PORT" if environment.get(ATTEMPT_VARIABLE, "1") == "1" else ""
    names = [*_OF_A_WORKER, *filter(None, [port])]
    own_values = [environment.get(name) for name in names]
    if not own_values[0] or not _proc_is_ours():
        return ""
    process = os.getppid()
    with contextlib.suppress(OSError, IndexError, ValueError):
        while process > 0:
            values = _environment_of(process)
            if [values.get(name) for name in names] != own_values:
                return process_mark(process)
            process = int(process_stat(process)[1])
    return ""


def _proc_is_ours() -> bool:
    """Whether /proc has this process's numbering: a container may have the host's. Raises
    nothing."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self") == str(os.getpid())
    return False


def _environment_of(process: int) -> dict[str, str]:
    """The initial environment of a process. Raises OSError if it is another user's, or has
    ended."""
    pairs = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


__all__ = ["Launch", "launch_of", "process_mark", "smallest"]
