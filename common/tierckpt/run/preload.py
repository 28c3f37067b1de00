"""Imports before the fork, and the proof that a fork is safe after them.

A fork copies the calling thread alone: a lock that another thread held stays locked in the child.
And a CUDA context does not survive a fork. So the shim has one thread when it forks, which is
checked, and has not called CUDA.

The modules that the last run of a script had imported are known for the next run: a file under the
user's cache folder for each script and interpreter. Only modules of the standard library and of
installed packages are in it: the user's own may change, and have effects when they are imported.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import signal
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

__all__ = [
    "EVERYTHING",
    "Learned",
    "LearnedFile",
    "UnsafeError",
    "preload",
    "refresh",
    "set_too_late",
    "threads",
]


FORMAT = 1
_OURS = ("tierckpt", "ddp_ckpt", "horovod_ckpt")


def folder() -> Path:
    """The user's folder for all runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "tierckpt" / "run"


class Learned(Struct, frozen=True):
    """The content of a file."""

    modules: tuple[str, ...] = ()
    """Full names, parents first."""
    refused: tuple[str, ...] = ()
    """Names of packages that cannot be imported before a fork."""


class LearnedFile:
    """The file of one script."""

    def __init__(self, program: str, is_module: bool) -> None:
        self._own = program.partition(".")[0] if is_module else ""
        key = program if is_module else os.path.realpath(program)
        text = "\n".join((key, os.getcwd() if is_module else "", sys.prefix, sys.version))
        name = hashlib.sha256(os.fsencode(text)).hexdigest()[:24]
        self.path = folder() / f"{name}.json"

    def read(self) -> Learned:
        """The content; empty if there is no file of this format."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(self.path.read_text())
            if content["format"] == FORMAT:
                return Learned(tuple(content["modules"]), tuple(content["refused"]))
        return Learned()

    def write(self, learned: Learned) -> None:
        """Replace the content. A failure has no effect: the next start takes longer."""
        content = {"format": FORMAT, "modules": learned.modules, "refused": learned.refused}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=self.path.stem, delete=False
            ) as file:
                json.dump(content, file)
            os.replace(file.name, self.path)

    def learn(self) -> None:
        """Record the modules that this process has imported, if the file lacks some."""
        known, here = self.read(), self.imported()
        wanted = [name for name in here if name.partition(".")[0] not in known.refused]
        if not set(wanted) <= set(known.modules):
            self.write(Learned(tuple(wanted), known.refused))

    def refuse(self, package: str) -> None:
        """Do not import this package before a fork from now on."""
        known = self.read()
        modules = tuple(name for name in known.modules if name.partition(".")[0] != package)
        self.write(Learned(modules, tuple(sorted({*known.refused, package}))))

    def imported(self) -> list[str]:
        """Names of modules of the standard library and of installed packages, parents first."""
        folders = _installed()
        own = (*_OURS, self._own)
        return [
            name
            for name, module in list(sys.modules.items())
            if not name.startswith("__")
            and name.partition(".")[0] not in own
            and getattr(getattr(module, "__spec__", None), "name", "") == name
            and _origin(module).startswith(folders)
        ]


def _origin(module: object) -> str:
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin if isinstance(origin, str) else ""


def _installed() -> tuple[str, ...]:
    """Folders of the standard library and of installed packages."""
    found = [
        *site.getsitepackages(),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
    ]
    if site.ENABLE_USER_SITE and site.USER_SITE:
        found.append(site.USER_SITE)
    return tuple(folder.rstrip(os.sep) + os.sep for folder in found)


NEEDED = ("torch", "torch._dynamo", "torch.nn.parallel", "torch.utils.data", "numpy")
"""torch._dynamo, half of torch's time to import, is imported by every optimizer."""
EXPERIMENTS = (
    ("tierckpt.snapshot.tensor_memory", "find"),
    ("tierckpt.snapshot.tensor_memory", "find_tag"),
    ("tierckpt.state.process_state", "python_state"),
    ("tierckpt.state.process_state", "numpy_state"),
)
"""Functions that look, once per process, at the objects of this torch and this Python. What they
find is the same in a forked process."""
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
        for name, experiment in EXPERIMENTS:
            if name in sys.modules:
                with contextlib.suppress(Exception):
                    getattr(sys.modules[name], experiment)()
                _check(name, streams)
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
    """Names of imported packages that a fresh process would find in `folder` instead.

    It looks at the files there, not at the modules: in a forked process to read all their names
    copies thousands of pages."""
    try:
        beside = {entry.removesuffix(".py") for entry in os.listdir(folder)}
    except OSError:
        return
    for name in beside - sys.stdlib_module_names - {*NEVER_HIDDEN}:
        if name not in sys.modules:
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
