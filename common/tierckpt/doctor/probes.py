"""Torch, Horovod and mpi4py, as a process of their own finds them.

A build for another torch may crash its process, and an import of Horovod or torch cannot be
undone. `python -m tierckpt.doctor.probes` looks at torch and the copy engine, and prints JSON;
`probe` asks whether Horovod and mpi4py work with the torch here.

At its top this module imports the standard library only: `tools/make_horovod.py` uses it in a
Python that has nothing but torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from msgspec import Struct

from tierckpt._children import end_with_parent

PATIENCE_SECONDS = 280.0
"""Less than all checks of doctor have: it would leave this process behind."""
ANSWER = "horovod_probe: "
# Signals by which a process ends itself; all others come from outside.
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
# Variables of a launcher: with them the probe would wait for ranks that never come.
LAUNCHERS = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "PRTE_")

WITH_PARENT = "import ctypes; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL\n"
"""First line of a probe: the kernel ends it when its parent is gone."""

QUESTION = (
    WITH_PARENT
    + """\
import json, pathlib, sys

try:
    import torch
except Exception as error:
    sys.exit(f"torch cannot be imported ({error})")
try:
    import horovod
except ModuleNotFoundError:
    sys.exit("it is not installed")
metadata = pathlib.Path(horovod.__file__).with_name("metadata.json")
built_for = json.loads(metadata.read_text()).get("pytorch") if metadata.exists() else None
if built_for is None:
    sys.exit("it was built without PyTorch")
if built_for != torch.__version__:
    sys.exit(f"it was built for torch {built_for}, and here is torch {torch.__version__}")

import horovod.torch as hvd

hvd.init()
if hvd.allreduce(torch.ones(3)).tolist() != [1.0, 1.0, 1.0]:
    sys.exit("its allreduce gives wrong sums")
transports = [name for name in ("gloo", "mpi") if getattr(hvd, name + "_built")()]
try:
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    no_mpi4py = ""
except Exception as error:
    no_mpi4py = f"mpi4py cannot be imported ({error})"
answer = dict(version=horovod.__version__, transports=transports, no_mpi4py=no_mpi4py)
answer["nccl"] = bool(hvd.nccl_built())
print("horovod_probe: " + json.dumps(answer), flush=True)
"""
)


class Horovod(Struct, frozen=True):
    """Horovod and MPI of a Python."""

    missing: str = ""
    """Why there is no Horovod that works; empty: there is one."""
    version: str = ""
    transports: tuple[str, ...] = ()
    """Of `gloo` and `mpi`, what it was built with."""
    no_mpi4py: str = ""
    """Why mpi4py can't be used; empty: it can."""
    nccl: bool = False
    """True if it was built with NCCL."""
    untold: bool = False
    """The probe was ended from outside, or took too long: that says nothing of Horovod."""

    @property
    def mpi_missing(self) -> str:
        """Why no job can run over MPI (`mpirun`, Horovod and mpi4py); empty: it can."""
        if self.missing:
            return f"no Horovod: {self.missing}"
        if "mpi" not in self.transports:
            return "Horovod was built without MPI"
        if shutil.which("mpirun") is None:
            return "there is no mpirun"
        return self.no_mpi4py

    def __str__(self) -> str:
        return self.missing or f"Horovod {self.version} with {' and '.join(self.transports)}"


def probe(folder: Path | None = None) -> Horovod:
    """Start Horovod alone, in a process of this Python, and let it sum a tensor.

    `folder` holds an unpacked wheel, to be tried instead of what is installed. Takes as long as
    importing torch does; never raises for what Horovod does.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    if folder is not None:
        paths = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        # From / because Python looks in the working directory first, and a folder there may be
        # called horovod.
        done = subprocess.run(
            [sys.executable, "-c", QUESTION],
            cwd="/",
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Horovod(f"it did not start within {PATIENCE_SECONDS:.0f} s", untold=True)
    return understand(done.returncode, done.stdout, done.stderr)


def understand(status: int, out: str, err: str) -> Horovod:
    """What a probe that ended with this status and output has found. Pure."""
    answers = [line for line in out.splitlines() if line.startswith(ANSWER)]
    if status == 0 and answers:
        found = json.loads(answers[-1].removeprefix(ANSWER))
        transports, nccl = tuple(found["transports"]), found.get("nccl", False)
        return Horovod("", found["version"], transports, found["no_mpi4py"], nccl)
    if status < 0:
        name = signal.Signals(-status).name
        return Horovod(f"its start was ended by {name}", untold=name not in CRASHES)
    said = [line.strip() for line in err.splitlines() if line.strip()]
    return Horovod(missing=said[-1] if said else f"its start failed with status {status}")


def main() -> None:
    """Import torch, and try the copy engine and the layout of tensors with it."""
    end_with_parent()
    import torch

    from tierckpt.snapshot import copy_engine, tensor_memory

    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "",
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "engine": copy_engine.find() is not None,
        "copies": copy_engine.describe(),
        "layout": tensor_memory.find() is not None,
        "forbidden": os.environ.get(copy_engine.VARIABLE) == "torch",
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
