"""The ways to put checkpoints into a Horovod script, and what is refused, with the reason."""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests import exact
from tests.dist.rankpool import HOROVODRUN, LAUNCHERS, MPIRUN, ROOT
from tests.dist.test_horovod_training import check, trained_with_and_without
from tests.dist.training import (
    WIDTH,
    Attached,
    HorovodJob,
    Net,
    Place,
    attach,
    horovod,
    make_horovod_job,
    rank_0_first,
    sgd,
    train,
)
from tierckpt.timeline.command import load

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


INSTALLED = {"version": 3, "same": True, "attribute": True, "untouched": True}


def test_install_takes_an_optimizer_made_elsewhere(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """And leaves nothing in it when the checkpointer is gone."""
    told = ranks(2, HOROVODRUN).run(installed, Place.under(tmp_path, shm_dir))
    assert told == [INSTALLED] * 2


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


class Empty(Net):
    """A module that calls itself empty, as a container of parts that come later does."""

    def __len__(self) -> int:
        return 0


def given_an_empty_model(place: Place) -> bool:
    model = Empty()
    optimizer = import_adapter().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        list(model.named_parameters()),
        model=model,
        path=place.path,
        shm_dir=place.shm,
        **SETTINGS,
    )
    optimizer.checkpointer.close()
    return optimizer.checkpointer.state.model is model


def test_a_model_is_taken_as_given(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """Also one that is false, as what is empty is."""
    told = ranks(2, HOROVODRUN).run(given_an_empty_model, Place.under(tmp_path, shm_dir))
    assert told == [True] * 2


def lacking_names() -> list[str]:
    """What scripts may ask Horovod's module for, and ours does not have."""
    drop_in, hvd = importlib.import_module("horovod_ckpt.torch"), horovod()
    return [
        name
        for ours, theirs in ((drop_in, hvd), (drop_in.elastic, hvd.elastic))
        for name in dir(theirs)
        if not hasattr(ours, name)
    ]


def test_the_replaced_import_has_every_name_of_horovods(ranks: Any) -> None:
    assert ranks(2, HOROVODRUN).run(lacking_names) == [[]] * 2


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


def run_here(source: str, steps: int, **environment: str) -> dict[str, Any]:
    """A script, in the ranks of a pool; its variables."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"STEPS": str(steps), "RESULT": "result", **environment}.items():
            patch.setenv(name, value)
        exec(source.replace("hvd.init()", ""), names)
    return names


def run_plainly(steps: int) -> Any:
    """With Horovod's own module."""
    plain = SCRIPT.replace("import horovod_ckpt.torch as hvd", "import horovod.torch as hvd")
    return run_here(plain, steps)["result"]


def run_with_checkpoints(place: Place, steps: int) -> Any:
    """As it is, but for the end, which a pool's ranks do not come to."""
    with pytest.MonkeyPatch.context() as patch:
        drop_in = importlib.import_module("horovod_ckpt.torch")
        patch.setitem(drop_in.DEFAULTS, "close_at_exit", False)
        names = run_here(SCRIPT, steps, TIERCKPT_PATH=place.path, TIERCKPT_SHM_DIR=place.shm)
    names["optimizer"].checkpointer.close()
    return names["result"]


def images(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: exact.image(value) for name, value in state.items()}


def check_script(first: list[Any], second: list[Any], plain: list[Any]) -> None:
    """By rank: what two lives told, of 6 steps and of 8, and an undisturbed one.

    The script's own broadcast, behind the restore, leaves each rank its BatchNorm statistics.
    """
    assert {start for start, _ in first} == {0}
    assert {start for start, _ in second} == {6}
    for (_, resumed), (_, undisturbed) in zip(second, plain, strict=True):
        different = exact.differences(images(resumed), images(undisturbed))
        assert different == []


def test_a_script_with_another_import_resumes(
    ranks: Any, tmp_path: Path, shm_dir: Path, launchable: Any
) -> None:
    """One line of it is changed, and nothing else."""
    launchable(HOROVODRUN)
    plain = ranks(2, HOROVODRUN).run(run_plainly, 8)
    first = run_script(tmp_path, shm_dir, "first", 6)
    second = run_script(tmp_path, shm_dir, "second", 8)
    check_script(first, second, plain)


Decaying = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)


