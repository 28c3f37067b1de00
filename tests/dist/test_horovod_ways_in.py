"""The ways to put checkpoints into a Horovod script, and what is refused, with the reason."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests import exact
from tests.dist.rankpool import HOROVODRUN, LAUNCHERS, MPIRUN, ROOT
from tests.dist.test_horovod_training import check, trained_with_and_without
from tests.dist.training import (
    HorovodJob,
    Net,
    Place,
    attach,
    horovod,
    make_horovod_job,
    sgd,
    train,
)

SETTINGS: dict[str, Any] = {"local_every_steps": 0, "local_every_seconds": 0}


def import_adapter() -> Any:
    """Where there are ranks; the test process does without."""
    return importlib.import_module("horovod_ckpt")


# --- ways in -------------------------------------------------------------------------------------


def installed(place: Place) -> dict[str, Any]:
    """On an optimizer that was made elsewhere, twice."""
    job = make_horovod_job()
    ckpt = import_adapter().install(
        job.optimizer, job.model, path=place.path, shm_dir=place.shm, **SETTINGS
    )
    course = train(job, ckpt, range(3))
    job.iterate(3)
    ckpt.abandon()
    again = make_horovod_job(seed=2)
    second = import_adapter().install(
        again.optimizer, again.model, path=place.path, shm_dir=place.shm, **SETTINGS
    )
    version = second.restore().version
    same = again.digest() == course[3]
    second.abandon()
    return {
        "version": version,
        "same": same,
        "attribute": again.optimizer.checkpointer is second,
        "untouched": not set(vars(again.optimizer)) & {"_allreduce_grad_async"},
    }


def test_install_takes_an_optimizer_made_elsewhere(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """And leaves nothing in it when the checkpointer is gone."""
    told = ranks(2, HOROVODRUN).run(installed, Place.under(tmp_path, shm_dir))
    assert told == [{"version": 3, "same": True, "attribute": True, "untouched": True}] * 2


def all_in_one(place: Place, positional: bool) -> tuple[Any, ...]:
    """Against Horovod's own function with the same arguments."""
    hvd = horovod()

    def job_by(function: Any, **settings: Any) -> HorovodJob:
        torch.manual_seed(1)
        model = Net()
        torch.manual_seed(1000 + hvd.rank())
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        named = model.named_parameters()
        fp16 = hvd.Compression.fp16
        if positional:
            optimizer = function(plain, named, fp16, 2, **settings)
        else:
            options = {"compression": fp16, "backward_passes_per_step": 2}
            optimizer = function(plain, named_parameters=named, **options, **settings)
        return HorovodJob(model, [optimizer], passes=2)

    plain = job_by(hvd.DistributedOptimizer)
    expected = [(plain.iterate(i), plain.digest()) for i in range(3)]
    job = job_by(
        import_adapter().DistributedOptimizer, path=place.path, shm_dir=place.shm, **SETTINGS
    )
    ckpt = job.optimizer.checkpointer
    course = []
    for iteration in range(3):
        course.append((job.iterate(iteration), job.digest()))
        ckpt.step()
    ckpt.abandon()
    return course == expected, ckpt.version, ckpt.log.counts["sealed"]


