"""Models of the benchmarks resume bit for bit, from every level, after a kill of both ranks.

The models are made of the blocks of benchmarks/lib/models.py: BatchNorm and convolutions, and
attention with a tied output layer.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.training import Attached, Job, Place, attach, rank

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
MEMORY, LOCAL, PERSISTENT, END = 3, 5, 7, 9
"""The versions from which runs resume, by the level of each."""


def residual(models: Any) -> nn.Module:
    """ResNet-18's stem, both kinds of its blocks, and its head."""
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = [models.Residual(8, 8, 1), models.Residual(8, 16, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1000))


def narrow(models: Any) -> dict[str, Any]:
    """Models by name: smaller ones than the benchmark's, which would take minutes."""
    return {
        "resnet18": models.Model("", partial(residual, models), models.images(16), 4),
        "gpt2": models.Model(
            "", lambda: models.Transformer(2, 128, 600, 32), models.tokens(16, 600), 4
        ),
    }


def built(name: str) -> tuple[Job, Callable[[], torch.Tensor]]:
    """A job as the benchmark makes it, and its loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        models = importlib.import_module("lib.models")
        for module in ("lib", "lib.models"):
            patch.delitem(sys.modules, module)  # no name to leave to others
        patch.setattr(models, "MODELS", narrow(models))
        kind, module = models.made(name)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Job(model, [optimizer]), partial(kind.loss, model, *kind.batch_of(0))


def trained(job: Job, loss_of: Callable[[], torch.Tensor], step: Callable[[], None]) -> str:
    """One iteration; its exact loss."""
    job.optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    job.optimizer.step()
    step()
    return loss.item().hex()


def undisturbed(name: str) -> tuple[list[str], str]:
    """The course of an undisturbed job, and its final state."""
    job, loss_of = built(name)
    return [trained(job, loss_of, lambda: None) for _ in range(END)], job.digest()


def killed(name: str, place: Place, shared: str, folder: Path) -> None:
    """The first run: all ranks are killed in the middle of an iteration, at the same time."""
    job, loss_of = built(name)
    attached: Attached = attach(job, place, persistent_path=shared)
    assert attached.ckpt.restore() == 0
    course = [trained(job, loss_of, attached.ckpt.step) for _ in range(MEMORY)]
    loss_of().backward()
    attached.ckpt.complete()  # or the copier may not have come so far
    with (folder / f"rank{rank()}.unfinished").open("w") as file:
        json.dump(course, file)
    (folder / f"rank{rank()}.unfinished").rename(folder / f"rank{rank()}.course")
    while len(list(folder.glob("*.course"))) < dist.get_world_size():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def later_lives(name: str, place: Place, shared: str) -> dict[str, Any]:
    """The later runs: the version that each restored, and its further course."""
    course: list[str] = []
    found = []
    for end in (LOCAL, PERSISTENT, END):
        job, loss_of = built(name)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(2 + len(found))  # state not restored shows
        attached: Attached = attach(job, place, persistent_path=shared)
        restored = attached.ckpt.restore()
        found.append((restored.version, restored.levels))
        course += [trained(job, loss_of, attached.ckpt.step) for _ in range(restored, end)]
        attached.ckpt.close()
        dist.barrier()
        if end == PERSISTENT and rank() == 0:
            shutil.rmtree(place.path)
        dist.barrier()
    return {"course": course, "found": found, "digest": job.digest()}


@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_every_model_continues_bit_for_bit_from_every_level(
    name: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    undisturbed_ranks = ranks(2).run(undisturbed, name)
    with pytest.raises(AssertionError) as ended:
        ranks(2).run(killed, name, place, shared, tmp_path)
    assert str(ended.value).count(f"ended with status {-signal.SIGKILL}") == 2, ended.value
    for number, told in enumerate(ranks(2).run(later_lives, name, place, shared)):
        plain, expected = undisturbed_ranks[number]
        before = json.loads((tmp_path / f"rank{number}.course").read_text())
        levels = [("memory", MEMORY), ("local", LOCAL), ("persistent", PERSISTENT)]
        assert told["found"] == [(version, {level: 2}) for level, version in levels]
        assert before + told["course"] == plain
        assert told["digest"] == expected
        assert len(set(plain)) == END, "a loss that does not change would show nothing"
