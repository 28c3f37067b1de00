"""Checkpoints for loops without any call: the next forward pass is the boundary."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_ckpt
import tierckpt
from tests.support.rank_pool import ROOT
from tests.support.training import Net, Place, make_job, sgd
from tests.support.warm_python.servers import PYTHON

SETTINGS: dict[str, Any] = {"local_every_steps": 0, "local_every_seconds": 0}


def wrapped(place: Place, seed: int = 1) -> tuple[Any, ...]:
    job = make_job(optimizer=sgd, seed=seed)
    optimizer = ddp_ckpt.wrap(
        job.optimizer,
        job.model,
        path=place.path,
        shm_dir=place.shm,
        close_at_exit=False,
        **SETTINGS,
    )
    return job, optimizer, optimizer.checkpointer


def never_calling_step(place: Place) -> dict[str, Any]:
    plain = make_job(optimizer=sgd)
    expected = {}
    for iteration in range(9):
        plain.iterate(iteration)
        expected[iteration + 1] = plain.digest()

    job, optimizer, ckpt = wrapped(place)
    fresh = int(ckpt.restored)
    kinds = (
        optimizer is job.optimizer,
        isinstance(optimizer, torch.optim.Optimizer),
        isinstance(optimizer, torch.optim.SGD),
    )
    course = {}
    for iteration in range(6):
        job.iterate(iteration)
        course[iteration + 1] = job.digest()
    version = ckpt.version
    ckpt.abandon()

    job, optimizer, ckpt = wrapped(place, seed=2)
    restored = ckpt.restored
    found = job.digest()
    for iteration in range(restored, 9):
        job.iterate(iteration)
        course[iteration + 1] = job.digest()
    ckpt.abandon()
    return {
        "fresh": fresh,
        "kinds": kinds,
        "version": version,
        "restored": (int(restored), restored.version),
        "found": found == expected.get(restored.version),
        "same": course == expected,
    }


def test_a_wrapped_optimizer_stays_itself_and_resumes(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for told in ranks(2).run(never_calling_step, Place.under(tmp_path, shm_dir)):
        assert told["fresh"] == 0
        assert told["kinds"] == (True, True, True)
        # The sixth step's boundary would have been the seventh forward.
        assert told["version"] == 5
        assert told["restored"] == (5, 5)
        assert told["found"]
        assert told["same"]


def forwards_that_are_no_boundary(place: Place) -> list[int]:
    """Evaluation passes, passes without gradients, and micro-batches of an accumulation."""
    job, optimizer, ckpt = wrapped(place)
    versions = []
    for iteration in range(5):
        optimizer.zero_grad()
        with job.model.no_sync():
            job.loss(iteration, 1).backward()
        job.loss(iteration, 2).backward()
        optimizer.step()
        before = ckpt.version
        job.model.eval()
        with torch.no_grad():
            job.loss(iteration, 3)
        job.loss(iteration, 4)
        job.model.train()
        with torch.no_grad():
            job.loss(iteration, 5)
        assert ckpt.version == before
        versions.append(before)
    ckpt.abandon()
    return versions


def test_only_a_training_forward_is_a_boundary(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    for versions in ranks(2).run(forwards_that_are_no_boundary, Place.under(tmp_path, shm_dir)):
        assert versions == [0, 1, 2, 3, 4]


class Pair(nn.Module):
    """Two networks that are trained in one loop."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Net(), Net()

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        return self.one(x) + self.other(x)


def several_wrapped(kind: str, place: Place, seed: int, iterations: int) -> dict[str, Any]:
    job = make_job(net=Pair, optimizer=sgd, seed=seed)
    parts = (job.bare.one, job.bare.other)
    made = [sgd(part.parameters(), lr=0.01) for part in parts]
    given: Any = {"one": made[0], "other": made[1]} if kind == "dict" else made
    found = ddp_ckpt.wrap(
        given, job.model, path=place.path, shm_dir=place.shm, close_at_exit=False, **SETTINGS
    )
    job.optimizers = made
    ckpt = made[0].checkpointer  # type: ignore[attr-defined]
    course = {}
    for iteration in range(ckpt.restored, iterations):
        job.iterate(iteration)
        course[iteration + 1] = job.digest()
    told = {
        "same object": found is given,
        "one checkpointer": ckpt is made[1].checkpointer,  # type: ignore[attr-defined]
        "restored": int(ckpt.restored),
        "course": course,
    }
    ckpt.abandon()
    return told


