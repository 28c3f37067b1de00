"""One rank of one method's training: a process that trains on command and times itself.

`teams.Team` starts it with two arguments: the path of a socket, and the Setting as JSON. It reads
commands, runs blocks of steps, and answers with plain values. Between commands it is blocked in a
read and costs nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib import models
from lib.methods.method import Job, Method, Setting
from lib.methods.registry import METHODS
from lib.training.launchers import LAUNCHERS, check_world

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)
MALLOC_LEAST_BYTES = 128 << 10
MALLOC_DYNAMIC_BYTES = 32 << 20  # the limit of glibc's dynamic thresholds


class Trainer:
    """The training loop of one rank and the clock around it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.device = torch.device(setting.device)
        torch.set_num_threads(1)
        if self._cuda():
            torch.cuda.set_device(0)  # all ranks share one GPU
        self.ranks = LAUNCHERS[setting.launcher](setting.backend)
        check_world(self.ranks, setting.world)
        kind, made = models.made(setting.model)
        self.module = made.to(self.device)
        inputs = [part.to(self.device) for part in kind.batch_of(0)]
        self.loss = lambda: kind.loss(self.model, *inputs)
        optimizer = kind.optimizer(self.module.parameters())
        self.model, self.optimizer = self.ranks.distribute(self.module, optimizer)
        # The base class takes no checkpoints: blocks before `attach` are training alone.
        self.method: Method = Method()
        self.version = 0
        self.unmarked = False  # a step was completed without its boundary yet
        self.marking = False  # boundaries are called in blocks with checkpoints only
        self.awaited: int | None = None  # the checkpoint with copies that this step may wait for
        self.calls: dict[int, dict[str, float]] = {}
        self.call_cpu_s = 0.0

    def attach(self) -> None:
        """Set up the method on the running training."""
        setting = self.setting
        self.method = METHODS[setting.launcher][setting.method]()
        self.unmarked = False
        job = Job(
            model=self.model,
            module=self.module,
            optimizer=self.optimizer,
            directory=Path(setting.directory),
            memory=Path(setting.memory),
            rank=self.ranks.rank,
            world=self.ranks.world,
            device=self.device,
            launcher=setting.launcher,
        )
        self.method.setup(job)

    def state_bytes(self) -> int:
        """Bytes of model and optimizer state: the payload of a checkpoint."""
        tensors = list(self.module.state_dict().values())
        for slots in self.optimizer.state.values():
            tensors += [value for value in slots.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def iterate(self, due: bool = False) -> None:
        """Call the boundary of the previous step, then train one step.

        The boundary comes first, so that the steps after a checkpoint, which bear its cost, are in
        the same block as its call.
        """
        if self.unmarked and self.marking:
            self._timed_boundary(due)
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss())
        self._timed_wait()
        self.optimizer.step()
        self.version += 1
        self.unmarked = True

    def _timed_boundary(self, due: bool) -> None:
        start, cpu = time.perf_counter(), time.thread_time()
        self.method.boundary(self.version, due)
        end = time.perf_counter()
        self.call_cpu_s += time.thread_time() - cpu
        if due:
            self.calls[self.version] = {"start": start, "call": end - start, "wait": 0.0}
            self.awaited = self.version

    def _timed_wait(self) -> None:
        start, cpu = time.perf_counter(), time.thread_time()
        self.method.before_optimizer_step()
        end = time.perf_counter()
        self.call_cpu_s += time.thread_time() - cpu
        if self.awaited is not None:  # only the step after a checkpoint may have to wait
            self.calls[self.awaited]["wait"] = end - start
            self.awaited = None

    def synchronize(self) -> None:
        """Wait for the training, not for a copy that may continue during the next step."""
        if self._cuda():
            torch.cuda.current_stream().synchronize()

    def block(self, steps: int, checkpoints: bool, every: int | None = None) -> dict[str, Any]:
        """One warm-up step, `steps` timed ones, one to settle, and a drain.

        The settling step lets a method that copies during the *next* step finish its last
        checkpoint; it is part of a plain block, too, so that CPU-seconds compare. `every` replaces
        the setting's interval.
        """
        self.calls, self.call_cpu_s = {}, 0.0
        # The work at boundaries is part of the cost of a method, also where no checkpoint is due,
        # and not of plain training.
        self.marking, every = checkpoints, every or self.setting.every
        main_cpu = time.thread_time()
        if self._cuda():
            torch.cuda.reset_peak_memory_stats()
        self.iterate()
        self.ranks.barrier()
        self.synchronize()
        start = time.perf_counter()
        ends = []
        for index in range(steps):
            self.iterate(due=checkpoints and index % every == 0)
            ends.append(time.perf_counter())
        self.synchronize()
        ends[-1] = time.perf_counter()
        self.iterate()
        self._drain()
        return {
            "start": start,
            "ends": ends,
            "main_cpu_s": time.thread_time() - main_cpu,
            "call_cpu_s": self.call_cpu_s,
            "gpu_peak_bytes": self._gpu_peak_bytes(),
            "checkpoints": self._harvest(),
        }

    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def _gpu_peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self._cuda() else 0

    def _drain(self) -> None:
        cpu = time.thread_time()
        self.method.drain()
        self.call_cpu_s += time.thread_time() - cpu

    def _harvest(self) -> dict[str, dict[str, Any]]:
        """Timings of this block's checkpoints; `durable` is missing where one was skipped."""
        result: dict[str, dict[str, Any]] = {}
        for version, call in self.calls.items():
            notes = {**call, "details": self.method.details.get(version, {})}
            if version in self.method.durable:
                notes["durable"] = self.method.durable[version]
            result[str(version)] = notes  # text, since JSON has no other keys
        return result

    def close(self) -> None:
        self.method.close()
        self.ranks.close()

    def answer(self, command: str, arguments: dict[str, Any]) -> Any:
        """Run one command of the parent."""
        if command == "block":
            return self.block(**arguments)
        if command == "attach":
            return self.attach()
        if command == "keep_freed":
            return keep_freed()
        if command == "busy":
            return self.method.busy()
        if command == "sweep":
            return self.method.sweep() if self.ranks.rank == 0 else None
        if command == "close":
            return self.close()
        raise ValueError(f"unknown command {command!r}")


def keep_freed(keep: bool = True) -> None:
    """Let glibc's malloc keep freed memory (its own behaviour), or return it to the system at once.

    The second works only before malloc has kept a large block. Other C libraries are left alone.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MALLOC_DYNAMIC_BYTES if keep else MALLOC_LEAST_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, (2 * MALLOC_DYNAMIC_BYTES) if keep else MALLOC_LEAST_BYTES)


def main() -> None:
    door = socket.socket(socket.AF_UNIX)
    door.connect(sys.argv[1])
    pipe = Connection(door.detach())
    # The death of the parent closes the pipe: exit without an error.
    with suppress(EOFError, BrokenPipeError):
        try:
            keep_freed(False)  # until memory has been measured
            trainer = Trainer(Setting(**json.loads(sys.argv[2])))
            pipe.send(("ok", (trainer.ranks.rank, os.getpid())))
            trainer.iterate()  # the first step creates the optimizer's state
            pipe.send(("ok", trainer.state_bytes()))
            command = ""
            while command != "close":
                command, arguments = pipe.recv()
                pipe.send(("ok", trainer.answer(command, arguments)))
        except (EOFError, BrokenPipeError):
            raise
        except Exception:
            pipe.send(("error", traceback.format_exc()))
            pipe.poll(None)  # the parent ends this process; an exit now would abort the others


if __name__ == "__main__":  # DCP's daemon imports this file
    main()
