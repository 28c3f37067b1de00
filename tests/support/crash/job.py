"""The job to kill: a real two-rank DDP training over gloo that takes seconds.

It has the parts that make an exact resume hard (BatchNorm, dropout, AdamW, a learning rate that
changes every step, data from random streams) and records everything in a journal, written so that
SIGKILL loses no line. Besides the package's own fault points it has two of its own:

- `script:step=12,phase=backward`, the training loop itself, see `scenario.PHASES`;
- `call:what=...`, just before some function of the package is called, see `CALLS`.

It runs as a fork of `zygote`; its scenario is JSON in the variable `CRASH_JOB`.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
import tierckpt
from tests.support import exact
from tests.support.crash.scenario import RANKS, VARIABLE, Scenario
from tierckpt import _faults
from tierckpt.checkpointer import Restart
from tierckpt.coordination import job_history
from tierckpt.restore import Loader, verification
from tierckpt.snapshot import snapshot
from tierckpt.storage import ImageFile, NoSlotError, Slot, SlotPool

WIDTH, LARGE, ROWS, CLASSES = 16, 8192, 8, 4

CALLS: dict[str, tuple[Any, str]] = {
    "choose_slot": (SlotPool, "choose"),
    "create_slot": (Slot, "create"),
    "make_image": (ImageFile, "make"),
    "take_inventory": (job_history, "take_inventory"),
    "verify": (verification, "verify"),
    "load_shard": (Loader, "load_window"),
    "finish_load": (Loader, "finish"),
    "after_load": (Restart, "_continue_from"),
    "remove_slots": (SlotPool, "close"),
}


class Journal:
    """Record of a rank: one JSON line for each event."""

    def __init__(self, folder: str, rank: int, life: int) -> None:
        path = Path(folder) / f"journal-r{rank}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._life = life

    def write(self, **values: Any) -> None:
        """Add a line; it is in the kernel's hands when this returns."""
        os.write(self._fd, (json.dumps({"life": self._life, **values}) + "\n").encode())


def main(scenario: Scenario, rank: int, meeting: str) -> None:
    """One run of one rank."""
    torch.set_num_threads(1)
    journal = Journal(scenario.folder, rank, scenario.life)
    prepare_faults(scenario, rank, journal)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    model, optimizer, scheduler = make_training(scenario, rank)
    stream = np.random.default_rng(rank)
    ckpt = None
    if scenario.settings is not None:
        ckpt = ddp_ckpt.Checkpointer(
            model,
            optimizer,
            extra={"scheduler": scheduler},
            extra_per_rank={"stream": stream},
            on_event=lambda event: journal.write(
                event=event.name, level=event.level, version=event.version, message=event.message
            ),
            **scenario.settings,
        )
        start = ckpt.restore()
        journal.write(
            start=int(start),
            version=start.version,
            generation=start.generation,
            levels=start.levels,
            rejected=start.rejected,
        )
    else:
        start = 0
        journal.write(start=0)
    if scenario.decay is not None:
        optimizer.param_groups[0]["weight_decay"] = scenario.decay
    for step in range(start, scenario.steps):
        wait_at_gates(scenario, step, journal)
        train_one(step, rank, stream, model, optimizer, scheduler, ckpt, journal)
    if ckpt is not None:
        wait_at_gates(scenario, scenario.steps, journal)
        if ckpt._active.capture.plan is not None:
            journal.write(blocks=len(ckpt._active.capture.plan.layout.blocks))
        ckpt.close()
    journal.write(done=digests(model, optimizer, scheduler, stream))
    dist.barrier()


def make_training(
    scenario: Scenario, rank: int
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2)]
    # Large enough for blocks of their own.
    layers += [nn.Linear(WIDTH, LARGE), nn.ReLU(), nn.Dropout(0.2), nn.Linear(LARGE, WIDTH)]
    # About one bucket per layer: layers are released one after the other.
    model = DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)), bucket_cap_mb=0.001
    )
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=1000)
    return model, optimizer, scheduler


