"""The entry points for checkpoints in a Horovod script."""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import exact
from tests.support.rank_pool import HOROVODRUN, LAUNCHERS, ROOT, RankPool
from tests.support.training import (
    WIDTH,
    HorovodJob,
    Net,
    Place,
    attach,
    horovod,
    import_adapter,
    init_again,
    make_horovod_job,
    rank,
    train,
)
from tests.support.warm_python.servers import PYTHON

SETTINGS: dict[str, Any] = {"local_every_steps": 0, "local_every_seconds": 0}


def all_in_one(place: Place) -> tuple[Any, ...]:
    """Compare with Horovod's own function with the same arguments."""
    hvd = horovod()

    def job_by(function: Any, **settings: Any) -> HorovodJob:
        torch.manual_seed(1)
        model = Net()
        torch.manual_seed(1000 + hvd.rank())
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        named = model.named_parameters()
        fp16 = hvd.Compression.fp16
        optimizer = function(plain, named, fp16, backward_passes_per_step=2, **settings)
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
    return course == expected, ckpt.version, ckpt._log.counts["sealed"]


def test_the_drop_in_takes_horovods_arguments_and_knows_the_model(
    pool: RankPool, place: Place
) -> None:
    told = pool.run(all_in_one, place)
    assert told == [(True, 3, 3)] * 2


class Empty(Net):
    """A module with length 0, as a container with parts that come later."""

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
    return optimizer.checkpointer._state.model is model


def test_a_model_is_taken_as_given(pool: RankPool, place: Place) -> None:
    """Also a false model, such as an empty one."""
    told = pool.run(given_an_empty_model, place)
    assert told == [True] * 2


def lacking_names() -> list[str]:
    """Names in Horovod's module that ours does not have."""
    drop_in, hvd = importlib.import_module("horovod_ckpt.torch"), horovod()
    return [
        name
        for ours, theirs in ((drop_in, hvd), (drop_in.elastic, hvd.elastic))
        for name in dir(theirs)
        if not hasattr(ours, name)
    ]


def test_the_replaced_import_has_every_name_of_horovods(pool: RankPool) -> None:
    assert pool.run(lacking_names) == [[]] * 2


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


def run_script(place: Place, folder: Path, steps: int) -> list[Any]:
    """Under a horovodrun of its own."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = LAUNCHERS[HOROVODRUN].format(size=2).split()
    done = subprocess.run(
        [*launcher, PYTHON, str(script)],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'common'}",
            "OMP_NUM_THREADS": "1",
            "TIERCKPT_PATH": place.path,
            "TIERCKPT_SHM_DIR": place.shm,
            "STEPS": str(steps),
            "RESULT": str(folder / "result"),
        },
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    results = [folder / f"result{rank}" for rank in range(2)]
    shown = done.stdout + done.stderr
    assert all(r.exists() for r in results), shown
    assert done.returncode == 0, shown
    assert shown.count("tierckpt: [rank ") == 2, "what was restored, and what is stored, by rank 0"
    assert "tierckpt: [rank 0] restored v6" in shown
    return [torch.load(r) for r in results]


def run_here(source: str, steps: int, **environment: str) -> dict[str, Any]:
    """Run a script in the ranks of a pool, with its variables."""
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
    """Run it unchanged, except for the end, which a pool's ranks do not reach."""
    with pytest.MonkeyPatch.context() as patch:
        drop_in = importlib.import_module("horovod_ckpt.torch")
        patch.setitem(drop_in.DEFAULTS, "close_at_exit", False)
        names = run_here(SCRIPT, steps, TIERCKPT_PATH=place.path, TIERCKPT_SHM_DIR=place.shm)
    names["optimizer"].checkpointer.close()
    return names["result"]


def images(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: exact.image(value) for name, value in state.items()}


def test_a_script_with_another_import_resumes(
    tmp_path: Path, launchable: Any, pool: RankPool, place: Place
) -> None:
    """One line of it is changed, and nothing else. The script's own broadcast, after the restore,
    leaves each rank its BatchNorm statistics."""
    launchable(HOROVODRUN)
    pool = pool
    plain = pool.run(run_plainly, 8)
    assert {start for start, _ in pool.run(run_with_checkpoints, place, 6)} == {0}
    second = run_script(place, tmp_path, 8)
    assert {start for start, _ in second} == {6}
    for (_, resumed), (_, undisturbed) in zip(second, plain, strict=True):
        assert exact.differences(images(resumed), images(undisturbed)) == []
    assert place.segments() == [], "it was closed at its end"


