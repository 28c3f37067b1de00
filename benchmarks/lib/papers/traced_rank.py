"""One rank of a Horovod job with a version at every step, for the timeline of `candle`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import horovod_ckpt
from lib.papers.models import MODELS
from lib.training.launchers import HorovodRanks

STEPS = 8


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    ranks = HorovodRanks("gloo")
    found = MODELS[plan["model"]]
    torch.manual_seed(1)
    model = found.make()
    _, optimizer = ranks.distribute(model, found.optimizer(model.parameters()))
    ckpt = horovod_ckpt.Checkpointer(
        model,
        optimizer,
        path=f"{plan['folder']}/files",
        shm_dir=plan["folder"],
        memory_every_steps=1,
        local_every_steps=1_000_000,
        local_every_seconds=0,
    )
    for step in range(STEPS):
        chance = torch.Generator().manual_seed(1000 * step + ranks.rank)
        inputs = found.sample(plan["samples"], chance)
        optimizer.zero_grad()
        torch.autograd.backward(found.loss(model, *inputs))
        optimizer.step()
        ckpt.step()
    ckpt.close()
    ranks.close()


if __name__ == "__main__":
    main()