def train_one(
    step: int,
    rank: int,
    stream: np.random.Generator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    ckpt: tierckpt.Checkpointer | None,
    journal: Journal,
) -> None:
    """One iteration."""
    _faults.point("script", step=step, phase="begin")
    source = torch.Generator().manual_seed(1000 * rank + step)
    batch = torch.randn(ROWS, WIDTH, generator=source) + 0.1 * torch.randn(ROWS, WIDTH)
    batch[:, 0] += float(stream.random()) + random.random() + float(np.random.rand())
    target = torch.randint(CLASSES, (ROWS,), generator=source)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), target)
    _faults.point("script", step=step, phase="forward")
    loss.backward()
    journal.write(reduced=step)
    _faults.point("script", step=step, phase="backward")
    optimizer.step()
    _faults.point("script", step=step, phase="optimizer")
    scheduler.step()
    _faults.point("script", step=step, phase="scheduler")
    if ckpt is not None:
        ckpt.step()
    journal.write(step=step, loss=loss.item().hex())
    _faults.point("script", step=step, phase="boundary")


def digests(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    stream: np.random.Generator,
) -> dict[str, str]:
    """Digests of every bit that a next step would depend on, by name."""
    state = {
        **exact.replicated(model, optimizer),
        **exact.buffers(model),
        **exact.streams(),
        "scheduler": exact.image(scheduler.state_dict()),
        "stream": exact.image(stream.bit_generator.state),
    }
    return {name: exact.digest(value) for name, value in state.items()}


def wait_at_gates(scenario: Scenario, step: int, journal: Journal) -> None:
    for name, at in scenario.gates.items():
        if at == step:
            journal.write(waiting=name)
            while not (Path(scenario.folder) / name).exists():
                time.sleep(0.005)


# --- faults --------------------------------------------------------------------------------------


def prepare_faults(scenario: Scenario, rank: int, journal: Journal) -> None:
    """The rules of this rank, for this process and the agents it starts."""
    # Each rank has its own agent, and so its own rules, as if on its own node.
    os.environ["TIERCKPT_NODE"] = f"node{rank}"
    os.environ[_faults.FIRED_VARIABLE] = str(scenario.marks(rank))
    os.environ[_faults.FAULTS_VARIABLE] = scenario.rules.get(str(rank), "")
    _faults._rules = _faults.parse(os.environ[_faults.FAULTS_VARIABLE])
    for what, (owner, name) in CALLS.items():
        setattr(owner, name, announced(what, getattr(owner, name)))
    tell_refusals(journal)
    if scenario.late_release:
        # As on CUDA: a rank ahead asks for its next slot as early as it can.
        snapshot.Snapshot.starts_at_once = True  # type: ignore[assignment,method-assign]
        snapshot.QUIET_SECONDS = 1e6  # a slow machine must not release them either
    if str(rank) in scenario.late_release:
        hold_layers_back(scenario.late_release[str(rank)])


def announced(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with a fault point before it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _faults.point("call", what=what)
        return function(*args, **kwargs)

    return call


def tell_refusals(journal: Journal) -> None:
    """Record the moments at which no slot may be overwritten yet."""
    choose = SlotPool.choose

    def telling(self: SlotPool, protected: set[Any], *args: Any) -> Any:
        try:
            return choose(self, protected, *args)
        except NoSlotError:
            journal.write(refused=max((i.version for i in protected), default=-1))
            raise

    SlotPool.choose = telling  # type: ignore[method-assign]


def hold_layers_back(version: int) -> None:
    """Release no layer of `version` during the backward pass; other versions are unchanged."""

    release = snapshot.Snapshot.release

    def late(self: snapshot.Snapshot, params: Any) -> None:
        if self.facts.id.version != version:
            release(self, params)

    snapshot.Snapshot.release = late  # type: ignore[method-assign]


# --- as a process --------------------------------------------------------------------------------


def run(environment: Mapping[str, str]) -> None:
    """Run the rank that the environment describes; never returns."""
    status = 1
    try:
        scenario = Scenario(**json.loads(environment[VARIABLE]))
        main(scenario, int(environment["RANK"]), environment["CRASH_MEETING"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: gloo's C++ teardown sometimes aborts, which is no finding.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
