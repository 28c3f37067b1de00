"""This process's place in its job, as the launcher's environment gives it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

__all__ = [
    "HOROVODRUN",
    "MPIRUN",
    "NONE",
    "SRUN",
    "TORCHRUN",
    "Place",
    "is_elastic",
    "node_of",
    "place_of",
    "slot_of",
    "take_place",
]


TORCHRUN, HOROVODRUN, MPIRUN, SRUN, NONE = "torchrun", "horovodrun", "mpirun", "srun", "none"
_ENVIRONMENTS = (
    # A launcher inside another one (torchrun under srun) starts this process: it comes first.
    (TORCHRUN, "RANK", "WORLD_SIZE"),
    (HOROVODRUN, "HOROVOD_RANK", "HOROVOD_SIZE"),
    (MPIRUN, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    (MPIRUN, "PMI_RANK", "PMI_SIZE"),
    (SRUN, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_ON_NODE = (
    "LOCAL_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)
_OF_A_PLACE = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
        *("TORCHELASTIC_USE_AGENT_STORE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
        *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
    }
)
"""Variables of a rank, and of its job's rendezvous. All others belong to a process or its node."""
_JOB_IDS = (
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMI_JOBID",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
"""Variables that together have one value in a launch, and no other launch of the user on the
machine has the same."""


@dataclass(frozen=True)
class Place:
    """Rank and launcher of this process."""

    launcher: str
    rank: int
    size: int
    is_one_node: bool
    """All ranks are known to be on this machine."""
    job: str
    """The launcher's id of this launch; empty if it gives none."""


def place_of(environment: Mapping[str, str]) -> Place:
    """The place; rank 0 of 1 without a launcher."""
    for launcher, rank, size in _ENVIRONMENTS:
        if environment.get(rank, "").isdigit() and environment.get(size, "").isdigit():
            ranks = int(environment[size])
            return Place(
                launcher,
                int(environment[rank]),
                ranks,
                _is_one_node(environment, launcher, ranks),
                _job(environment),
            )
    return Place(NONE, 0, 1, True, "")


def _is_one_node(environment: Mapping[str, str], launcher: str, size: int) -> bool:
    if launcher == SRUN:
        return environment.get("SLURM_STEP_NUM_NODES") == "1"
    return any(environment.get(name) == str(size) for name in _ON_NODE)


def _job(environment: Mapping[str, str]) -> str:
    for names in _JOB_IDS:
        values = [environment.get(name, "") for name in names]
        if all(values):
            return ".".join([names[0], *values])
    return ""


def node_of(environment: Mapping[str, str]) -> str:
    """The name of this node, as for checkpoints."""
    return environment.get("TIERCKPT_NODE") or socket.gethostname()


def slot_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank's place: a process with these is this rank, on any node."""
    return {name: value for name, value in environment.items() if _is_of_a_place(name)}


def take_place(environment: MutableMapping[str, str], slot: Mapping[str, str]) -> None:
    """Give a process the place `slot` instead of its own."""
    for name in list(filter(_is_of_a_place, environment)):
        del environment[name]
    environment.update(slot)


def _is_of_a_place(name: str) -> bool:
    return name in _OF_A_PLACE or (name.startswith("HOROVOD_") and "_GLOO" not in name)


def is_elastic(environment: Mapping[str, str]) -> bool:
    """True under elastic Horovod, whose driver replaces ranks in a running job."""
    return environment.get("HOROVOD_ELASTIC") == "1"
