"""What a build of Horovod is bound to, and what this machine has to build it with."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from bootstrap import output
from horovod_log import telling_lines

VERSION = "0.28.1"  # the newest
REQUIREMENT = f"horovod=={VERSION}"

# Measured with GCC 12: 3.4 GiB at the peak of two jobs.
BYTES_PER_JOB = 1_850_000_000
# Horovod's own switches, which change what is built: they get wheels of their own.
SWITCHES = ("HOROVOD_GPU", "HOROVOD_CUDA", "HOROVOD_NCCL", "HOROVOD_BUILD_", "HOROVOD_CPU_")


class NotPossible(Exception):
    """Why there can be no Horovod here, and what to do about it, as text for the screen."""


@dataclass(frozen=True)
class Target:
    """What a wheel is bound to: under another one it must not be used."""

    python: str
    torch: str
    cxx11_abi: bool
    mpi: str
    """Library and version, for example openmpi-4.1.4; empty: without MPI."""
    machine: str
    switches: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name of this target's folder in the cache, fit for CMake (see make_horovod)."""
        parts = [f"horovod-{VERSION}", self.python, f"torch-{self.torch}", self.mpi or "no-mpi"]
        parts += [self.machine, f"cxx11abi{self.cxx11_abi:d}", *self.switches]
        return re.sub(r"[^\w.=-]", "_", "-".join(parts))

    @property
    def transports(self) -> tuple[str, ...]:
        return ("gloo", "mpi") if self.mpi else ("gloo",)


def this_target() -> Target:
    """The target of this Python on this machine. Raises NotPossible without torch."""
    facts = output(
        sys.executable,
        "-c",
        "import torch; print(torch.__version__, torch.compiled_with_cxx11_abi())",
    )
    if facts is None:
        raise NotPossible("torch cannot be imported here, and Horovod is built for a torch.")
    torch, cxx11_abi = facts.split()
    return Target(
        python=str(sys.implementation.cache_tag),
        torch=torch,
        cxx11_abi=cxx11_abi == "True",
        mpi=mpi_library(),
        machine=platform.machine(),
        switches=tuple(sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(SWITCHES))),
    )


# --- what the machine has ------------------------------------------------------------------------


def mpi_unwanted() -> bool:
    """Whether the user wants a Horovod without MPI, whatever is here."""
    return os.environ.get("HOROVOD_WITHOUT_MPI") == "1"


def mpi_compiler() -> str | None:
    """The MPI compiler that CMake will find; None without one or if the user wants none."""
    return None if mpi_unwanted() else shutil.which("mpicxx") or shutil.which("mpic++")


def mpi_library() -> str:
    """Library and version behind the MPI compiler; empty without one.

    Raises NotPossible if the compiler is there and its headers are not.
    """
    compiler = mpi_compiler()
    if compiler is None:
        return ""
    done = subprocess.run(
        [compiler, "-E", "-dM", "-x", "c++", "-"],
        input="#include <mpi.h>\n",
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != 0:
        words = [
            *telling_lines(done.stderr),
            f"{compiler} is there, but can't compile for the reason above.",
            "Mend that (on Debian and Ubuntu: install libopenmpi-dev and g++), or do without MPI: "
            "HOROVOD_WITHOUT_MPI=1 make horovod",
        ]
        raise NotPossible("\n".join(words))
    return mpi_name(done.stdout)


def mpi_name(macros: str) -> str:
    """openmpi-4.1.4 from the preprocessor's macros of mpi.h."""
    defined = dict(re.findall(r'^#define (\w*VERSION\w*) "?([\w.]+)"?$', macros, re.MULTILINE))
    # The first two are made from MPICH and say that they are MPICH, too.
    for name, macro in (
        ("intelmpi", "I_MPI_VERSION"),
        ("mvapich", "MVAPICH2_VERSION"),
        ("mpich", "MPICH_VERSION"),
    ):
        if macro in defined:
            return f"{name}-{defined[macro]}"
    if "OMPI_MAJOR_VERSION" in defined:
        parts = ("MAJOR", "MINOR", "RELEASE")
        numbers = (defined.get(f"OMPI_{part}_VERSION", "0") for part in parts)
        return f"openmpi-{'.'.join(numbers)}"
    return f"mpi-{defined.get('MPI_VERSION', '0')}.{defined.get('MPI_SUBVERSION', '0')}"


def named_by(variable: str) -> str:
    """The program that an environment variable names, maybe with options; empty: none.

    Raises NotPossible for what no shell could read either.
    """
    value = os.environ.get(variable, "")
    try:
        return next(iter(shlex.split(value)), "")
    except ValueError as error:
        raise NotPossible(f"{variable} is {value!r}, which can't be read: {error}.") from error


def cxx_compiler() -> str | None:
    """The C++ compiler's command: CXX, else the first one found."""
    if chosen := named_by("CXX"):
        return os.environ["CXX"] if shutil.which(chosen) else None
    return next(filter(shutil.which, ("g++", "c++", "clang++")), None)


def require_tools() -> None:
    """Raises NotPossible, naming everything that a build needs and this machine lacks."""
    cc, cxx = named_by("CC"), named_by("CXX")
    present = {
        f"{cxx} (which CXX names)" if cxx else "a C++ compiler (g++)": cxx_compiler(),
        f"{cc} (which CC names)" if cc else "a C compiler (gcc)": (
            shutil.which(cc) if cc else shutil.which("gcc") or shutil.which("cc")
        ),
        "cmake": shutil.which(os.environ.get("HOROVOD_CMAKE") or "cmake"),
        "make": shutil.which("make"),
        "Python's headers (python3-dev)": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    if missing := [words for words, there in present.items() if not there]:
        raise NotPossible(
            f"to build it, this machine lacks {', '.join(missing)}.\n"
            "Install that (on Debian and Ubuntu: apt-get install g++ cmake make python3-dev), "
            "then run make horovod."
        )


def available_bytes() -> int:
    """Memory that jobs may take: what is free, and no more than this container's limit."""
    free = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    amounts = [1024 * int(free[1])] if free else []
    root = Path("/sys/fs/cgroup")
    group = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    folder = root / (group[1] if group else "")
    limits = [place / "memory.max" for place in (folder, *folder.parents)]
    for limit in (*limits, root / "memory" / "memory.limit_in_bytes"):  # versions 2 and 1
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            amounts.append(int(text))
    return min(amounts, default=0)


def job_count(cores: int, memory_bytes: int) -> int:
    """As many compilers at a time as there are cores and memory for, and at least one."""
    return max(1, min(cores, memory_bytes // BYTES_PER_JOB))
