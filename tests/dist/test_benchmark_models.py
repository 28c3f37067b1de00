"""What the benchmarks train resumes to the bit, from every level, on two ranks.

The models are those of benchmarks/models.py, small where the benchmark's own would take minutes;
stall.py, goodput.py and levels.py train them, and restart.py layers as `linear` has them.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.dist.training import Attached, Job, Place, attach, rank

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MEMORY, LOCAL, PERSISTENT, END = 3, 5, 7, 9
"""The versions that lives go on from, by the level that they find it on."""


def residual(models: Any) -> nn.Module:
    """ResNet-18's stem, both kinds of its blocks, and its head."""
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = [models.Residual(8, 8, 1), models.Residual(8, 16, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1000))


def narrow(models: Any) -> dict[str, Any]:
    """By name, maker and sample as `models.build` wants them; None: the benchmark's own."""
    return {
        "toy": None,
        "linear": (partial(models.linear_stack, 2, 512), models._vectors(512)),
        "resnet18": (partial(residual, models), models._images(16)),
        "gpt2": (lambda: models.Transformer(2, 128, 600, 32), models._words(600, 16)),
        "bert-large": (lambda: models.Transformer(3, 64, 400, 24), models._words(400, 24)),
    }


def built(name: str) -> tuple[Job, Callable[[], torch.Tensor]]:
    """A job as the benchmark makes it, and its loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        models = importlib.import_module("models")
        patch.delitem(sys.modules, "models")  # no name to leave to others
        assert set(narrow(models)) == set(models.NAMES), "a model that is not tested"
        patch.setattr(models, "_MODELS", {**models._MODELS, name: narrow(models)[name]})
        if narrow(models)[name] is None:
            patch.undo()
        workload = models.build(name, 4, torch.device("cpu"))
    model = DistributedDataParallel(workload.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Job(model, [optimizer]), partial(workload.loss, model)


def trained(job: Job, loss_of: Callable[[], torch.Tensor], step: Callable[[], None]) -> str:
    """One iteration; its exact loss."""
    job.optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    job.optimizer.step()
    step()
    return loss.item().hex()


def with_and_without(name: str, place: Place, shared: str) -> dict[str, Any]:
    """The course of a job that nothing happens to, and that of one with four lives."""
    job, loss_of = built(name)
    plain = [trained(job, loss_of, lambda: None) for _ in range(END)]
    expected = job.digest()

    course: list[str] = []
    found = []
    for end in (MEMORY, LOCAL, PERSISTENT, END):
        job, loss_of = built(name)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(1 + len(found))  # what is not restored shows
        attached: Attached = attach(job, place, persistent_path=shared)
        restored = attached.ckpt.restore()
        found.append((restored.version, restored.levels))
        course += [trained(job, loss_of, attached.ckpt.step) for _ in range(restored, end)]
        if end == MEMORY:
            loss_of().backward()  # it dies in the middle of an iteration
            attached.ckpt.complete()  # or the copier may not have come so far
            attached.ckpt.abandon()
        else:
            attached.ckpt.close()
        dist.barrier()
        if end == PERSISTENT and rank() == 0:
            shutil.rmtree(place.path)
        dist.barrier()
    return {"plain": plain, "course": course, "found": found, "same": job.digest() == expected}


@pytest.mark.parametrize("name", ["toy", "linear", "resnet18", "gpt2", "bert-large"])
def test_every_model_goes_on_bit_for_bit_from_every_level(
    name: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    for told in ranks(2).run(with_and_without, name, place, str(tmp_path / "shared")):
        levels = [("memory", MEMORY), ("local", LOCAL), ("persistent", PERSISTENT)]
        assert told["found"] == [(0, {}), *((version, {level: 2}) for level, version in levels)]
        assert told["course"] == told["plain"]
        assert told["same"]
        assert len(set(told["plain"])) == END, "a loss that does not change would show nothing"
