"""The script that elastic Horovod runs and the tests kill: small, and recorded in a journal.

It has the parts that make an exact resume hard (BatchNorm, dropout, AdamW, clipped gradients, a
learning rate that changes every step, data from random streams, an ElasticSampler) and epochs with
an end that changes values only. Besides the ElasticSampler it has a ResumableSampler: its samples
are recorded and not trained on. Only the state distributes them to the current ranks. Only the
import depends on checkpoints: with ELASTIC_HVD=horovod_ckpt.torch it is a plain script for Horovod,
and settings are in the environment.

Fault points, besides the package's own (see `tierckpt._faults`):

- `elastic:place=backward,step=5,rank=1`, half through the backward pass; also `synchronized` and
`updated`, before and after the optimizer's step; `commit`, between saving and asking for new
  hosts; `epoch`, the same in the commit that ends an epoch;
- `elastic:place=loading,rank=0`, in `sync()`, before a shard is loaded.

The test opens gates by making the file `gate-<name>` in the folder ELASTIC_FOLDER.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support import exact
from tests.support.crash.own_state import Decaying, Metered, own_digests
from tierckpt import ResumableSampler, _faults
from tierckpt.restore import Loader

hvd: Any = importlib.import_module(os.environ.get("ELASTIC_HVD", "horovod.torch"))
if hvd.__name__ == "horovod.torch":
    from horovod_ckpt.elastic import TorchState
else:
    TorchState = hvd.elastic.TorchState

FOLDER = Path(os.environ["ELASTIC_FOLDER"])
OPTIONS: dict[str, Any] = json.loads(os.environ["ELASTIC_OPTIONS"])
"""`steps`: their number; `gates`: names, by the step before which all ranks wait there; `joins`:
steps after which rank 0 waits, in the commit, until Horovod has reported hosts to it; `machines`:
every host has memory and disk of its own."""
WIDTH, ROWS, CLASSES = 32, 4, 4
EPOCH_STEPS = 8
"""Steps of an epoch on two ranks. Samples are distributed without a remainder on one rank, too."""


def tell(**line: Any) -> None:
    """Add a line to the journal; it is in the kernel's hands when this returns."""
    line = {"rank": hvd.rank(), "size": hvd.size(), "pid": os.getpid(), **line}
    fd = os.open(FOLDER / "journal.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, (json.dumps(line) + "\n").encode())
    os.close(fd)


def point(place: str, **where: int) -> None:
    _faults.point("elastic", place=place, rank=hvd.rank(), **where)


def build() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(7)
    layers: list[nn.Module] = [Metered(WIDTH)]
    for _ in range(2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2)]
    layers += [nn.Linear(WIDTH, 2048), nn.ReLU(), nn.Linear(2048, CLASSES)]
    model = nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        Decaying(model.parameters()), named_parameters=model.named_parameters()
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=1000)
    return model, optimizer, schedule


def digests(state: Any) -> dict[str, str]:
    """Digests of every bit that a next step would depend on, by name."""
    found = {
        **exact.replicated(state.model, state.optimizer),
        **exact.buffers(state.model),
        **exact.streams(),
        "schedule": exact.image(state.schedule.state_dict()),
        "sampler": exact.image(state.sampler.state_dict()),
        "position": exact.image(state.resumable.position.state_dict()),
        "values": exact.image([state.step, state.epoch, state.seen]),
    }
    own = own_digests(state.model, state.optimizer)
    return {**{name: exact.digest(value) for name, value in found.items()}, **own}


def train(state: Any) -> None:
    restored = getattr(state, "restored", None)
    levels = None if restored is None else restored.levels
    tell(began=True, levels=levels, **now(state))
    while state.step < OPTIONS["steps"]:
        indices, dealt = iter(state.sampler), iter(state.resumable)
        for _ in range(len(state.sampler) // ROWS):
            train_one(state, [next(indices) for _ in range(ROWS)], next(dealt))
            if state.step == OPTIONS["steps"]:
                break
        else:
            state.epoch += 1
            state.seen = [*state.seen, state.step]
            state.sampler.set_epoch(state.epoch)
            state.resumable.set_epoch(state.epoch)
            commit(state, "epoch")
    tell(done=True, **now(state))


def train_one(state: Any, indices: list[int], dealt: list[int]) -> None:
    step = state.step
    wait_at_gate(OPTIONS["gates"].get(str(step)))
    source = torch.Generator().manual_seed(1000 * hvd.rank() + step)
    batch = torch.randn(ROWS, WIDTH, generator=source) + 0.1 * torch.randn(ROWS, WIDTH)
    batch[:, 0] += random.random() + float(np.random.rand()) + torch.tensor(indices) / 100
    target = torch.tensor(indices) % CLASSES
    state.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(state.model(batch), target)
    loss.backward()
    state.optimizer.synchronize()
    nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    point("synchronized", step=step)
    with state.optimizer.skip_synchronize():
        state.optimizer.step()
    point("updated", step=step)
    state.schedule.step()
    state.sampler.record_batch(0, ROWS)
    state.resumable.step()
    state.step += 1
    commit(state, "commit", indices=indices, dealt=dealt, loss=loss.item().hex())


def now(state: Any) -> dict[str, Any]:
    """Position of the state, and digests of every bit."""
    return {"step": state.step, "epoch": state.epoch, "digests": digests(state)}


def commit(state: Any, place: str, **line: Any) -> None:
    tell(commit=place, **line, **now(state))
    if place == "commit" and state.step in OPTIONS["joins"] and hvd.rank() == 0:
        tell(waiting="hosts", step=state.step)
        while state._host_messages.empty():
            time.sleep(0.01)
    state.where = place
    state.commit()


def wait_at_gate(name: str | None) -> None:
    if name is not None:
        tell(waiting=name)
        while not (FOLDER / f"gate-{name}").exists():
            time.sleep(0.01)


def announced(function: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    return call


def main() -> None:
    if OPTIONS["machines"]:
        for variable in ("TIERCKPT_SHM_DIR", "TIERCKPT_PATH"):
            own = Path(os.environ[variable], os.environ["HOROVOD_HOSTNAME"])
            own.mkdir(exist_ok=True)
            os.environ[variable] = str(own)
        os.environ["TIERCKPT_NODE"] = os.environ["HOROVOD_HOSTNAME"]
    hvd.init()
    model, optimizer, schedule = build()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + hvd.rank())
    samples = range(2 * ROWS * EPOCH_STEPS)
    sampler = hvd.elastic.ElasticSampler(samples, seed=5)
    resumable = ResumableSampler(samples, ROWS, rank=hvd.rank(), ranks=hvd.size(), seed=5)
    objects = {"schedule": schedule, "sampler": sampler, "resumable": resumable}
    state = TorchState(model, optimizer, **objects, step=0, epoch=0, seen=[])
    # The middle of the backward pass: later layers' reductions were launched, earlier ones not.
    model[5].weight.register_hook(lambda _: point("backward", step=state.step))
    state.where = ""
    state.register_reset_callbacks([lambda: tell(reset=True)])
    save = state.save

    def save_and_tell() -> None:
        save()
        point(state.where, step=state.step - 1)

    state.save = save_and_tell
    Loader.load_window = announced(Loader.load_window, lambda: point("loading"))
    hvd.elastic.run(train)(state)


if __name__ == "__main__":
    sys.exit(main())
