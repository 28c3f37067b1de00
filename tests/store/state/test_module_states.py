"""The own state of modules is restored bit for bit, and training on from it is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.support import exact
from tests.support.state_matrix import layers
from tests.support.state_matrix.jobs import Case, Job, trained
from tests.support.state_matrix.ownstates import CASES
from tests.support.state_matrix.proof import BOUNDARIES, Bench, nothing_differs


def image(job: Job) -> dict[str, Any]:
    return {**Job.image(job), "state_dict": exact.image(job.model.state_dict())}


def made(case: Case, bench: Bench, seed: int) -> Job:
    job = bench.make(case, seed)
    job.image = lambda: image(job)
    return job


def restores_with_its_own_state(
    case: Case, bench: Bench, strict: bool = True, loads: bool = True
) -> None:
    """Like `proof.restores_and_trains_on`, also for `state_dict()` and `tierckpt.load`."""
    job = made(case, bench, seed=1)
    with bench.attach(job) as ckpt:
        for _ in range(BOUNDARIES):
            job.iterate()
            ckpt.step()
    at_boundary = job.image()
    job.iterate()
    one_step_later = job.image()
    again = made(case, bench, seed=2)
    assert exact.differences(at_boundary, again.image())
    ckpt = bench.attach(again)
    assert ckpt.restore() == BOUNDARIES
    nothing_differs(at_boundary, again)
    again.iterate()
    nothing_differs(one_step_later, again)
    ckpt.abandon()
    assert bench.repeated_errors() == [], bench.repeated_errors()
    third = made(case, bench, seed=3)
    loaded = tierckpt.load(bench.path / "ckpts").model
    assert {*loaded} == {*again.model.state_dict()}
    if not loads:
        return
    third.model.load_state_dict(loaded, strict=strict)
    assert exact.image(third.model.state_dict()) == at_boundary["state_dict"]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_extra_state_of_modules_is_restored(name: str, tmp_path: Path, shm_dir: Path) -> None:
    alone = name != "adapters alone"
    restores_with_its_own_state(CASES[name], Bench(tmp_path, shm_dir, on_disk=True), strict=alone)


@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics", "ignore:torchmetrics:UserWarning")
def test_so_do_metrics_of_torchmetrics(tmp_path: Path, shm_dir: Path) -> None:
    metrics = pytest.importorskip("tests.support.state_matrix.metrics")
    assert len(metrics.METRICS) > 130
    bench = Bench(tmp_path, shm_dir, on_disk=True)
    restores_with_its_own_state(lambda: trained(metrics.Measured()), bench)


@pytest.mark.filterwarnings("ignore:Please use quant_min:UserWarning")
@pytest.mark.parametrize("name", layers.CASES)
def test_so_do_layers_and_buffers_that_become_others(
    name: str, tmp_path: Path, shm_dir: Path
) -> None:
    bench = Bench(tmp_path, shm_dir, on_disk=True)
    loads = name not in layers.TORCH_REFUSES
    restores_with_its_own_state(layers.CASES[name], bench, loads=loads)
