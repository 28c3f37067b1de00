"""This process's place in its job, as the launcher's environment gives it.

The command line of `tierckpt run`.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping, MutableMapping, Sequence

from msgspec import Struct

__all__ = [
    "DESCRIPTION",
    "HOROVODRUN",
    "MPIRUN",
    "NONE",
    "SRUN",
    "TORCHRUN",
    "USAGE",
    "Options",
    "Place",
    "add",
    "is_elastic",
    "node_of",
    "parse",
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


class Place(Struct, frozen=True):
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
    """True under elastic Horovod: its driver replaces ranks in a running job."""
    return environment.get("HOROVOD_ELASTIC") == "1"


MAX_RESTARTS = 3
USAGE = "tierckpt run [options] (SCRIPT | -m MODULE) [ARGUMENTS...]"
DESCRIPTION = (
    "Runs a training script under a launcher, and restarts it within a second after a failure: "
    "torchrun ... -m tierckpt.run train.py, or mpirun ... tierckpt run train.py. Each rank's "
    "process keeps torch imported, and forks the script. If one rank's script is killed or fails, "
    "the scripts of all ranks are ended, and the next attempt starts. After --max-restarts the "
    "launcher handles the failure as usual."
)


class Options(Struct, frozen=True):
    """The options, and the program to run."""

    program: str
    """A script's path, or a module's name."""
    is_module: bool
    arguments: tuple[str, ...]
    max_restarts: int = MAX_RESTARTS
    preload: tuple[str, ...] = ()
    rendezvous: str = ""
    standby: bool = False
    """This process is a spare: it waits for the rank of a lost node."""
    times: str = ""
    verbose: bool = False


def parse(arguments: Sequence[str]) -> Options:
    """Parse the command line; ends the process with status 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser("tierckpt run", usage=USAGE, description=DESCRIPTION)
    add(parser)
    found = parser.parse_args(arguments)
    words = found.command[1:] if found.command[:1] == ["--"] else found.command
    if not words:
        parser.error("a script, or -m and a module, is missing")
    if found.max_restarts < 0:
        parser.error("--max-restarts must be 0 or more")
    if found.rendezvous and not found.rendezvous.rpartition(":")[2].isdigit():
        parser.error("--rendezvous must be HOST:PORT")
    if found.standby and not found.rendezvous:
        parser.error("--standby needs --rendezvous HOST:PORT, as given to the job's own ranks")
    if not found.is_module and _is_interpreter(words[0]):
        parser.error(f"leave out {words[0]}: tierckpt run is given the script itself")
    return Options(
        words[0],
        found.is_module,
        tuple(words[1:]),
        found.max_restarts,
        tuple(filter(None, found.preload.split(","))),
        found.rendezvous,
        found.standby,
        found.times,
        found.verbose,
    )


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    text = f"restarts before the launcher takes over (default: {MAX_RESTARTS})"
    parser.add_argument("--max-restarts", type=int, default=MAX_RESTARTS, metavar="N", help=text)
    text = "modules to import before the script starts, besides torch and those of its last run"
    parser.add_argument("--preload", default="", metavar="A,B", help=text)
    text = (
        "where rank 0 listens for the other ranks and for spares, in place of the launcher's store"
    )
    parser.add_argument("--rendezvous", default="", metavar="HOST:PORT", help=text)
    text = "be a spare: import, wait at --rendezvous, and take the rank of a lost node"
    parser.add_argument("--standby", action="store_true", help=text)
    text = "print the parts of each restart's time, too"
    parser.add_argument("-v", "--verbose", action="store_true", help=text)
    text = "append the times of each restart to this file, as JSON lines"
    parser.add_argument("--times", default="", metavar="FILE", help=text)
    text = "run a module, named in place of the script, as python -m does"
    parser.add_argument("-m", dest="is_module", action="store_true", help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _is_interpreter(word: str) -> bool:
    name = word.rpartition("/")[2]
    return name.startswith("python") and not name.removeprefix("python").strip("0123456789.")
