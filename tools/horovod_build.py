"""Building Horovod's wheel from its source on PyPI, for the torch of this Python.

Horovod's CMake files ask for C++14, torch's headers need C++17 or newer, and the compiler obeys the
last -std it is given: a compiler of two lines that appends one is all it takes.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from horovod_log import cause, progress, telling_lines
from horovod_target import (
    REQUIREMENT,
    NotPossible,
    Target,
    available_bytes,
    cxx_compiler,
    job_count,
    named_by,
)

PROGRESS_SECONDS = 20.0
CPU_MINUTES = 5  # measured: 292 s


def say(step: str) -> None:
    print(f"[horovod] {step}", flush=True)


# --no-build-isolation: setup.py must see the installed torch.
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
ALONE = ("--no-deps", "--no-build-isolation")


def fetch(scratch: Path) -> Path:
    """Download the source; returns the archive's path. Raises NotPossible if it can't be had."""
    say(f"fetching the source of {REQUIREMENT}")
    folder = scratch / "source"
    command = [*PIP, "download", *ALONE, "--no-binary=horovod", f"--dest={folder}", REQUIREMENT]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        raise NotPossible(
            explain("pip could not get its source", done.stdout.decode(errors="replace"))
        )
    (archive,) = folder.iterdir()
    return archive


def build(target: Target, source: Path, scratch: Path, log: Path) -> Path:
    """Make the wheel in `scratch`, with a line of progress now and then; returns its path.

    Everything pip and the compilers say goes to `log`, from its start. Raises NotPossible with
    the log's telling lines and what to do. Leaves no process behind unless it is killed itself.
    """
    jobs = job_count(len(os.sched_getaffinity(0)), available_bytes())
    say(
        f"building it for torch {target.torch} with {' and '.join(target.transports)}"
        + (f" ({target.mpi})" if target.mpi else "")
        + f": some 70 files of C++ with all of torch's headers, {math.ceil(CPU_MINUTES / jobs)} "
        f"minutes or more with {jobs} at a time, most of them for the last files"
    )
    folder = scratch / "wheels"
    # Verbose, or pip keeps the compiler's words to itself. No cache: pip's knows nothing of torch.
    command = [*PIP, "wheel", "-v", *ALONE, "--no-cache-dir", f"--wheel-dir={folder}", str(source)]
    with log.open("wb") as out:
        # A group of its own: pip, CMake, make and the compilers are stopped as one.
        process = subprocess.Popen(
            command,
            env=build_environment(target, scratch, jobs),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = watch(process, log)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if status != 0:
        raise NotPossible(explain("it could not be built", log.read_text(errors="replace")))
    (wheel,) = folder.glob("*.whl")
    return wheel


def watch(process: subprocess.Popen[bytes], log: Path) -> int:
    """Wait for the build, saying now and then how far its log is; returns the exit status."""
    begun = time.monotonic()
    while True:
        try:
            return process.wait(timeout=PROGRESS_SECONDS)
        except subprocess.TimeoutExpired:
            minutes, seconds = divmod(int(time.monotonic() - begun), 60)
            percent, doing = 0, "looking at the machine"
            if step := progress(log.read_text(errors="replace")):
                percent, doing = step[0], f"compiling {step[1]}"
            say(f"{percent:3}% of the files after {minutes}:{seconds:02}, {doing}")


def explain(failure: str, log: str) -> str:
    reason = cause(log)
    return "\n".join([*telling_lines(log), f"{failure}: {reason}." if reason else f"{failure}."])


def build_environment(target: Target, scratch: Path, jobs: int) -> dict[str, str]:
    """The variables that Horovod's setup.py, CMake and make are steered by."""
    compiler = scratch / "c++"
    # No debug information: it is most of the time and of the memory.
    compiler.write_text(f'#!/bin/sh\nexec {cxx_compiler()} "$@" -std=c++20 -g0\n')
    compiler.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_WITH")}
    if not named_by("CC"):  # blank: CMake would look for a program of that name
        environment.pop("CC", None)
    environment.update(
        TMPDIR=str(scratch),
        CXX=str(compiler),
        MAKEFLAGS=f"-j{jobs}",
        CMAKE_GENERATOR="Unix Makefiles",
        CMAKE_POLICY_VERSION_MINIMUM="3.5",  # CMake 4 takes no files as old as gloo's without it
        HOROVOD_WITH_PYTORCH="1",
        HOROVOD_WITHOUT_TENSORFLOW="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_GLOO="1",
    )
    environment["HOROVOD_WITH_MPI" if target.mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    return environment
