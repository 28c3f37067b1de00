"""Imports before the fork, and the proof that a fork is safe after them.

A fork copies the calling thread alone: a lock that another thread held stays locked in the child.
And a CUDA context does not survive a fork. So the shim has one thread when it forks, which is
checked, and has not called CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

NEEDED = ("torch", "torch._dynamo", "torch.nn.parallel", "torch.utils.data", "numpy")
"""torch._dynamo, half of torch's time to import, is imported by every optimizer."""
NEVER_HIDDEN = ("torch", "tierckpt", "ddp_ckpt", "horovod_ckpt", "__main__")
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it, `torch.cuda.is_available()` initializes no CUDA: modules call that on import."""


EVERYTHING = "*"
"""In place of a package: all modules besides torch, numpy and the adapters."""


class UnsafeError(Exception):
    """A module has changed this process so that no fork is safe."""

    def __init__(self, module: str, why: str) -> None:
        name = "a module" if module == EVERYTHING else module
        super().__init__(f"{name} {why} when it is imported")
        self.package = module.partition(".")[0]


def preload(modules: Iterable[str], refused: Iterable[str], adapters: Iterable[str]) -> None:
    """Import torch, the adapters and `modules`, without the packages in `refused`.

    A module that cannot be imported is left to the script. Raises UnsafeError, after which this
    process must not fork."""
    left_out = set(refused)
    if EVERYTHING in left_out:
        modules = ()
    before = os.environ.get(NVML)
    os.environ.setdefault(NVML, "1")
    streams: Any = None
    try:
        for name in (*NEEDED, *adapters, *modules):
            if name in sys.modules or name.partition(".")[0] in left_out:
                continue
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
            if "torch" in sys.modules:
                streams = _check(name, streams)
    finally:
        if before is None:
            os.environ.pop(NVML, None)
    if "torch" in sys.modules and not _is_forkable():
        raise UnsafeError(EVERYTHING, "initializes CUDA")
    gc.collect()
    gc.freeze()


def _check(name: str, streams: Any) -> Any:
    """Check the process after the import of a module; returns torch's random stream."""
    import torch

    if threads() > 1 and _threads_after_fork() > 1:
        raise UnsafeError(name, "starts a thread")
    if torch.cuda.is_initialized():
        raise UnsafeError(name, "initializes CUDA")
    state = torch.default_generator.get_state()
    if streams is not None and not torch.equal(state, streams):
        raise UnsafeError(name, "changes torch's random stream")
    return state


def threads() -> int:
    """Number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def _threads_after_fork() -> int:
    """Number of threads that stay at a fork. OpenBLAS ends its own before a fork, and starts them
    again when they are needed."""
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    return threads()


def _is_forkable() -> bool:
    """True if CUDA works in a forked process: no module has asked the driver for devices."""
    import torch

    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] == 0


def refresh(folder: str) -> None:
    """In a forked process: give it what differs between two fresh processes, and forget packages
    that modules in the script's `folder` hide."""
    import random

    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    for name in _hidden(folder) if folder else ():
        for each in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[each]


def _hidden(folder: str) -> Iterator[str]:
    """Names of imported packages that a fresh process would find in `folder` instead."""
    for name in {each.partition(".")[0] for each in sys.modules}:
        if name in sys.stdlib_module_names or name in NEVER_HIDDEN:
            continue
        origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None) or ""
        path = os.path.join(folder, name)
        there = os.path.isfile(f"{path}.py") or os.path.isfile(os.path.join(path, "__init__.py"))
        if there and not origin.startswith(path):
            yield name


READ_EARLY = ("_NUM_THREADS", "_PROC_BIND", "_AFFINITY", "_WAIT_POLICY")
"""Ends of variables that libraries of threads read when they are loaded."""


def set_too_late(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A warning if the script has set variables that had been read by then; else empty."""
    names = [
        name
        for name, value in after.items()
        if name.endswith(READ_EARLY) and before.get(name) != value
    ]
    if not names:
        return ""
    return (
        f"the script has set {', '.join(sorted(names))}, after torch was imported. Variables that "
        "libraries read when they are loaded have an effect only if they are set before: in the "
        "launcher's environment"
    )


__all__ = ["EVERYTHING", "UnsafeError", "preload", "refresh", "set_too_late", "threads"]
