"""The one interface that the trainer drives, whatever takes the checkpoints behind it."""

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
    """What the parent tells each rank once. `every` is in steps, `batch` in samples a rank."""

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
    """What a method gets to know about the training it serves, on this rank.

    model: what the training calls; module: the same without DDP's wrapper, if there is one.
    directory: where durable checkpoints go; the same path on all ranks, exists already.
    memory: a folder in shared memory, likewise; the parent removes it in the end.
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

    durable: version -> time.perf_counter() at which the version was finished as far as this
        method goes (see `fsync`), written by whichever thread learns of it. The clock is
        CLOCK_MONOTONIC, so the parent may compare it between processes.
    details: version -> seconds spent in named phases, where a method reports them itself.
    """

    name = "nothing"
    title = "nothing"
    fsync = "-"  # yes: fsync'ed before it counts as durable; no: handed to the page cache only
    peer = False  # compared against, as opposed to ours and the control
    slots = 0  # host buffers a rank, for the memory target
    usual = True  # measured by stall.py when no methods are named
    beside = ""  # method whose ranks train the plain blocks, where being attached costs by itself

    def __init__(self) -> None:
        self.durable: dict[int, float] = {}
        self.details: dict[int, dict[str, float]] = {}

    @classmethod
    def missing(cls) -> str | None:
        """Why this method cannot run here, or None."""
        return None

    @classmethod
    def slots_on(cls, device: str) -> int:
        """`slots` where the training is on this type of device."""
        return cls.slots

    def setup(self, job: Job) -> None:
        """Attach to the training. Collective: every rank calls it at the same point."""

    def boundary(self, version: int, due: bool) -> None:
        """End of a step: `version` optimizer steps are complete. Take a checkpoint if due.

        After it returns, the next forward pass may start; the parameters are safe to change
        only after the next `before_optimizer_step` has returned, too.
        """

    def before_optimizer_step(self) -> None:
        """Last call before the optimizer changes anything: wait for what must be copied."""

    def drain(self) -> None:
        """Return when everything begun is finished on this rank, or raise what went wrong."""

    def busy(self) -> bool:
        """True while something that was begun goes on beside the training, on this rank."""
        return False

    def sweep(self) -> None:
        """Delete old checkpoints. Called on rank 0, drained and outside any measurement."""

    def close(self) -> None:
        """Give back threads, processes and memory. Collective, after `drain`."""

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

    For libraries whose handle can only be waited for, not called back from. A waiting thread
    costs nothing while it is blocked.
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