def shut_down_first(place: Place) -> dict[str, Any]:
    """The script's last line is `hvd.shutdown()`, while it handles the end of its data, in a
    notebook with an earlier cell that failed."""
    scripts = importlib.import_module("tierckpt.checkpointer.checkpointer")
    drop_in = importlib.import_module("horovod_ckpt.torch")
    hvd = horovod()
    job = make_horovod_job()
    ckpt = attach(job, place, local_every_steps=100).ckpt
    train(job, ckpt, range(3))
    number = rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripts, "_ends", [])
        atexit.unregister(scripts.close_at_exit(lambda: ckpt))
        patch.setattr(sys, "last_value", NameError("a typo"), raising=False)
        try:
            next(iter(()))
        except StopIteration:
            drop_in.shutdown()
    up = hvd.is_initialized()
    init_again(place, number)
    told = {"closed": ckpt.closed, "left": place.segments(), "durable": len(place.shards())}
    return {**told, "up": up}


def shut_down_behind_our_back(place: Place) -> tuple[list[str], int]:
    """By Horovod's own module."""
    hvd = horovod()
    job = make_horovod_job()
    attached = attach(job, place, local_every_steps=100)
    train(job, attached.ckpt, range(3))
    number = rank()
    hvd.shutdown()
    attached.ckpt.close_or_abandon()
    init_again(place, number)
    return [e.message for e in attached.said("no final checkpoint")], len(place.segments())


def test_the_replaced_shutdown_closes_first(pool: RankPool, place: Place) -> None:
    """After the shutdown, no other rank could take part in a final checkpoint."""
    told = pool.run(shut_down_first, place)
    assert told == [{"closed": True, "left": [], "durable": 2, "up": False}] * 2


def test_an_end_after_a_shutdown_is_reported(pool: RankPool, place: Place) -> None:
    for messages, left in pool.run(shut_down_behind_our_back, place):
        (said,) = messages
        assert "the communication was shut down before" in said
        assert "up to v3 stay, also in memory" in said
        assert left


def broadcast_after_a_restore(place: Place) -> dict[str, Any]:
    """Digests after both broadcasts, by Horovod and ours at a fresh start; of the last step, and
    after the broadcasts that follow a restore; and of both ranks after a later step."""
    drop_in = importlib.import_module("horovod_ckpt.torch")

    def life(hvd: Any, seed: int, **settings: Any) -> tuple[Net, list[Any]]:
        torch.manual_seed(seed + horovod().rank())
        model = Net(norm=torch.nn.BatchNorm1d)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        made = hvd.DistributedOptimizer(plain, model.named_parameters(), **settings)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(made, root_rank=0)
        return model, [made, plain]

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
        model, (optimizer, _) = life(drop_in, seed=1, **ours)
        told["fresh"] = digest(model)
        for _ in range(2):
            told["last"] = step(model, optimizer)
            optimizer.checkpointer.step()
        optimizer.checkpointer.complete()
        optimizer.checkpointer.abandon()
        model, optimizers = life(drop_in, seed=3, **ours)
    optimizer = optimizers[0]
    told["version"] = optimizer.checkpointer.restored.version
    told["restored"] = digest(model)
    new = torch.full((3,), 1.0 + horovod().rank())
    drop_in.broadcast_parameters([("new", new), *model.named_buffers()], 0)
    for each in optimizers:
        drop_in.broadcast_optimizer_state(each, 0)
    told["again"] = digest(model)
    told["not restored"] = new.tolist()
    told["stepped"] = step(model, optimizer)
    drop_in.broadcast_parameters(model.state_dict(), 0)
    told["later"] = digest(model)
    optimizer.checkpointer.close()
    return told


