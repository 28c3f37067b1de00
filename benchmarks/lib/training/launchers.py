"""The launchers of a team's ranks: torchrun with DDP, or horovodrun.

All differences between the launchers are here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tierckpt.testing import free_ports

PATIENCE_SECONDS = 1_000_000  # a stopped rank must not time out
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Ranks:
    """DDP: the ranks of a job under one launcher. The parent sets the variables of torchrun;
    restarts are not needed. `missing` and `start` are for the parent, the rest for a rank."""

    restless = False
    """Whether its threads work between commands: an idle rank must then be stopped (SIGSTOP)."""

    def __init__(self, backend: str) -> None:
        """Join the job. Collective."""
        if not dist.is_initialized():
            dist.init_process_group(backend)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @staticmethod
    def missing() -> str | None:
        """The reason if this launcher cannot run here, or None."""
        return None

    @staticmethod
    def start(
        world: int, command: list[str], environment: Mapping[str, str], log: Path
    ) -> list[subprocess.Popen[bytes]]:
        """Start `world` processes of `command`; return the children of the caller among them.

        Each leads a session of its own, appends its output to `log`, and ends with the caller.
        """
        meeting = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
        }
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        return [_popen(command, {**environment, **meeting, **rank}, log) for rank in ranks]

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Wrap model and optimizer so that gradients are averaged over the ranks. Collective."""
        return DistributedDataParallel(model), optimizer

    def barrier(self) -> None:
        """Return when every rank is here."""
        dist.barrier()

    def close(self) -> None:
        """Leave the job. Collective."""
        dist.barrier()
        dist.destroy_process_group()


class HorovodRanks(Ranks):
    """Horovod over Gloo; as in its documentation, all ranks start with the state of rank 0."""

    restless = True  # a thread of each rank polls the others a thousand times a second

    def __init__(self, backend: str) -> None:
        import horovod.torch as hvd

        hvd.init()
        self._hvd: Any = hvd
        self.rank, self.world = hvd.rank(), hvd.size()

    @staticmethod
    def missing() -> str | None:
        if importlib.util.find_spec("horovod") is None:
            return "Horovod is not installed here; `make horovod` builds it"
        return None

    @staticmethod
    def start(
        world: int, command: list[str], environment: Mapping[str, str], log: Path
    ) -> list[subprocess.Popen[bytes]]:
        launcher = str(Path(sys.executable).with_name("horovodrun"))
        # Explicit, since a Horovod with MPI would use MPI and search for an interface.
        options = ["--gloo", "--network-interfaces", "lo", "-np", str(world)]
        options += ["--gloo-timeout-seconds", str(PATIENCE_SECONDS)]
        return [_popen([launcher, *options, *command], environment, log)]

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        named = model.named_parameters()
        distributed = self._hvd.DistributedOptimizer(optimizer, named_parameters=named)
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self._hvd.broadcast_optimizer_state(distributed, root_rank=0)
        return model, distributed

    def barrier(self) -> None:
        self._hvd.barrier()

    def close(self) -> None:
        self._hvd.barrier()
        self._hvd.shutdown()


LAUNCHERS: dict[str, type[Ranks]] = {"torchrun": Ranks, "horovod": HorovodRanks}


def check_world(ranks: Ranks, wanted: int) -> None:
    """Raise RuntimeError if the job has another size: N jobs of one rank look similar."""
    if ranks.world != wanted:
        raise RuntimeError(f"this job has {ranks.world} ranks instead of {wanted}")


def _popen(
    command: list[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with open(log, "ab") as file:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            # A stopped rank cannot notice the end of the parent.
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    """In the child: ask the kernel for SIGTERM when the parent dies. See prctl(2)."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
