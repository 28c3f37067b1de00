"""Parts of a Horovod job, a job of one, and several checkpointers on the same ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.dist.horovod import test_journal
from tests.dist.horovod.test_training import check, trained_with_and_without
from tests.support.rank_pool import HOROVODRUN, RankPool
from tests.support.training import (
    Attached,
    HorovodJob,
    Net,
    Place,
    attach,
    horovod,
    import_adapter,
    make_horovod_job,
    rank_0_first,
    train,
)
from tierckpt.tracing import load_traces

# --- parts of the job ----------------------------------------------------------------------------


def side_by_side(folder: str, shm: str) -> dict[str, Any]:
    """Ranks 0 and 2 train one model and rank 1 another, with one folder for the records of all."""
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
            hvd.barrier()  # both are at work, and only after that one of them continues
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
    """Two models with two paths in one job on one node, with one environment that names folders for
    all: every file belongs to one rank."""
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
        # The agent of each set writes the cores in use beside the traces.
        used = {each for each in found if each.name == "usage-r00000.jsonl"}
        assert {each.parent.name for each in used} <= {home for home, _ in records}
        assert found - used == {Path(home) / form.format(rank) for home, rank in records}
    for number, layers in ((pair, 5), (single, 3)):
        timeline = load_traces(
            [*(folder / "traces" / f"process-set-{number}").glob("trace-r*.json")], None
        )
        for rank in timeline.ranks():
            (begin, again) = timeline.of("begin", rank=rank)
            assert begin.end_us <= again.start_us
            assert len({n for s in timeline.of("copy") for n in s.layers}) == 2 * layers


def refused(place: Place) -> list[str]:
    """What is refused of process sets that are not all ranks: two of them together, and an elastic
    state; and on rank 1, a Checkpointer of a rank outside."""
    hvd = horovod()
    part = hvd.add_process_set([0, 2])
    told = []
    try:
        one = make_horovod_job()
        other = make_horovod_job(options=lambda *_: {"process_set": part})
        with pytest.raises(tierckpt.ConfigError) as caught:
            import_adapter().Checkpointer(
                torch.nn.ModuleList([one.model, other.model]),
                [one.optimizer, other.optimizer],
                path=place.path,
            )
        told.append(str(caught.value))
        elastic = importlib.import_module("horovod_ckpt.elastic")
        with pytest.raises(tierckpt.ConfigError) as caught:
            elastic.TorchState(other.model, other.optimizer, tierckpt={"path": place.path})
        told.append(str(caught.value))
        if hvd.rank() == 1:
            with pytest.raises(tierckpt.ConfigError) as caught:
                attach(other, place)
            told.append(str(caught.value))
        return told
    finally:
        hvd.barrier()
        hvd.remove_process_set(part)


def test_process_sets_that_are_refused(ranks: Any, tmp_path: Path) -> None:
    told = ranks(3, HOROVODRUN).run(refused, Place(str(tmp_path / "ckpts"), ""))
    for different, elastic, *_ in told:
        assert "different process sets" in different
        assert "process set of optimizer 'optimizer' is [0, 2]" in elastic
        assert "leave process_set out" in elastic
    assert "rank 1 is not in the optimizer's process set [0, 2]" in told[1][2]


def one_script_on_all_ranks(place: Place) -> list[Any]:
    """Rank 1 makes the same calls as the others, at each entry point. For each: the result of
    `restore()`, and whether the course was that of Horovod without checkpoints."""
    hvd = horovod()
    part = hvd.add_process_set([0, 2])
    drop_in = importlib.import_module("horovod_ckpt.torch")

    def job_by(function: Any, **settings: Any) -> HorovodJob:
        torch.manual_seed(1)
        model = Net()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        made = function(plain, model.named_parameters(), process_set=part, **settings)
        return HorovodJob(model, [made])

    told = []
    try:
        plain = job_by(hvd.DistributedOptimizer)
        expected = [(plain.iterate(i), plain.digest()) for i in range(3)]
        for way in ("function", "module", "installed"):
            settings = {"path": f"{place.path} {way}", "shm_dir": place.shm, "local_every_steps": 0}
            if way == "function":
                job = job_by(import_adapter().DistributedOptimizer, **settings)
            elif way == "module":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setitem(drop_in.DEFAULTS, "close_at_exit", False)
                    job = job_by(drop_in.DistributedOptimizer, boundary="explicit", **settings)
            else:
                job = job_by(hvd.DistributedOptimizer)
                import_adapter().install(job.optimizer, job.model, **settings)
            with job.optimizer.checkpointer as ckpt:
                start = ckpt.restore()
                course = []
                for iteration in range(start, 3):
                    course.append((job.iterate(iteration), ckpt.step() or job.digest()))
                    assert not ckpt.should_exit()
                ckpt.wait()
                version = ckpt.version
            told.append((way, int(start), course == expected, version))
        return told
    finally:
        hvd.barrier()
        hvd.remove_process_set(part)


def test_a_rank_outside_the_process_set_runs_the_same_script(ranks: Any, place: Place) -> None:
    """No rank hangs: this rank steps alone, and is in no checkpoint."""
    told = ranks(3, HOROVODRUN).run(one_script_on_all_ranks, place)
    for number, each in enumerate(told):
        version = 0 if number == 1 else 3
        assert each == [(way, 0, True, version) for way in ("function", "module", "installed")]


# --- several checkpointers on the same ranks -----------------------------------------------------


def two_at_once(places: list[Place]) -> list[Any]:
    """Ranks on two nodes train two models; rank 0 is at both boundaries before rank 1 is at one.
    Returns for each whether the restored state is that of the version."""
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


def test_two_checkpointers_on_the_ranks_of_several_nodes(
    tmp_path: Path, shm_dir: Path, pool: RankPool
) -> None:
    """Their votes are operations of Horovod there, which refuses two of one name at a time."""
    places = [Place(str(tmp_path / name), str(shm_dir)) for name in ("one", "other")]
    assert pool.run(two_at_once, places) == [[(3, True)] * 2] * 2


class Receiver(tierckpt.Callbacks):
    """Counts parameters with reductions."""

    launched = 0

    def on_allreduce_launched(self, params: Any) -> None:
        self.launched += len(list(params))


def two_on_one_optimizer(places: list[Place]) -> dict[str, Any]:
    """After an iteration with both, the first checkpointer ends; after two more the other."""
    job = make_horovod_job()
    heard = [Receiver(), Receiver()]
    ckpts = [attach(job, p, callbacks=[h]).ckpt for p, h in zip(places, heard, strict=True)]
    first, other = ckpts
    job.iterate(0)
    for ckpt in ckpts:
        ckpt.step()
    first.abandon()
    job.iterate(1)
    other.step()
    taken = job.digest()
    job.iterate(2)
    other.abandon()
    again = make_horovod_job(seed=2)
    ckpt = attach(again, places[1]).ckpt
    restored = int(ckpt.restore()), again.digest() == taken
    ckpt.abandon()
    layers = len(list(job.bare.parameters()))
    return {
        "iterations heard": [h.launched / layers for h in heard],
        "restored": restored,
        "left": sorted(name for name in vars(job.optimizer) if name.endswith("_async")),
    }


def test_two_checkpointers_of_one_optimizer(tmp_path: Path, shm_dir: Path, pool: RankPool) -> None:
    """The end of one leaves the other at work, and the end of both leaves no trace."""
    places = [Place(str(tmp_path / name), str(shm_dir)) for name in ("one", "other")]
    expected = {"iterations heard": [1, 3], "restored": (2, True), "left": []}
    assert pool.run(two_on_one_optimizer, places) == [expected] * 2


def beside_a_launcher_of_the_scripts(place: Place, on_top: bool) -> tuple[int, bool]:
    """The number of its calls, and whether it still exists after the checkpointer."""
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
def test_objects_that_a_script_built_from_the_optimizer_stay(
    on_top: bool, pool: RankPool, place: Place
) -> None:
    told = pool.run(beside_a_launcher_of_the_scripts, place, on_top)
    assert told == [(3, True)] * 2


# --- a job of one --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two backward passes", "a schedule made after, and a broadcast"])
def test_a_job_of_one_process_is_a_job(name: str, ranks: Any, place: Place) -> None:
    (told,) = ranks(1, HOROVODRUN).run(trained_with_and_without, name, place)
    check(name, 1, "memory", told)


def test_a_job_of_one_process_makes_its_steps_again(ranks: Any, place: Place) -> None:
    test_journal.check_resumed(ranks(1, HOROVODRUN).run(test_journal.resumed, place, "clipped"))