@pytest.mark.parametrize("positional", [True, False])
def test_the_drop_in_takes_horovods_arguments_and_knows_the_model(
    positional: bool, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    pool = ranks(2, HOROVODRUN)
    told = pool.run(all_in_one, Place.under(tmp_path, shm_dir), positional)
    assert told == [(True, 3, 2)] * 2


SCRIPT = """
import os
import torch
import horovod_ckpt.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
restored = getattr(optimizer, "checkpointer", None)
start = int(restored.restored) if restored else 0
for step in range(start, int(os.environ["STEPS"])):
    torch.manual_seed(10 * step + hvd.rank())
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
result = start, model.state_dict()
torch.save(result, os.environ["RESULT"] + str(hvd.rank()))
"""


def run_script(folder: Path, shm: Path, name: str, steps: int) -> list[Any]:
    """Under a horovodrun of its own."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = LAUNCHERS[HOROVODRUN].format(size=2).split()
    done = subprocess.run(
        [*launcher, sys.executable, str(script)],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'common'}",
            "OMP_NUM_THREADS": "1",
            "TIERCKPT_PATH": str(folder / "ckpts"),
            "TIERCKPT_SHM_DIR": str(shm),
            "STEPS": str(steps),
            "RESULT": str(folder / name),
        },
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    results = [folder / f"{name}{rank}" for rank in range(2)]
    assert all(r.exists() for r in results), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(r) for r in results]


def run_plainly(steps: int) -> Any:
    """The same script with Horovod's own module, in the ranks of a pool."""
    names: dict[str, Any] = {}
    source = SCRIPT.replace("import horovod_ckpt.torch as hvd", "import horovod.torch as hvd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPS", str(steps))
        patch.setenv("RESULT", "plain")
        exec(source.replace("hvd.init()", ""), names)
    return names["result"]


def images(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: exact.image(value) for name, value in state.items()}


def test_a_script_with_another_import_resumes(
    ranks: Any, tmp_path: Path, shm_dir: Path, launchable: Any
) -> None:
    """One line of it is changed, and nothing else.

    Its own broadcast, behind the restore, gives all ranks the BatchNorm statistics of rank 0.
    """
    launchable(HOROVODRUN)
    expected = ranks(2, HOROVODRUN).run(run_plainly, 8)
    first = run_script(tmp_path, shm_dir, "first", 6)
    second = run_script(tmp_path, shm_dir, "second", 8)
    assert [start for start, _ in first] == [0, 0]
    assert [start for start, _ in second] == [6, 6]
    for rank, ((_, resumed), (_, undisturbed)) in enumerate(zip(second, expected, strict=True)):
        different = exact.differences(images(resumed), images(undisturbed))
        assert different == ([] if rank == 0 else ["1.running_mean", "1.running_var"])


# --- what is refused -----------------------------------------------------------------------------


def plain_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def without_a_model(model: torch.nn.Module, where: dict[str, str]) -> None:
    import_adapter().DistributedOptimizer(plain_sgd(model), **where)


def with_a_list(model: torch.nn.Module, where: dict[str, str]) -> None:
    named = list(model.named_parameters())
    import_adapter().DistributedOptimizer(plain_sgd(model), named, **where)


def with_a_plain_optimizer(model: torch.nn.Module, where: dict[str, str]) -> None:
    import_adapter().Checkpointer(model, {"left": plain_sgd(model)}, **where)


def without_init(model: torch.nn.Module, where: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horovod(), "is_initialized", lambda: False)
        import_adapter().Checkpointer(model, plain_sgd(model), **where)


def with_adasum(model: torch.nn.Module, where: dict[str, str]) -> None:
    named = model.named_parameters()
    op = horovod().Adasum
    import_adapter().DistributedOptimizer(plain_sgd(model), named, op=op, **where)


def refusal(case: str, place: Place) -> str:
    """The ConfigError's text. It comes before anything collective: nobody waits for this rank."""
    with pytest.raises(tierckpt.ConfigError) as caught:
        REFUSED[case][0](Net(), {"path": place.path, "shm_dir": place.shm})
    return str(caught.value)


Refused = tuple[Callable[[torch.nn.Module, dict[str, str]], None], list[str]]

REFUSED: dict[str, Refused] = {
    "no model": (without_a_model, ["pass model=", "model.named_parameters()"]),
    "a list of parameters": (with_a_list, ["pass model=", "model.named_parameters()"]),
    "a plain optimizer": (with_a_plain_optimizer, ["'left'", "SGD", "hvd.DistributedOptimizer"]),
    "no hvd.init()": (without_init, ["hvd.init()"]),
    "Adasum": (with_adasum, ["Adasum", "hvd.Average"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_said_what_is_wrong_and_what_to_do(
    case: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for text in ranks(2, HOROVODRUN).run(refusal, case, Place.under(tmp_path, shm_dir)):
        for part in REFUSED[case][1]:
            assert part in text


def momentum_under_adasum() -> tuple[str, str]:
    """Why Adasum is refused."""
    hvd = horovod()
    job = make_horovod_job(
        optimizer=sgd,
        options=lambda hvd, model: {"op": hvd.Adasum},
    )
    hvd.broadcast_parameters(job.bare.state_dict(), root_rank=0)
    job.zero_grad()
    job.backward(0)
    job.step()
    return exact.digest(exact.parameters(job.bare)), exact.digest(exact.optimizer(job.optimizer))


def test_adasum_keeps_other_momentum_on_every_rank(ranks: Any) -> None:
    """Should Horovod ever change that, it need not be refused any more."""
    (weights, momentum), (same_weights, other) = ranks(2, MPIRUN).run(momentum_under_adasum)
    assert weights == same_weights
    assert momentum != other


# --- a part of the job, and a job of one ---------------------------------------------------------


def in_a_part_of_the_job(place: Place) -> dict[str, Any] | str:
    """Ranks 0 and 2 train together, rank 1 has no part in it."""
    hvd = horovod()
    part = hvd.add_process_set([0, 2])

    def new_job(seed: int) -> HorovodJob:
        return make_horovod_job(options=lambda *_: {"process_set": part}, seed=seed)

    try:
        if not part.included():
            with pytest.raises(tierckpt.ConfigError) as caught:
                attach(new_job(1), place)
            return str(caught.value)
        job = new_job(1)
        plain = [(job.iterate(i), job.digest()) for i in range(6)]
        job = new_job(1)
        attached = attach(job, place)
        course = []
        for iteration in range(3):
            course.append((job.iterate(iteration), attached.ckpt.step() or job.digest()))
        job.iterate(3)
        attached.ckpt.abandon()
        job = new_job(2)
        attached = attach(job, place)
        restored = attached.ckpt.restore()
        for iteration in range(restored, 6):
            course.append((job.iterate(iteration), attached.ckpt.step() or job.digest()))
        attached.ckpt.close()
        return {"same": course == plain, "restored": restored.levels, "at": int(restored)}
    finally:
        hvd.barrier()
        hvd.remove_process_set(part)


def test_a_process_set_has_checkpoints_of_its_own(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    told = ranks(3, HOROVODRUN).run(in_a_part_of_the_job, Place.under(tmp_path, shm_dir))
    assert told[0] == told[2] == {"same": True, "restored": {"memory": 2}, "at": 3}
    assert "rank 1 is not in the optimizer's process set [0, 2]" in told[1]


def two_sets(place: Place) -> str:
    hvd = horovod()
    part = hvd.add_process_set([0, 2])
    try:
        one = make_horovod_job()
        other = make_horovod_job(options=lambda *_: {"process_set": part})
        with pytest.raises(tierckpt.ConfigError) as caught:
            import_adapter().Checkpointer(
                torch.nn.ModuleList([one.model, other.model]),
                [one.optimizer, other.optimizer],
                path=place.path,
            )
        return str(caught.value)
    finally:
        hvd.barrier()
        hvd.remove_process_set(part)


def test_optimizers_of_different_process_sets_are_refused(ranks: Any, tmp_path: Path) -> None:
    place = Place(str(tmp_path / "ckpts"), "")
    for text in ranks(3, HOROVODRUN).run(two_sets, place):
        assert "different process sets" in text


@pytest.mark.parametrize("name", ["default", "two backward passes", "clipping", "broadcast after"])
def test_a_job_of_one_process_is_a_job(
    name: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    (told,) = ranks(1, HOROVODRUN).run(trained_with_and_without, name, place)
    check(name, 1, "memory", told)
