"""CheckFreq (FAST '21, Mohan, Phanishayee and Chidambaram), written here from its paper.

*Two phases*: `snapshot` copies the state into a buffer of the host while the next iteration
computes, and the update of the weights waits for it; `persist` writes the buffer to disk after
that, in a process of its own. At most one checkpoint is in flight: the next one waits for its
persist. *Tuned interval*: from a profile, the shortest interval within which a checkpoint
persists, and at which the stalls stay within a budget; `tuned_interval` has the rule. The paper's
snapshot in GPU memory has no counterpart on a CPU.

As published, buffers that the forward pass changes (BatchNorm's statistics) are copied while it
changes them, and random streams are not part of a checkpoint.
"""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from lib.methods.method import FolderMethod, Job, raw_state


class CheckFreq(FolderMethod):
    """Rank 0 takes the checkpoints; the others wait for it at their next reduction."""

    name = "checkfreq"
    title = "CheckFreq, as published"
    fsync = "yes"
    usual = False

    def setup(self, job: Job) -> None:
        super().setup(job)
        self._copied = threading.Event()
        self._copied.set()
        self._written = threading.Event()
        self._written.set()
        self._error: BaseException | None = None
        self._buffer: dict[str, Any] = {}
        self._daemon: Persist | None = Persist() if job.rank == 0 else None

    def boundary(self, version: int, due: bool) -> None:
        if not due:
            return
        if self._daemon is None:
            self.details[version] = {"snapshot": 0.0, "persist": 0.0}
            self.finished(version)
            return
        self.drain()  # at most one checkpoint in flight
        self._copied.clear()
        self._written.clear()
        threading.Thread(target=self._checkpoint, args=(version, self._daemon), daemon=True).start()

    def _checkpoint(self, version: int, daemon: Persist) -> None:
        try:
            begin = time.perf_counter()
            self._buffer = copied(raw_state(self.job), self._buffer)
            self._copied.set()
            middle = time.perf_counter()
            daemon.write(self._buffer, self.path(version))
            end = time.perf_counter()
            self.details[version] = {"snapshot": middle - begin, "persist": end - middle}
            self.finished(version)
        except BaseException as error:
            self._error = error
        finally:
            self._copied.set()
            self._written.set()

    def before_optimizer_step(self) -> None:
        self._copied.wait()

    def drain(self) -> None:
        self._written.wait()
        if self._error is not None:
            raise self._error

    def busy(self) -> bool:
        return not self._written.is_set()

    def close(self) -> None:
        if self._daemon is not None:
            self._daemon.close()


class Persist:
    """The process that writes checkpoints. It receives handles of shared memory, and no bytes."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far,), daemon=True)
        self._process.start()
        far.close()

    def write(self, state: dict[str, Any], path: Path) -> None:
        """Return when the file has its name, and is durable."""
        self._pipe.send((state, str(path)))
        error = self._pipe.recv()
        if error:
            raise OSError(error)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Any) -> None:
    while True:
        try:
            state, path = pipe.recv()
        except EOFError:
            return
        try:
            persist(state, Path(path))
            pipe.send(None)
        except OSError as error:
            pipe.send(str(error))


def persist(state: dict[str, Any], path: Path) -> None:
    """Write and fsync under another name, then rename."""
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def copied(value: Any, old: Any) -> Any:
    """Copy nested dicts and lists, with tensors in shared memory; `old` is a copy to reuse."""
    if isinstance(value, torch.Tensor):
        if not isinstance(old, torch.Tensor) or old.shape != value.shape:
            old = torch.empty_like(value, device="cpu").share_memory_()
        return old.copy_(value.detach())
    if isinstance(value, dict):
        known = old if isinstance(old, dict) else {}
        return {key: copied(each, known.get(key)) for key, each in value.items()}
    if isinstance(value, list):
        return list(value)
    return value


def tuned_interval(
    snapshot: float, persist: float, iteration: float, update: float, budget: float
) -> int:
    """Iterations between checkpoints, from a profile in seconds.

    The update of the weights, at the end of an iteration, waits for the part of the snapshot that
    exceeds the rest of the iteration: the stall. A checkpoint must be on disk before the next one
    starts, and the stalls may take `budget` of the training's time.
    """
    stall = max(0.0, snapshot - (iteration - update))
    fits = math.ceil((snapshot + persist) / iteration)
    return max(1, fits, math.ceil(stall / (budget * iteration)))
