"""The script's process: its fork, its run as `__main__`, and what it reports to its shim.

The process of the next attempt is forked before the failure: it waits for the order to begin. The
script runs as the interpreter itself runs it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import io
import json
import os
import runpy
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn
from zipimport import zipimporter

from tierckpt import _milestones

from . import preload, process
from .launcher import Options, Place
from .meeting import enter
from .preload import LearnedFile

__all__ = ["ScriptProcess", "forget_first_path", "fork_script", "run_script"]


_kept: list[types.ModuleType] = []
"""The shim's own `__main__`: its functions need its names."""


def forget_first_path() -> None:
    """Remove the path entry that the interpreter added for the shim itself."""
    if not sys.flags.safe_path and sys.path:
        del sys.path[0]


def run_script(options: Options) -> None:
    """Run the program to its end in this process; returns at its end, or raises its exception.

    An exception is printed as without the shim, by `sys.excepthook` and without the shim's frames,
    before it is raised: the interpreter does the rest."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__annotations__ = {}
    _kept.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.argv[:] = [options.program, *options.arguments]
    if options.is_module:
        _insert(os.getcwd())
        runpy_main: Callable[..., Any] = runpy._run_module_as_main  # type: ignore[attr-defined]
        _call(runpy_main, options.program)
    elif os.path.isdir(options.program) or _is_zip(options.program):
        _insert(os.path.abspath(options.program))
        runpy_main = runpy._run_module_as_main  # type: ignore[attr-defined]
        _call(runpy_main, "__main__", False)
    else:
        _insert(os.path.dirname(os.path.realpath(options.program)))
        _call(_run_file, os.path.abspath(options.program), main)


def _insert(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _is_zip(path: str) -> bool:
    try:
        zipimporter(path)
    except ImportError:
        return False
    return True


def _run_file(path: str, main: types.ModuleType) -> None:
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        _end(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _end(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(2)


def _call(function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments)
    except SystemExit:
        raise
    except BaseException as error:
        error.with_traceback(_without_own(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None
        raise


def _without_own(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the script's first frame on; None if there is none (a SyntaxError)."""
    while trace is not None and _is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_own(file: str) -> bool:
    return file in (__file__, runpy.__file__, "<frozen runpy>")


USES_MPI = "mpi"
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)


class ScriptProcess:
    """The shim's view of one attempt's process."""

    def __init__(self, pid: int, reports: int, orders: int) -> None:
        """`reports`: the read end of the pipe on which it reports milestones; `orders`: the write
        end of the one on which it waits."""
        self.pid, self.reports, self._orders = pid, reports, orders
        self.pidfd = os.pidfd_open(pid)
        self.milestone = ""
        self.passed_boundary = self.is_halting = self.uses_mpi = False
        self._buffer = b""

    def begin(self, attempt: int, changes: Mapping[str, str]) -> bool:
        """Let it run the script, with `changes` of its environment. False if it has ended; then it
        is gone, and closed."""
        if os.waitpid(self.pid, os.WNOHANG)[0]:
            self.close()
            return False
        order = {"attempt": attempt, "changes": changes, "at": time.monotonic()}
        with contextlib.suppress(BrokenPipeError), os.fdopen(self._orders, "w") as orders:
            self._orders = -1
            orders.write(json.dumps(order) + "\n")
        return True

    def read(self) -> Iterator[tuple[str, float]]:
        """New milestones and their times, in seconds since the epoch."""
        with contextlib.suppress(BlockingIOError):
            self._buffer += os.read(self.reports, 65536)
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            name, _, at = line.decode().partition(" ")
            self.passed_boundary |= name == _milestones.BOUNDARY
            self.is_halting |= name == _milestones.HALTING
            if name == USES_MPI:
                self.uses_mpi = True
                continue
            self.milestone = name
            yield name, float(at)

    def close(self) -> None:
        """Close the descriptors; the process stays."""
        os.close(self.pidfd)
        os.close(self.reports)
        if self._orders >= 0:
            os.close(self._orders)


def fork_script(
    handlers: process.Handlers,
    learned: LearnedFile,
    options: Options,
    place: Place,
    in_child: Callable[[], None],
    former: int | None,
) -> ScriptProcess | None:
    """Fork the script's process, which waits for its `begin`; returns None in it after that.

    `former`: the process of an attempt that has passed a boundary, and recorded what it had
    imported; None if there is none."""
    reading, writing = os.pipe()
    orders, order = os.pipe()
    pid = process.fork(handlers, in_child)
    if pid:
        os.close(writing)
        os.close(orders)
        os.set_blocking(reading, False)
        return ScriptProcess(pid, reading, order)
    os.close(reading)
    os.close(order)
    try:
        if former is not None:
            process.copy_as(former)
        _wait(handlers, orders)
    except Exception:  # the shim forks another process
        os._exit(1)
    folder = "" if options.is_module else os.path.dirname(os.path.realpath(options.program))
    preload.refresh(folder)
    Reporter(writing, learned if _is_first_here() else None, place.rank == 0, former is not None)
    return None


def _wait(handlers: process.Handlers, orders: int) -> None:
    """Wait for the order to begin, and obey it. Signals from before were for an earlier attempt."""
    with os.fdopen(orders) as file:
        text = file.readline()
    if not text:  # the shim does not need this process
        os._exit(0)
    order = json.loads(text)
    handlers.restore(since=order["at"])
    enter(order["attempt"], order["changes"])


def _is_first_here() -> bool:
    found = [os.environ[name] for name in _LOCAL_RANKS if name in os.environ]
    return not found or found[0] == "0"


class Reporter:
    """Reports to the shim, in the script's process, and records what the next run preloads."""

    def __init__(self, pipe: int, learned: LearnedFile | None, speaks: bool, again: bool) -> None:
        os.set_blocking(pipe, False)
        self._pipe, self._learned, self._speaks, self._again = pipe, learned, speaks, again
        self._process = os.getpid()
        self._told = set[str]()
        self._environment = dict(os.environ)
        self.reached("script")
        _milestones.listen(self.reached)
        atexit.register(self._at_exit)

    def reached(self, name: str) -> None:
        """Report a milestone, once."""
        if name in self._told or os.getpid() != self._process:
            return
        self._told.add(name)
        self._write(name)
        if name == _milestones.ATTACH and _mpi_is_initialized():
            self._write(USES_MPI)
        if name == _milestones.BOUNDARY and not self._again:
            self._learn()

    def _write(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pipe, f"{name} {time.time()}\n".encode())

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._learn()

    def _learn(self) -> None:
        if self._learned is not None:
            self._learned.learn()
            self._learned = None
        if self._speaks:
            self._speaks = False
            if late := preload.set_too_late(self._environment, os.environ):
                print(f"tierckpt run: {late}", file=sys.stderr, flush=True)


def _mpi_is_initialized() -> bool:
    """True if this process has called MPI_Init."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        flag = ctypes.c_int(0)
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/libmpi." in line:
                ctypes.CDLL(line.split()[-1]).MPI_Initialized(ctypes.byref(flag))
                break
        return bool(flag.value)
    return False
