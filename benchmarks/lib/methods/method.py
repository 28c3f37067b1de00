"""The interface between the trainer and a method of taking checkpoints."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Setting:
    """The parameters of a rank. `every` is in steps, `batch` in samples per rank."""

    method: str
    launcher: str
    world: int
    model: str
    batch: int
    every: int
    device: str
    backend: str
    directory: str
    memory: str


@dataclass(frozen=True)
class Job:
    """The training of this rank, as a method sees it.

    model: the module that the training calls. module: the same without a DDP wrapper.
    directory: the folder for durable checkpoints; it exists, with the same path on all ranks.
    memory: a folder in shared memory, with the same path on all ranks; the parent removes it.
    """

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    directory: Path
    memory: Path
    rank: int
    world: int
    device: torch.device


class Method:
    """Takes no checkpoint: the base class is also the control row of the table.

    All calls come from the trainer's main thread, in the same order on every rank.

    durable: version -> time.perf_counter() at which the method had finished the version (see
        `fsync`). Any thread may write it. The clock is CLOCK_MONOTONIC, so the parent may compare
        it between processes.
    details: version -> seconds in named phases, if the method reports them.
    """

    name = "nothing"
    title = "nothing"
    fsync = "-"  # yes: fsync'ed before it counts as durable; no: in the page cache only
    peer = False  # an alternative, not ours and not the control
    slots = 0  # host buffers per rank, for the memory target
    usual = True  # measured by stall.py when no methods are named
    beside = ""  # the method of the plain blocks, if being attached has a cost

    def __init__(self) -> None:
        self.durable: dict[int, float] = {}
        self.details: dict[int, dict[str, float]] = {}

    @classmethod
    def missing(cls) -> str | None:
        """The reason if this method cannot run here, or None."""
        return None

    @classmethod
    def slots_on(cls, device: str) -> int:
        """`slots` for a training on this type of device."""
        return cls.slots

    def setup(self, job: Job) -> None:
        """Attach to the training. Collective: every rank calls it at the same point."""

    def boundary(self, version: int, due: bool) -> None:
        """End of a step: `version` optimizer steps are complete. Take a checkpoint if due.

        After it returns, the next forward pass may start; the parameters are safe to change
        only after the next `before_optimizer_step` has returned, too.
        """

    def before_optimizer_step(self) -> None:
        """Last call before the optimizer step: wait for the copies that must precede it."""

    def drain(self) -> None:
        """Wait until all checkpoints are finished on this rank. Raises their errors."""

    def busy(self) -> bool:
        """True while work continues next to the training, on this rank."""
        return False

    def sweep(self) -> None:
        """Delete old checkpoints. Called on rank 0, drained and outside any measurement."""

    def close(self) -> None:
        """Release threads, processes and memory. Collective, after `drain`."""

    def finished(self, version: int) -> None:
        """Note that `version` is durable now. Any thread."""
        self.durable[version] = time.perf_counter()


class FolderMethod(Method):
    """A method that leaves one entry per version in the directory, named v<version>."""

    peer = True

    def setup(self, job: Job) -> None:
        self.job = job

    def path(self, version: int) -> Path:
        return self.job.directory / f"v{version:08d}"

    def sweep(self) -> None:
        for entry in self.job.directory.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


class Waiters:
    """Threads that wait for one background save each and note when it ended.

    For libraries that offer a wait and no callback. A blocked thread costs nothing.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, wait: Callable[[], object], done: Callable[[], object]) -> None:
        """Run `wait()` in a thread, then `done()`."""

        def body() -> None:
            try:
                wait()
                done()
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=body, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait for all, and raise the first error."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._errors:
            raise self._errors.pop()