def test_a_broadcast_keeps_the_restored_state(pool: RankPool, place: Place) -> None:
    """Each rank has its own statistics. Tensors that are not restored, or were trained since, are
    sent. To have optimizer state to send, Horovod makes a step, in which weight decay would change
    weights."""
    told = pool.run(broadcast_after_a_restore, place)
    for each in told:
        assert each["version"] == 2
        assert each["horovod's"] == each["fresh"] == told[0]["fresh"]
        assert each["last"] == each["restored"] == each["again"]
        assert each["not restored"] == [1.0] * 3
        assert each["later"] == told[0]["stepped"]
    assert told[0]["restored"] != told[1]["restored"]
    assert told[0]["stepped"] != told[1]["stepped"]


def by_an_elastic_script(place: Place) -> dict[str, Any]:
    """The function that runs under elastic Horovod, in ranks that no rank joins or leaves."""
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
    pool: RankPool, place: Place
) -> None:
    """They go to the state; settings of the state itself override them."""
    for told in pool.run(by_an_elastic_script, place):
        assert told == {
            "passes": 2,
            "settings": (place.path, place.shm, 4, 0),
            "version": 1,
        }


def loads_its_own(place: Place, how: str) -> dict[str, Any]:
    """A script with checkpoints of its own after the restore: one rank loads, and broadcasts."""
    drop_in = importlib.import_module("horovod_ckpt.torch")
    rank = horovod().rank()
    root = 1 if how == "rank 1" else 0
    events: list[Any] = []

    def life(seed: int) -> tuple[Net, Any]:
        torch.manual_seed(seed + rank)
        model = Net(norm=torch.nn.BatchNorm1d)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = {**SETTINGS, "path": place.path, "shm_dir": place.shm, "boundary": "explicit"}
        settings["on_event"] = events.append
        made = drop_in.DistributedOptimizer(plain, model.named_parameters(), **settings)
        if seed == 1:
            drop_in.broadcast_parameters(model.state_dict(), 0)
        for _ in range(1 if seed == 1 else 0):
            model(torch.randn(3, WIDTH)).square().sum().backward()
            made.step()
            made.checkpointer.step()
        return model, made

    def digest(model: Net, optimizer: Any) -> str:
        momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        kept = {f"momentum {n}": tensor for n, tensor in enumerate(momentum)}
        return exact.digest({**exact.parameters(model), **exact.buffers(model), **kept})

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(drop_in.DEFAULTS, "close_at_exit", False)
        model, optimizer = life(seed=1)
        optimizer.checkpointer.complete()
        optimizer.checkpointer.abandon()
        model, optimizer = life(seed=2)
    restored = int(optimizer.checkpointer.restored)
    if rank == root:
        own = {n: torch.full_like(t, 7) for n, t in model.state_dict().items()}
        if how == "through .data":
            for name, param in model.named_parameters():
                param.data.copy_(own[name])
        elif how == "a part":
            model.load_state_dict({n: t for n, t in own.items() if "weight" in n}, strict=False)
        else:
            model.load_state_dict(own)
    drop_in.broadcast_parameters(model.state_dict(), root)
    drop_in.broadcast_optimizer_state(optimizer, root)
    drop_in.broadcast_parameters(model.state_dict(), root)
    sevens = [name for name, param in model.named_parameters() if (param == 7).all()]
    told = {
        "restored": restored,
        "parameters": exact.digest(exact.parameters(model)),
        "all": digest(model, optimizer),
        "sevens": len(sevens) / len(list(model.parameters())),
        "warned": any("after the restore of v1" in e.text() for e in events if e.severity >= 30),
    }
    optimizer.checkpointer.close()
    return told


@pytest.mark.parametrize("how", ["rank 1", "through .data", "a part"])
def test_state_that_the_script_loads_after_the_restore_is_every_ranks(
    how: str, pool: RankPool, place: Place
) -> None:
    """Ranks do not continue with different weights: the last load wins on all of them."""
    told = pool.run(loads_its_own, place, how)
    assert [each["restored"] for each in told] == [1, 1]
    assert told[0]["parameters"] == told[1]["parameters"]
    assert (told[0]["sevens"] == 1) == (how != "a part")
    assert told[0]["sevens"] > 0
    assert [each["warned"] for each in told] == [True, False]
    if how == "rank 1":
        assert told[0]["all"] == told[1]["all"]
