"""Reading the log of a Horovod build: how far it is, and what went wrong. Pure."""

from __future__ import annotations

import re

STEP = re.compile(r"^\s*\[ *(\d+)%\] Building \w+ object (\S+)\.o$", re.MULTILINE)
CAUSES = (
    (
        r"Killed signal terminated program|internal compiler error: Killed|virtual memory exhausted"
        r"|out of memory|Cannot allocate memory",
        "memory ran out: close what takes it, or go where 2 GB are free",
    ),
    (r"No space left on device", "the disk is full: XDG_CACHE_HOME names another place"),
    (
        r"mpi\.h: No such file|Could NOT find MPI",
        "the MPI compiler is there but its headers or libraries are not (on Debian and Ubuntu: "
        "install libopenmpi-dev), or build without: HOROVOD_WITHOUT_MPI=1 make horovod",
    ),
    (
        r"unrecognized command.line option '?-std=c\+\+20|invalid value 'c\+\+20'",
        "the C++ compiler is too old for C++20, which torch's headers need: "
        "name a newer one (CXX=g++-12 make horovod)",
    ),
    (
        r"No CMAKE_C(XX)?_COMPILER|is not able to compile a simple test program",
        "the compiler can't make even an empty program: see the log",
    ),
    (r"Python\.h: No such file", "Python's headers are missing (on Debian: install python3-dev)"),
    (
        r"No matching distribution found|Could not find a version|Max retries exceeded"
        r"|Connection (refused|reset)|Temporary failure in name resolution|Read timed out",
        "pip can't get Horovod's source: check the network and pip's index",
    ),
)

TELLING = re.compile(
    "|".join([r"\berror: ", "CMake Error", "undefined reference", *(c[0] for c in CAUSES)]),
    re.IGNORECASE,
)
# What pip, make and Python say next about an error, and pip's own code, which it prints then.
ECHO = re.compile(
    r"CalledProcessError|subprocess-exited|Failed (building|to build)|\*\*\*"
    r"|Can not execute `setup.py`|except ImportError"
)


def progress(log: str) -> tuple[int, str] | None:
    """How many percent are done and which file is being compiled; None before the first."""
    steps = STEP.findall(log)
    if not steps:
        return None
    percent, path = steps[-1]
    return int(percent), path.rsplit("/", 1)[-1]


def telling_lines(log: str, count: int = 8, width: int = 200) -> list[str]:
    """The last lines that say what went wrong, shortened; without any, the last of all."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if TELLING.search(line) and not ECHO.search(line)]
    return [line[:width] for line in (errors or lines)[-count:]]


def cause(log: str) -> str:
    """What is missing and what to do, as text; empty if the log does not tell."""
    for pattern, words in CAUSES:
        if re.search(pattern, log):
            return words
    return ""
