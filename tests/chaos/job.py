"""One rank of the job that the chaos test breaks, under DDP or Horovod.

Training, journal and fault points are those of `tests.support.crash.job`. It waits before chosen
steps until the driver has applied its faults, so that a schedule means the same in every run.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from tests.support.crash.job import CALLS, CLASSES, WIDTH, Journal, announced, digests, train_one
from tests.support.crash.own_state import Decaying, Metered, own_digests
from tests.support.crash.zygote import become
from tierckpt import _faults

JOURNAL = "-journal"
PACE_SECONDS = 0.02
"""Pause per step: a net this small would outrun the processes that copy its versions."""


@dataclass(frozen=True)
class Orders:
    """Orders of one rank for one run."""

    folder: str
    life: int
    rank: int
    ranks: int
    steps: int
    launcher: str
    """`ddp` or `horovod`; with JOURNAL at its end, the job keeps a journal of gradients."""
    settings: dict[str, Any] | None
    """None: the reference, which takes no checkpoints and records its state after every step."""
    gates: tuple[int, ...] = ()
    """Versions after the start; before their steps the rank waits for a file `gate-<life>-<at>`."""
    dies_loading_at: str = ""
    """Key of `CALLS`: the place of a kill during the restore."""
    rules: tuple[tuple[str, int], ...] = ()
    """Faults of the trainer: (rule with {} for a version, versions after the start)."""
    agent_rule: str = ""
    node: int = 0

    @property
    def marks(self) -> Path:
        """Folder in which rules leave a file when they fire."""
        return Path(self.folder) / f"marks-{self.life}-r{self.rank}"


def run(text: str, environment: dict[str, str], log: str) -> None:
    """Run the rank that the orders describe; never returns."""
    become(environment, log)
    status = 1
    try:
        main(Orders(**json.loads(text)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: gloo's C++ teardown sometimes aborts, which is no finding.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def to_json(orders: Orders) -> str:
    """Orders in the form that `run` takes."""
    return json.dumps(asdict(orders))


def main(orders: Orders) -> None:
    """One run of one rank."""
    torch.set_num_threads(1)
    # Memory stands for the disks, and must not be both levels at once.
    mock.patch("tierckpt.storage.slots.memory_kind", return_value="").start()
    rank = orders.rank
    journal = Journal(orders.folder, rank, orders.life)
    prepare_faults(orders)
    model, optimizer, scheduler, attach, leave = LAUNCHERS[orders.launcher](orders)
    if orders.launcher.endswith(JOURNAL):
        optimizer.calls, optimizer.rates = 0, torch.zeros(3)  # no remainder; see `own_digests`
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(100 + rank)
    stream = np.random.default_rng(rank)

    def state() -> dict[str, str]:
        return {**digests(model, optimizer, scheduler, stream), **own_digests(model, optimizer)}

    ckpt, start = None, 0
    if orders.settings is None:
        journal.write(version=0, digests=state())
    else:
        carried = {"extra": {"scheduler": scheduler}, "extra_per_rank": {"stream": stream}}
        ckpt = attach(on_event=partial(note, journal), **carried, **orders.settings)
        start = come_back(ckpt, state, journal)
    _faults._rules = [
        rule for text, at in orders.rules for rule in _faults.parse(text.format(start + at))
    ]
    for step in range(start, orders.steps):
        wait_at_gate(orders, step - start, journal)
        train_one(step, rank, stream, model, optimizer, scheduler, ckpt, journal)
        if ckpt is None:
            journal.write(version=step + 1, digests=state())
        else:
            time.sleep(PACE_SECONDS)
    if ckpt is not None:
        ckpt.close()
    journal.write(done=state())
    leave()


def note(journal: Journal, event: Any) -> None:
    """Record an event about a version, for the driver."""
    said = {"event": event.name, "level": event.level, "version": event.version}
    journal.write(**said, message=event.message)


def come_back(ckpt: Any, state: Callable[[], dict[str, str]], journal: Journal) -> int:
    """Restore, and record every restored bit; returns the iteration to continue from."""
    found = ckpt.restore()
    journal.write(
        start=int(found),
        version=found.version,
        generation=found.generation,
        own_generation=ckpt._history.lineage[-1][0],
        levels=found.levels,
        rejected=found.rejected,
        digests=state(),
    )
    return int(found)


def wait_at_gate(orders: Orders, made: int, journal: Journal) -> None:
    if made in orders.gates:
        journal.write(waiting=made)
        while not (Path(orders.folder) / f"gate-{orders.life}-{made}").exists():
            time.sleep(0.002)


def prepare_faults(orders: Orders) -> None:
    """Install rules of the trainer, and, in the environment, of the agents that it starts."""
    orders.marks.mkdir()
    os.environ[_faults.FIRED_VARIABLE] = str(orders.marks)
    os.environ[_faults.FAULTS_VARIABLE] = orders.agent_rule
    if orders.dies_loading_at:
        _faults._rules = _faults.parse(f"kill@call:what={orders.dies_loading_at}")
        owner, name = CALLS[orders.dies_loading_at]
        setattr(owner, name, announced(orders.dies_loading_at, getattr(owner, name)))


# --- the two libraries ---------------------------------------------------------------------------


def make_net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        Metered(WIDTH),
        nn.Linear(WIDTH, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 2048),
        nn.ReLU(),
        nn.Linear(2048, CLASSES),
    )


Training = tuple[nn.Module, Any, Any, Callable[..., Any], Callable[[], None]]
"""Model, optimizer, schedule, the function that attaches a checkpointer, and the library's
    shutdown."""


def ddp(orders: Orders) -> Training:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ddp_ckpt

    meeting = f"file://{orders.folder}/meeting{orders.life}"
    dist.init_process_group("gloo", init_method=meeting, rank=orders.rank, world_size=orders.ranks)
    model = DistributedDataParallel(make_net(), bucket_cap_mb=0.1)
    optimizer = make_optimizer(orders, model)

    def attach(**settings: Any) -> Any:
        return ddp_ckpt.Checkpointer(model, optimizer, **settings)

    return model, optimizer, schedule_of(optimizer), attach, dist.barrier


def horovod(orders: Orders) -> Training:
    import horovod.torch as hvd

    import horovod_ckpt

    hvd.init()
    model = make_net()
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(orders, model), named_parameters=model.named_parameters()
    )

    def attach(**settings: Any) -> Any:
        return horovod_ckpt.install(optimizer, model, **settings)

    return model, optimizer, schedule_of(optimizer), attach, hvd.shutdown


def make_optimizer(orders: Orders, model: nn.Module) -> Any:
    """An optimizer with a remainder; beside a journal, one of torch's own."""
    if orders.launcher.endswith(JOURNAL):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Decaying(model.parameters())


def schedule_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=1000)


LAUNCHERS = {"ddp": ddp, "horovod": horovod, "ddp-journal": ddp, "horovod-journal": horovod}
