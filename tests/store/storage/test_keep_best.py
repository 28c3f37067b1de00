"""Keep-best: the job's metric decides, on both levels and over restarts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_ckpt
from tierckpt.format import Manifest
from tierckpt.storage import LocalStore
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import TinyJob, tiny_model

LOSSES = {1: 5.0, 2: 0.25, 3: 4.0, 4: 0.5, 5: math.nan, 6: 3.0, 7: 2.0, 8: 1.0}


def on_local(path: Path) -> list[int]:
    return sorted({key.id.version for key in LocalStore(path).keys()})  # noqa: SIM118


def on_persistent(path: Path) -> dict[int, Any]:
    store = PersistentStore(str(path))
    return {n.id.version: store.read_manifest(n).facts.metric for n in store.versions()}


@pytest.fixture
def job(tmp_path: Path, shm_dir: Path) -> Any:
    def start(**settings: Any) -> TinyJob:
        given = {"shm_dir": str(shm_dir), "agent": "inline", "local_keep": 1, **settings}
        return TinyJob(tmp_path / "ckpts", **given)

    return start


def train(job: TinyJob, until: int) -> None:
    """With each step's loss; every version is on all levels before the next one."""
    while job.iteration < until:
        job.train_one()
        job.iteration += 1
        job.checkpointer.step(metric=LOSSES.get(job.iteration))
        job.checkpointer.save(now=True)


@pytest.mark.parametrize(
    ("best", "count", "kept"),
    [("lowest", 2, [2, 4, 8]), ("highest", 1, [1, 8])],
)
def test_the_best_stay_on_local_besides_the_last(
    best: str, count: int, kept: list[int], job: Any, tmp_path: Path
) -> None:
    with job(local_keep=f"1, best {count} {best}") as first:
        train(first, 8)
    assert on_local(tmp_path / "ckpts") == kept


def test_without_the_setting_metrics_change_nothing(job: Any, tmp_path: Path) -> None:
    with job() as first:
        train(first, 8)
    assert on_local(tmp_path / "ckpts") == [8]


def test_a_restarted_job_knows_its_best_version(job: Any, tmp_path: Path) -> None:
    """From the manifests; also of encoded shards, and without the slots in memory."""
    for until, modules in ((3, ""), (6, "zstd"), (8, "")):
        with job(local_keep="1, best 2", local_codecs=modules) as each:
            each.restore()
            train(each, until)
    assert on_local(tmp_path / "ckpts") == [2, 4, 8]


def test_a_version_off_the_line_of_ancestors_is_not_best(job: Any, tmp_path: Path) -> None:
    """v2 had the best loss, and the job continued from v1."""
    with job(local_keep="1, every 1, best 1") as first:
        train(first, 3)
    with job(local_keep="1, best 1") as second:
        second.restore(version=1)
        second.run(3)
        second.checkpointer.save(now=True)
        second.run(4)
    there = [(key.id.generation, key.id.version) for key in LocalStore(tmp_path / "ckpts").keys()]  # noqa: SIM118
    assert (1, 2) not in there
    assert (1, 1) in there, "the best of those that count"
    assert (2, 4) in there


@pytest.mark.parametrize(
    ("best", "kept"),
    [
        ("lowest", {2: 0.25, 8: 1.0}),
        ("highest", {1: 5.0, 8: 1.0}),
    ],
)
def test_the_best_stay_on_the_persistent_level(
    best: str, kept: dict[int, Any], job: Any, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    settings = {
        "persistent_path": str(shared),
        "persistent_every_steps": 1,
        "persistent_keep": f"1, best 1 {best}",
    }
    with job(**settings) as first:
        train(first, 8)
    assert on_persistent(shared) == kept
    shutil.rmtree(tmp_path / "ckpts")
    with job(**settings) as second:
        second.restore(version=min(kept))
        assert second.checkpointer.version == min(kept)


def test_a_metric_is_of_the_state_that_it_was_measured_of(job: Any, tmp_path: Path) -> None:
    """The next step clears it; a value but no number is left out."""
    with job(local_keep="1, every 1") as first:
        train(first, 2)
        first.run(3)
        first.checkpointer.metric = 0.125
        first.checkpointer.save(now=True)  # v3 was taken before, without
        first.train_one()
        first.iteration += 1
        first.checkpointer.step(metric=torch.tensor(0.75))
        first.checkpointer.save(now=True)
        train(first, 5)
    store = LocalStore(tmp_path / "ckpts")
    manifests = [Manifest.decode(store.read_manifest(k)) for k in store.keys()]  # noqa: SIM118
    found = {m.id.version: m.facts.metric for m in manifests}
    assert found == {1: 5.0, 2: 0.25, 3: 0.125, 4: 0.75, 5: None}


def test_a_loop_without_boundaries_sets_the_attribute(tmp_path: Path, shm_dir: Path) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp_ckpt.wrap(
        optimizer,
        model,
        path=tmp_path / "ckpts",
        shm_dir=str(shm_dir),
        agent="inline",
        when_busy="wait",
        local_every_steps=1,
        local_keep="1, best 1",
        close_at_exit=False,
    )
    for step in range(1, 9):
        optimizer.zero_grad()
        width = next(model.parameters()).shape[1]
        model(torch.randn(4, width)).sum().backward()
        optimizer.step()
        optimizer.checkpointer.metric = LOSSES[step]
    optimizer.checkpointer.close()
    assert on_local(tmp_path / "ckpts") == [2, 8]