def test_several_optimizers_are_wrapped_at_once(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    run, place = ranks(2).run, Place.under(tmp_path, shm_dir)
    elsewhere = Place(f"{place.path} undisturbed", place.shm)
    expected = run(several_wrapped, "list", elsewhere, 1, 6)
    first = run(several_wrapped, "dict", place, 1, 4)
    second = run(several_wrapped, "dict", place, 2, 6)
    for whole, before, after in zip(expected, first, second, strict=True):
        assert (before["same object"], before["one checkpointer"]) == (True, True)
        assert after["restored"] == 3
        assert {**before["course"], **after["course"]} == whole["course"]


def wrapped_twice(place: Place) -> dict[str, str]:
    """The message after a second call, and whether the first checkpointer is untouched."""
    job, optimizer, ckpt = wrapped(place)
    other = make_job(optimizer=sgd)
    elsewhere = f"{place.path} elsewhere"
    second: dict[str, tuple[Any, Any, str]] = {
        "the same model": (sgd(job.bare.parameters(), lr=0.01), job.model, elsewhere),
        "the same optimizer": (optimizer, other.model, elsewhere),
        "the same path": (other.optimizer, other.model, place.path),
    }
    told = {}
    for name, (given, model, path) in second.items():
        before = [len(o._optimizer_step_post_hooks) for o in (given, optimizer)]
        with pytest.raises(tierckpt.ConfigError) as caught:
            ddp_ckpt.wrap(given, model, path=path, shm_dir=place.shm, **SETTINGS)
        told[name] = str(caught.value)
        assert [len(o._optimizer_step_post_hooks) for o in (given, optimizer)] == before
    for iteration in range(3):
        job.iterate(iteration)
    assert ckpt.version == 2
    ckpt.abandon()
    again = ddp_ckpt.wrap(
        optimizer, job.model, path=place.path, shm_dir=place.shm, close_at_exit=False, **SETTINGS
    )
    told["restored"] = str(again.checkpointer.restored.version)
    again.checkpointer.abandon()
    return told


def test_a_second_call_is_refused_before_anything_is_attached(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for told in ranks(2).run(wrapped_twice, Place.under(tmp_path, shm_dir)):
        assert told.pop("restored") == "2"
        starts = {"the same model": "this model has", "the same optimizer": "this optimizer has"}
        for name, text in told.items():
            assert text.startswith(starts.get(name, "the job at "))
            assert "Several optimizers go into one call" in text


SCRIPT = """
import sys
import torch, torch.distributed as dist
import ddp_ckpt
from torch.nn.parallel import DistributedDataParallel

rank, meeting, results, steps, end = int(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]), sys.argv[5]
torch.manual_seed(0)
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
optimizer = ddp_ckpt.wrap(optimizer, model)
start = int(optimizer.checkpointer.restored)
for step in range(start, steps):
    torch.manual_seed(10 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
torch.save((start, model.module.state_dict()), f"{results}.{rank}")
if end == "fail":
    raise KeyError("after the loop")
"""


def run_script(folder: Path, shm: Path, name: str, steps: int, end: str) -> list[Any]:
    """Run two ranks of the script; its saved state counts, since gloo's teardown may abort."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    meeting, results = folder / f"{name}.meeting", folder / name
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'common'}",
        "OMP_NUM_THREADS": "1",
        "TIERCKPT_PATH": str(folder / "ckpts"),
        "TIERCKPT_SHM_DIR": str(shm),
    }
    ranks = [
        subprocess.Popen(
            [PYTHON, script, str(r), meeting, results, str(steps), end],
            env=env,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    try:
        return [torch.load(f"{results}.{r}") for r in range(2)]
    except FileNotFoundError:
        pytest.fail("\n".join(outputs))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The result of eight steps."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return run_script(folder, Path(os.environ["TIERCKPT_SHM_DIR"]), "whole", 8, "")


@pytest.mark.parametrize(("end", "resumes_at"), [("", 6), ("fail", 5)], ids=["end", "fail"])
def test_a_script_with_one_more_line_resumes(
    end: str, resumes_at: int, uninterrupted: list[Any], tmp_path: Path, shm_dir: Path
) -> None:
    """After a clean end the last version exists, too; otherwise the last one that a next step
    completed."""
    first = run_script(tmp_path, shm_dir, "first", 6, end)
    second = run_script(tmp_path, shm_dir, "second", 8, "")
    assert [start for start, _ in first + uninterrupted] == [0] * 4
    assert [start for start, _ in second] == [resumes_at] * 2
    for (_, resumed), (_, expected) in zip(second, uninterrupted, strict=True):
        assert all(torch.equal(resumed[k], expected[k]) for k in expected)
