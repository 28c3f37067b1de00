"""A job, killed once and resumed, beside the same job undisturbed.

Ranks are forked from a process that has imported torch and made the model (`lib.goodput`), so the
time until the next step is that of meeting, loading and stepping. Each iteration has its own batch,
chosen by its number. The curve is the loss and the norm of the gradients of rank 0, exact.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lib.goodput.killed_job import Rank, be_rank, check_fork
from lib.goodput.methods import RESUMABLE
from lib.methods.method import Job
from lib.papers.models import PaperModel
from lib.processes import MARK, Family

STEPS, KILLED_AT, EVERY = 8, 6, 2
"""Steps of the job; the step after which rank 1 kills itself; the interval of those that are no
level in memory."""
WORLD = 2
LINGER_SECONDS = 120
"""An agent survives the restart, which may take long on a busy machine, and is ended after it."""
_UNDISTURBED: dict[str, list[dict[str, Any]]] = {}
"""Journals of jobs without a kill, by model: the same for all methods."""


class ResumptionError(RuntimeError):
    """A job did not end as it should; the text has the last output of its ranks."""


@dataclass(frozen=True)
class Order:
    """The parameters of a job. `killed_at`: the step of the SIGKILL; 0: none."""

    method: str
    every: int
    killed_at: int
    folder: Path
    memory: Path


class Resumption:
    """The jobs of one model and method. Folders are made here; `memory` is in shared memory."""

    def __init__(
        self, name: str, model: PaperModel, method: str, folder: Path, memory: Path
    ) -> None:
        self.name, self.model, self.method = name, model, method
        self.folder, self.memory = folder, memory
        self._family = Family(uuid.uuid4().hex)

    def run(self, lose_memory: bool) -> dict[str, Any]:
        """Run both jobs; return figures in seconds, and the differences of the curves.

        lose_memory: remove shared memory after the kill, as the loss of a machine's power does.
        """
        torch.manual_seed(1234)
        self._made = self.model.make()
        self.model.optimizer(self._made.parameters())  # imports much, which forks then have
        every = 1 if self.method == "ours" else EVERY
        plain = Order("nothing", 1, 0, self.folder / "plain", self.memory / "plain")
        killed = Order(self.method, every, KILLED_AT, self.folder / "job", self.memory / "job")
        if self.name not in _UNDISTURBED:
            _UNDISTURBED[self.name] = self._job(plain)
        try:
            self._job(killed)
            if lose_memory:
                self._family.kill()  # the agents
                shutil.rmtree(killed.memory)
                killed.memory.mkdir()
            self._job(replace(killed, killed_at=0))
        finally:
            self._family.kill()
        return _figures(_UNDISTURBED[self.name], _journal(killed))

    def _job(self, order: Order) -> list[dict[str, Any]]:
        """Run to the end, or to the kill; return the journal of rank 0."""
        for folder in (order.folder / "checkpoints", order.memory):
            folder.mkdir(parents=True, exist_ok=True)
        (order.folder / "meeting").unlink(missing_ok=True)
        ranks = [Rank(self._fork(order, rank)) for rank in range(WORLD)]
        try:
            ranks[1].reap()
            wanted = -signal.SIGKILL if order.killed_at else 0
            if not order.killed_at:
                ranks[0].reap()
            if ranks[1].status != wanted:
                raise ResumptionError((order.folder / "log").read_text()[-3000:])
        finally:
            for rank in ranks:
                rank.kill()
                rank.reap()
        return _journal(order)

    def _fork(self, order: Order, rank: int) -> int:
        check_fork()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            be_rank(order, parent, lambda: self._train(order, rank))  # type: ignore[arg-type]
        return pid

    # --- in a rank ---------------------------------------------------------------------------

    def _train(self, order: Order, rank: int) -> None:
        torch.set_num_threads(1)
        os.environ["TIERCKPT_AGENT_LINGER_SECONDS"] = str(LINGER_SECONDS)
        os.environ[MARK] = self._family.token  # agents have it
        meeting = f"file://{order.folder}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
        torch.manual_seed(100 + rank)
        model = DistributedDataParallel(self._made)
        optimizer = self.model.optimizer(self._made.parameters())
        method = RESUMABLE[order.method]()
        folder = order.folder / "checkpoints"
        device = torch.device("cpu")
        job = Job(model, self._made, optimizer, folder, order.memory, rank, WORLD, device)
        begin = time.monotonic()
        version = method.resume(job, order.every)
        note = {"resumed_from": version, "begin": begin, "loaded": time.monotonic()}
        _record(order, rank, note)
        while version < STEPS:
            inputs = self.model.sample(self.model.batch, _chance(version, rank))
            optimizer.zero_grad()
            loss = self.model.loss(model, *inputs)
            torch.autograd.backward(loss)
            norm = torch.nn.utils.get_total_norm([p.grad for p in self._made.parameters()])
            method.before_optimizer_step()
            optimizer.step()
            version += 1
            curve = {"step": version, "loss": loss.item(), "gradients": norm.item()}
            _record(order, rank, {**curve, "end": time.monotonic()})
            method.boundary(version, version % order.every == 0)
            if version == order.killed_at and rank == 1:
                _record(order, 0, {"killed": time.monotonic()})
                os.kill(os.getpid(), signal.SIGKILL)
        method.drain()
        dist.barrier()


def _chance(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def _record(order: Order, rank: int, note: dict[str, Any]) -> None:
    if rank == 0:
        with (order.folder / "journal").open("a") as file:
            file.write(json.dumps(note) + "\n")


def _journal(order: Order) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (order.folder / "journal").read_text().splitlines()]


def _figures(undisturbed: list[dict[str, Any]], job: list[dict[str, Any]]) -> dict[str, Any]:
    """Times of the restart, and the largest differences of the curves after it."""
    kill = next(place for place, note in enumerate(job) if "killed" in note)
    begun = next(place for place, note in enumerate(job) if place > kill and "begin" in note)
    start, after = job[begun], job[begun + 1 :]  # the survivor may still end a step after the kill
    steps = [note for note in after if "step" in note]
    right = {note["step"]: note for note in undisturbed if "step" in note}

    def difference(name: str) -> float:
        return max(abs(note[name] - right[note["step"]][name]) for note in steps)

    return {
        "resumed_from": start["resumed_from"],
        "load_seconds": start["loaded"] - start["begin"],
        "back_seconds": steps[0]["end"] - job[kill]["killed"],
        "loss_difference": difference("loss"),
        "gradient_difference": difference("gradients"),
        "curve": [[note["step"], note["loss"], right[note["step"]]["loss"]] for note in steps],
    }


__all__ = ["Resumption", "ResumptionError"]