def broadcast_behind_a_restore(place: Place) -> tuple[bool, list[bool]]:
    """Whether at a fresh start ours does what Horovod's does, and whether it leaves parameters as
    they are behind a restore, given Horovod's optimizer, and the one that this was made from."""
    drop_in = importlib.import_module("horovod_ckpt.torch")

    def life(hvd: Any, seed: int, **settings: Any) -> tuple[Net, list[Any]]:
        torch.manual_seed(seed)
        model = Net()
        plain = Decaying(model.parameters())
        made = hvd.DistributedOptimizer(plain, model.named_parameters(), **settings)
        hvd.broadcast_optimizer_state(made, root_rank=0)
        return model, [made, plain]

    def digest(model: Net) -> str:
        return exact.digest(exact.parameters(model))

    ours = {"path": place.path, "shm_dir": place.shm, **SETTINGS, "boundary": "explicit"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(drop_in.DEFAULTS, "close_at_exit", False)
        horovods, _ = life(horovod(), seed=1)
        model, (optimizer, _) = life(drop_in, seed=1, **ours)
        alike = digest(model) == digest(horovods)
        for _ in range(2):
            model(torch.randn(3, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.checkpointer.step()
        last = digest(model)
        optimizer.checkpointer.complete()
        optimizer.checkpointer.abandon()
        model, optimizers = life(drop_in, seed=2, **ours)
    assert optimizers[0].checkpointer.restored.version == 2
    stays = [digest(model) == last]
    for each in optimizers:
        drop_in.broadcast_optimizer_state(each, 0)
        stays.append(digest(model) == last)
    optimizers[0].checkpointer.close()
    return alike, stays


def test_a_broadcast_behind_the_restore_moves_nothing(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Horovod makes a step to have optimizer state to send, and weight decay moves weights."""
    told = ranks(2, HOROVODRUN).run(broadcast_behind_a_restore, Place.under(tmp_path, shm_dir))
    assert told == [(True, [True] * 3)] * 2


def parameters_are_broadcast(place: Place) -> dict[str, Any]:
    """Digests behind `broadcast_parameters`, by Horovod and ours at a fresh start, of the last
    step and behind a restore, and of both ranks behind a later step."""
    drop_in = importlib.import_module("horovod_ckpt.torch")

    def life(hvd: Any, seed: int, **settings: Any) -> tuple[Net, Any]:
        torch.manual_seed(seed + horovod().rank())
        model = Net(norm=torch.nn.BatchNorm1d)
        adam = torch.optim.Adam(model.parameters())
        made = hvd.DistributedOptimizer(adam, model.named_parameters(), **settings)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, made

    def digest(model: Net) -> str:
        return exact.digest({**exact.parameters(model), **exact.buffers(model)})

    def step(model: Net, optimizer: Any) -> str:
        optimizer.zero_grad()
        model(torch.randn(3, WIDTH)).square().sum().backward()
        optimizer.step()
        return digest(model)

    ours = {"path": place.path, "shm_dir": place.shm, **SETTINGS, "boundary": "explicit"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(drop_in.DEFAULTS, "close_at_exit", False)
        told: dict[str, Any] = {"horovod's": digest(life(horovod(), seed=1)[0])}
        model, optimizer = life(drop_in, seed=1, **ours)
        told["fresh"] = digest(model)
        for _ in range(2):
            told["last"] = step(model, optimizer)
            optimizer.checkpointer.step()
        optimizer.checkpointer.complete()
        optimizer.checkpointer.abandon()
        model, optimizer = life(drop_in, seed=3, **ours)
    told["restored"] = digest(model)
    new = torch.full((3,), 1.0 + horovod().rank())
    drop_in.broadcast_parameters([("new", new), *model.named_buffers()], 0)
    told["again"] = digest(model)
    told["not restored"] = new.tolist()
    told["stepped"] = step(model, optimizer)
    drop_in.broadcast_parameters(model.state_dict(), 0)
    told["later"] = digest(model)
    optimizer.checkpointer.close()
    return told


def test_a_broadcast_leaves_what_was_restored(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """Each rank has statistics of its own. What is not restored, or was trained since, is sent."""
    told = ranks(2, HOROVODRUN).run(parameters_are_broadcast, Place.under(tmp_path, shm_dir))
    for each in told:
        assert each["horovod's"] == each["fresh"] == told[0]["fresh"]
        assert each["last"] == each["restored"] == each["again"]
        assert each["not restored"] == [1.0] * 3
        assert each["later"] == told[0]["stepped"]
    assert told[0]["restored"] != told[1]["restored"]
    assert told[0]["stepped"] != told[1]["stepped"]


def by_an_elastic_script(place: Place) -> dict[str, Any]:
    """The function that runs under elastic Horovod, in ranks that nobody is to come to or leave."""
    drop_in = importlib.import_module("horovod_ckpt.torch")
    job = make_horovod_job()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_ELASTIC", "1")
        optimizer = drop_in.DistributedOptimizer(
            torch.optim.Adam(job.bare.parameters()),
            named_parameters=job.bare.named_parameters(),
            backward_passes_per_step=2,
            model=job.bare,
            restore=True,
            path=place.path,
            shm_dir=place.shm,
            **{**SETTINGS, "slots": 3},
        )
        state = drop_in.elastic.TorchState(job.bare, optimizer, {"slots": 4}, batch=0)
        state.sync()
    state.batch = 7
    state.commit()
    config, version = state.checkpointer.config, state.checkpointer.version
    state.checkpointer.close()
    atexit.unregister(state._close)
    return {
        "passes": optimizer.backward_passes_per_step,
        "settings": (config.path, config.shm_dir, config.slots, config.local.every_seconds),
        "version": version,
    }


def test_an_elastic_script_gives_its_settings_to_the_optimizer_too(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """They go to the state; what the state is given itself wins."""
    place = Place.under(tmp_path, shm_dir)
    for told in ranks(2, HOROVODRUN).run(by_an_elastic_script, place):
        assert told == {
            "passes": 2,
            "settings": (place.path, place.shm, 4, 0),
            "version": 1,
        }


# --- what is refused -----------------------------------------------------------------------------

Way = Callable[[torch.nn.Module, dict[str, str]], None]
ELASTIC = ["HOROVOD_ELASTIC=1", "horovod_ckpt.elastic.TorchState"]


def plain_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def without_a_model(model: torch.nn.Module, where: dict[str, str]) -> None:
    import_adapter().DistributedOptimizer(plain_sgd(model), **where)


def with_a_list(model: torch.nn.Module, where: dict[str, str]) -> None:
    named = list(model.named_parameters())
    import_adapter().DistributedOptimizer(plain_sgd(model), named, **where)


def with_a_part(model: torch.nn.Module, where: dict[str, str]) -> None:
    head = model.get_submodule("head")
    import_adapter().DistributedOptimizer(plain_sgd(head), head.named_parameters(), **where)


def with_a_plain_optimizer(model: torch.nn.Module, where: dict[str, str]) -> None:
    import_adapter().Checkpointer(model, {"left": plain_sgd(model)}, **where)


def without_init(model: torch.nn.Module, where: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horovod(), "is_initialized", lambda: False)
        import_adapter().Checkpointer(model, plain_sgd(model), **where)


def with_all(model: torch.nn.Module, where: dict[str, str]) -> None:
    import_adapter().DistributedOptimizer(plain_sgd(model), model.named_parameters(), **where)


def with_horovods(function: str, model: torch.nn.Module, where: dict[str, str]) -> None:
    optimizer = horovod().DistributedOptimizer(plain_sgd(model), model.named_parameters())
    given = [model, optimizer] if function == "Checkpointer" else [optimizer, model]
    getattr(import_adapter(), function)(*given, **where)


def in_an_elastic_job(way: Way, model: torch.nn.Module, where: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_ELASTIC", "1")  # as its launcher does
        way(model, where)


def with_adasum(model: torch.nn.Module, where: dict[str, str]) -> None:
    named = model.named_parameters()
    op = horovod().Adasum
    import_adapter().DistributedOptimizer(plain_sgd(model), named, op=op, **where)


def refusal(case: str, place: Place) -> str:
    """The ConfigError's text. It comes before anything collective: nobody waits for this rank."""
    with pytest.raises(tierckpt.ConfigError) as caught:
        REFUSED[case][0](Net(), {"path": place.path, "shm_dir": place.shm})
    return str(caught.value)


REFUSED: dict[str, tuple[Way, list[str]]] = {
    "no model": (without_a_model, ["pass model=", "model.named_parameters()"]),
    "a list of parameters": (with_a_list, ["pass model=", "model.named_parameters()"]),
    "a part of the model": (with_a_part, ["(Linear)", "(Net)", "body.0.weight", "model=..."]),
    "a plain optimizer": (with_a_plain_optimizer, ["'left'", "SGD", "hvd.DistributedOptimizer"]),
    "no hvd.init()": (without_init, ["hvd.init()"]),
    "Adasum": (with_adasum, ["Adasum", "hvd.Average"]),
    "an elastic job": (partial(in_an_elastic_job, with_all), ELASTIC),
    **{
        f"{name} in an elastic job": (
            partial(in_an_elastic_job, partial(with_horovods, name)),
            ELASTIC,
        )
        for name in ("Checkpointer", "install")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_said_what_is_wrong_and_what_to_do(
    case: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for text in ranks(2, HOROVODRUN).run(refusal, case, Place.under(tmp_path, shm_dir)):
        for part in REFUSED[case][1]:
            assert part in text


class HalfMade(torch.nn.Module):
    """One that never came to be a module, and is alive all the same."""

    def __init__(self) -> None:
        pass


def known_models() -> dict[str, bool]:
    """Whether the whole is found by its parameters, whatever else is alive."""
    model_of = importlib.import_module("horovod_ckpt.optimizer")._model_of
    model = Net()
    wrapper = torch.nn.Sequential(model)
    found = {"wrapped": model_of(model.named_parameters()) is model}
    given_up = torch.nn.ModuleList([wrapper, torch.nn.Linear(1, 1)])
    given_up.cycle = [given_up]
    del given_up
    found["part of a dead one"] = model_of(model.named_parameters()) is model
    half_made = HalfMade()
    found["beside a half-made one"] = model_of(model.named_parameters()) is model
    return {**found, "which cannot be asked": not vars(half_made)}


def test_the_whole_model_is_known_by_its_parameters(ranks: Any) -> None:
    for told in ranks(2, HOROVODRUN).run(known_models):
        assert all(told.values()), told


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
    check_part(ranks(3, HOROVODRUN).run(in_a_part_of_the_job, Place.under(tmp_path, shm_dir)))


def check_part(told: list[Any]) -> None:
    assert told[0] == told[2] == {"same": True, "restored": {"memory": 2}, "at": 3}
    assert "rank 1 is not in the optimizer's process set [0, 2]" in told[1]


def side_by_side(folder: str, shm: str) -> dict[str, Any]:
    """Ranks 0 and 2 train one model and rank 1 another, with one folder for everybody's records."""
    hvd = horovod()
    sets = [hvd.add_process_set([0, 2]), hvd.add_process_set([1])]
    mine = next(s for s in sets if s.included())
    name = "pair" if mine is sets[0] else "single"
    place = Place(f"{folder}/{name}", shm)

    def new(seed: int) -> tuple[HorovodJob, Attached]:
        net = Net if name == "pair" else partial(Net, layers=2)
        job = make_horovod_job(net, options=lambda *_: {"process_set": mine}, seed=seed)
        return job, attach(job, place, local_every_steps=1, slots=3, when_busy="wait")

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIERCKPT_TRACE_DIR", f"{folder}/traces")
            patch.setenv("TIERCKPT_EVENTS_DIR", f"{folder}/events")
            job, attached = new(1)
            course = train(job, attached.ckpt, range(3))
            attached.ckpt.wait()
            hvd.barrier()  # both are at work, and only then one of them goes on
            attached.ckpt.abandon()
            job, attached = new(2)
            restored = attached.ckpt.restore()
            same = job.digest() == course[3]
            attached.ckpt.close()
        levels = (int(restored), restored.levels, same)
        return {"restored": levels, "set": mine.process_set_id}
    finally:
        hvd.barrier()
        for each in sets:
            hvd.remove_process_set(each)


def test_process_sets_do_not_get_in_each_others_way(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Two models to two paths in one job on one node, where one environment names folders for
    all: every file is one rank's."""
    told = ranks(3, HOROVODRUN).run(side_by_side, str(tmp_path), str(shm_dir))
    check_side_by_side(told, tmp_path)


def check_side_by_side(told: list[dict[str, Any]], folder: Path) -> None:
    for rank, size in ((0, 2), (1, 1), (2, 2)):
        assert told[rank]["restored"] == (3, {"memory": size}, True)
    pair, single = (told[r]["set"] for r in (0, 1))
    records = {
        (f"process-set-{pair}", 0),
        (f"process-set-{pair}", 1),
        (f"process-set-{single}", 0),
    }
    for kind, form in (("traces", "trace-r{:05d}.json"), ("events", "events-r{:05d}.jsonl")):
        found = {p.relative_to(folder / kind) for p in (folder / kind).rglob("*.json*")}
        assert found == {Path(home) / form.format(rank) for home, rank in records}
    for number, layers in ((pair, 5), (single, 3)):
        timeline = load([*(folder / "traces" / f"process-set-{number}").iterdir()], None)
        for rank in timeline.ranks():
            (begin, again) = timeline.of("begin", rank=rank)
            assert begin.end_us <= again.begin_us
            assert len({n for s in timeline.of("copy") for n in s.layers}) == 2 * layers


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


# --- several checkpointers on the same ranks -----------------------------------------------------


def two_at_once(places: list[Place]) -> list[Any]:
    """Ranks on two nodes train two models; rank 0 is at both boundaries before rank 1 is at one.
    Returns for each whether what comes back is what was taken."""
    jobs = [make_horovod_job(seed=seed) for seed in (1, 2)]

    def on_two_nodes(job: HorovodJob, place: Place) -> Attached:
        return attach(job, place, node=f"node{horovod().rank()}")

    attached = [on_two_nodes(job, place) for job, place in zip(jobs, places, strict=True)]
    assert [each.ckpt.restore() for each in attached] == [0, 0]
    for iteration in range(3):
        for job in jobs:
            job.iterate(iteration)
        with rank_0_first():
            for each in attached:
                each.ckpt.step()
    taken = [job.digest() for job in jobs]
    for job, each in zip(jobs, attached, strict=True):
        job.iterate(3)
        each.ckpt.abandon()
    told: list[Any] = []
    for place, digest in zip(places, taken, strict=True):
        job = make_horovod_job(seed=3)
        again = on_two_nodes(job, place)
        told.append((int(again.ckpt.restore()), job.digest() == digest))
        again.ckpt.abandon()
    return told


@pytest.mark.parametrize("kind", [HOROVODRUN, MPIRUN])
def test_two_checkpointers_on_the_ranks_of_several_nodes(
    kind: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Their votes are Horovod's operations there, and it refuses two of one name at a time."""
    places = [Place(str(tmp_path / name), str(shm_dir)) for name in ("one", "other")]
    assert ranks(2, kind).run(two_at_once, places) == [[(3, True)] * 2] * 2


class Heard(tierckpt.Callbacks):
    """Of how many parameters' reductions."""

    launched = 0

    def on_allreduce_launched(self, params: Any) -> None:
        self.launched += len(list(params))


def two_on_one_optimizer(places: list[Place], first: int) -> dict[str, Any]:
    """After an iteration with both the one numbered `first` ends; after two more the other."""
    job = make_horovod_job()
    heard = [Heard(), Heard()]
    ckpts = [attach(job, p, callbacks=[h]).ckpt for p, h in zip(places, heard, strict=True)]
    other = ckpts[1 - first]
    job.iterate(0)
    for ckpt in ckpts:
        ckpt.step()
    ckpts[first].abandon()
    job.iterate(1)
    other.step()
    taken = job.digest()
    job.iterate(2)
    other.abandon()
    again = make_horovod_job(seed=2)
    ckpt = attach(again, places[1 - first]).ckpt
    restored = int(ckpt.restore()), again.digest() == taken
    ckpt.abandon()
    layers = len(list(job.bare.parameters()))
    return {
        "iterations heard": [h.launched / layers for h in heard],
        "restored": restored,
        "left": sorted(name for name in vars(job.optimizer) if name.endswith("_async")),
    }


@pytest.mark.parametrize("first", [0, 1])
def test_two_checkpointers_of_one_optimizer(
    first: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """The end of either leaves the other at work, and that of both nothing."""
    places = [Place(str(tmp_path / name), str(shm_dir)) for name in ("one", "other")]
    expected = {
        "iterations heard": [1, 3] if first == 0 else [3, 1],
        "restored": (2, True),
        "left": [],
    }
    assert ranks(2, HOROVODRUN).run(two_on_one_optimizer, places, first) == [expected] * 2


def beside_a_launcher_of_the_scripts(place: Place, on_top: bool) -> tuple[int, bool]:
    """How often it was called, and whether it is still there when the checkpointer is gone."""
    job, name = make_horovod_job(), "_allreduce_grad_async"
    calls = []

    def replace() -> Callable[[Any], Any]:
        launch = getattr(job.optimizer, name)
        setattr(job.optimizer, name, lambda param: (calls.append(param), launch(param))[1])
        return vars(job.optimizer)[name]

    if not on_top:
        own = replace()
    ckpt = attach(job, place).ckpt
    if on_top:
        own = replace()
    train(job, ckpt, range(2))
    ckpt.abandon()
    job.iterate(2)
    return len(calls) // len(list(job.bare.parameters())), vars(job.optimizer)[name] is own


@pytest.mark.parametrize("on_top", [False, True])
def test_what_a_script_made_of_the_optimizer_stays(
    on_top: bool, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    told = ranks(2, HOROVODRUN).run(beside_a_launcher_of_the_scripts, place, on_top)
    assert told == [(3, True)] * 2


@pytest.mark.parametrize("name", ["default", "two backward passes", "clipping", "broadcast after"])
def test_a_job_of_one_process_is_a_job(
    name: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    (told,) = ranks(1, HOROVODRUN).run(trained_with_and_without, name, place)
    check(name, 1, "memory", told)
