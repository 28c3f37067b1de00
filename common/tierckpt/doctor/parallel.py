"""Libraries for parallel jobs: Horovod and MPI."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from tierckpt._children import child_environment

from .finding import Finding, Subject, absent, cross, good
from .horovod_probe import LAUNCHERS, WITH_PARENT, probe

BUILD = "in a checkout of Tierckpt: python tools/make_horovod.py"
NOT_THERE, NO_TORCH = "it is not installed", "torch cannot be imported"
"""Answers of the probe."""
_LIBRARY = (
    f"{WITH_PARENT}import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(mpi4py.__version__, MPI.Get_library_version().splitlines()[0], sep='\\n')"
)
_SECONDS = 60.0
_KINDS = {
    "open mpi|open-mpi|openrte": "Open MPI",
    "intel\\(r\\) mpi": "Intel MPI",
    "mpich|hydra": "MPICH",
}
"""Patterns for the answers of MPI libraries and of their launchers, the special ones first."""


def horovod(subject: Subject) -> Iterator[Finding]:
    """Horovod, started alone in a process, and its transports."""
    found = probe()
    if found.missing == NOT_THERE:
        yield absent("horovod", "not installed", BUILD)
    elif found.missing.startswith(NO_TORCH):
        yield absent("horovod", f"not tested: {NO_TORCH}")
    elif "mpi_init" in found.missing.lower():
        cure = "put the bin folder of its MPI on PATH; mpirun -np 1 true shows the error"
        yield cross("horovod", "cannot start, as its MPI cannot", cure)
    elif found.missing:
        yield cross("horovod", found.missing, BUILD)
    else:
        built = [*found.transports, *(["nccl"] if found.nccl else [])]
        text = f"{found.version}, built for this torch, with {', '.join(built) or 'no transport'}"
        yield good("horovod", text) if built else cross("horovod", text, BUILD)


def mpi(subject: Subject) -> Iterator[Finding]:
    """The MPI launcher, and the library that mpi4py uses: they must be of one kind."""
    launcher, library = _launcher(), _library()
    installed, problem = library
    if not launcher and not installed and not problem:
        yield absent("mpi", "no mpirun, no mpi4py", "apt-get install openmpi-bin libopenmpi-dev")
    elif problem:
        cure = "install the MPI library that it was built for, or: pip install --force-reinstall"
        yield cross("mpi", f"mpi4py cannot be imported: {problem}", f"{cure} mpi4py")
    elif not installed:
        yield absent("mpi", f"{launcher}; mpi4py is not installed", "pip install 'tierckpt[mpi]'")
    elif not launcher:
        cure = "put the bin folder of that MPI on PATH, or: apt-get install openmpi-bin"
        yield absent("mpi", f"{installed}; no mpirun", cure)
    elif _kind(launcher) != _kind(installed):
        text = f"mpirun is of {launcher}, and {installed}: each rank would be a job of its own"
        cure = "put the mpirun of mpi4py's library first on PATH, or build mpi4py for this one: "
        yield cross("mpi", text, f"{cure}pip install --force-reinstall --no-binary mpi4py mpi4py")
    else:
        yield good("mpi", f"mpirun, {installed}")


def _launcher() -> str:
    """Kind and version of mpirun; empty without one."""
    if shutil.which("mpirun") is None:
        return ""
    done = subprocess.run(
        ["mpirun", "--version"],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    return _named((done.stdout + done.stderr).strip())


def _library() -> tuple[str, str]:
    """mpi4py and its library, empty without it; and the reason why it cannot be imported."""
    environment = {n: v for n, v in child_environment().items() if not n.startswith(LAUNCHERS)}
    done = subprocess.run(
        [sys.executable, "-c", _LIBRARY],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environment,
        cwd="/",
    )
    lines = done.stdout.splitlines()
    if done.returncode == 0 and len(lines) >= 2:
        return f"mpi4py {lines[0]} with {_named(lines[1])}", ""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if said and "No module named 'mpi4py'" in said[-1]:
        return "", ""
    return "", said[-1] if said else f"its process ended with status {done.returncode}"


def _named(answer: str) -> str:
    """`Open MPI 4.1.4` of the first line that a library or launcher prints."""
    first = answer.splitlines()[0] if answer else ""
    version = re.search(r"\d+(?:\.\d+)+", answer)
    kind = _kind(answer) or first[:40]
    return f"{kind} {version[0]}" if version else kind


def _kind(text: str) -> str:
    for pattern, kind in _KINDS.items():
        if re.search(pattern, text, re.IGNORECASE):
            return kind
    return ""
