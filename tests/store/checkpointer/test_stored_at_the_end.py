"""`close()` and `save(now=True)` store the live state, independent of the progress of copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tierckpt
from tests.support.tiny_course import in_shm, versions_on_disk
from tierckpt import _faults
from tierckpt.format import ShardKey, VersionId
from tierckpt.offline import compare, open_version
from tierckpt.testing import (
    BATCH,
    CLASSES,
    IN_FEATURES,
    ThreadGroup,
    TinyJob,
    fired,
    run_in_child,
    run_ranks,
    seed_everything,
    tiny_model,
)

STEPS = 5
FAULT = f"eio@copy:version={STEPS}"
TIMINGS: dict[str, tuple[dict[str, Any], str]] = {
    "in memory": ({"local_every_steps": 100}, ""),
    "never taken": ({"memory_every_steps": 100, "local_every_steps": 100}, ""),
    "lost as it was copied": ({}, FAULT),
}
"""Settings and faults: the state of the last boundary's version when the job ends."""


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    monkeypatch.setenv("TIERCKPT_AGENT", "inline")


@pytest.fixture
def with_faults(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda rules: monkeypatch.setattr(_faults, "_rules", _faults.parse(rules))


def ids_on_disk(path: Path) -> list[VersionId]:
    keys = (ShardKey.parse(p.name.removesuffix(".manifest")) for p in path.glob("*.manifest"))
    return sorted({key.id for key in keys if key}, key=lambda id_: id_.version)


def differences(a: Path, b: Path) -> list[str]:
    with ExitStack() as stack:
        opened = [open_version(str(path), None, lambda n: None) for path in (a, b)]
        for each in opened:
            stack.callback(each.close)
        return [each.name for each in compare(*opened).differences]


# --- actions of a script after its last boundary -------------------------------------------------


def nothing(job: TinyJob) -> None:
    pass


def schedule(job: TinyJob) -> None:
    job.scheduler.step()


def draw(job: TinyJob) -> None:
    torch.rand(1), random.random(), job.shuffle.random()


def evaluate_in_training_mode(job: TinyJob) -> None:
    """Change the statistics of BatchNorm."""
    job.model(torch.ones(BATCH, IN_FEATURES))


def overwrite_weights(job: TinyJob) -> None:
    """Overwrite weights, as with averaged ones; autograd's version counters do not change."""
    job.checkpointer.wait()  # otherwise the copy is torn, or would be
    for param in job.model.parameters():
        param.data.mul_(0.5)


def overwrite_what_the_optimizer_keeps(job: TinyJob) -> None:
    job.checkpointer.wait()
    job.optimizer.state[job.model.get_parameter("4.bias")]["exp_avg"].zero_()


def pass_an_iteration(job: TinyJob) -> None:
    """Pass an iteration without a step of the optimizer, as a GradScaler does."""
    job.iteration += 1
    job.checkpointer.step()


CHANGES = [
    nothing,
    schedule,
    draw,
    evaluate_in_training_mode,
    overwrite_weights,
    overwrite_what_the_optimizer_keeps,
    pass_an_iteration,
]


@pytest.mark.parametrize(
    ("end", "change"),
    [*(("close", change) for change in CHANGES), ("save", schedule)],
)
def test_the_stored_state_is_the_live_state(
    end: str,
    change: Callable[[TinyJob], None],
    tmp_path: Path,
    with_faults: Callable[[str], None],
) -> None:
    found = []
    for timing, (settings, rules) in TIMINGS.items():
        path = tmp_path / timing.replace(" ", "")
        with_faults(rules)
        job = TinyJob(path, **settings).run(STEPS)
        change(job)
        live = job.fingerprint(), job.iteration
        if end == "save":
            job.checkpointer.save(now=True)
            job.checkpointer.abandon()
        else:
            job.checkpointer.close()
        with_faults("")
        assert bool(job.heard("failed")) == bool(rules), timing
        found.append(path)
    with TinyJob(found[0], seed=99) as again:
        restored = again.restore()
        assert (restored.version, int(restored)) == (STEPS, live[1])
        assert again.fingerprint() == live[0]
    first, *others = found
    assert [differences(first, other) for other in others] == [[]] * len(others)


def test_a_metric_that_came_after_the_boundary_is_stored(path: Path) -> None:
    job = TinyJob(path).run(STEPS)
    job.checkpointer.metric = 0.25
    job.checkpointer.close()
    assert tierckpt.load(path).metric == 0.25


def test_where_a_forward_pass_is_the_boundary_the_streams_are_those_before_it(
    tmp_path: Path,
) -> None:
    """The iteration that it started is repeated, with a batch drawn again."""
    paths = []
    for every in (1, 100):
        settings = {"memory_every_steps": every, "local_every_steps": 100}
        paths.append(path := tmp_path / str(every))
        with TinyJob(path, boundary="forward", **settings) as job:
            for _ in range(STEPS):
                job.train_one()
            streams = torch.get_rng_state()
            torch.randn(BATCH)
            evaluate_in_training_mode(job)
            assert job.checkpointer.version == STEPS
            means = job.model.get_buffer("1.running_mean").clone()
        with TinyJob(path, seed=99, boundary="forward", **settings) as again:
            again.restore()
            assert torch.equal(torch.get_rng_state(), streams)
            assert torch.equal(again.model.get_buffer("1.running_mean"), means)
    assert differences(*paths) == []


# --- how it is stored ----------------------------------------------------------------------------


def test_an_unchanged_version_is_not_written_twice(path: Path) -> None:
    with TinyJob(path) as job:
        job.run(STEPS)
        job.checkpointer.save(now=True)
    assert [e.version for e in job.heard("committed")] == [*range(1, STEPS + 1)]
    assert {id_.generation for id_ in ids_on_disk(path)} == {1}


def test_each_save_stores_the_changes_since_the_previous_one(path: Path, shm_dir: Path) -> None:
    """One version of each number stays, independent of retention."""
    settings = {"local_keep": f"3, every {STEPS}, best 2"}
    with TinyJob(path, **settings) as job:
        job.on_step = lambda job: job.checkpointer.save(now=True)
        for metric in range(STEPS):
            job.train_one()
            job.iteration += 1
            job.checkpointer.step(metric)
        for _ in range(3):
            schedule(job)
            job.checkpointer.save(now=True)
        schedule(job)
        live = job.fingerprint()
    assert versions_on_disk(path) == [1, 2, 3, 4, 5]
    assert in_shm(shm_dir) == []
    assert ids_on_disk(path)[-1].generation == 5
    with TinyJob(path, seed=99, **settings) as again:
        assert again.restore() == STEPS
        assert again.fingerprint() == live
        again.run(STEPS + 2)
    assert versions_on_disk(path)[-1] == STEPS + 2


def test_the_version_of_the_boundary_is_there_until_the_other_is(path: Path, marks: Path) -> None:
    """The job is killed while it seals the second version: a restart restores the first one,
    complete."""
    rules = f"kill@seal:version={STEPS},hit=2"
    assert run_in_child(train_and_schedule, str(path), rules=rules, marks=marks) == -9
    assert fired(marks)
    course = TinyJob(None)
    course.run(STEPS)
    with TinyJob(path, seed=99) as again:
        assert again.restore() == STEPS
        assert again.fingerprint() == course.fingerprint()


def train_and_schedule(path: str) -> None:
    with TinyJob(path) as job:
        job.run(STEPS)
        schedule(job)


class Counter:
    """An object for `extra` that may fail."""

    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def ranks_end(
    path: Path, shm_dir: Path, after: Callable[[Counter, int], None], **settings: Any
) -> list[tuple[list[tierckpt.Event], int]]:
    """Run two ranks, one after the other; `after` is run by each between its last boundary and
    `close()`. Returns the events of each, and the value of its counter after a restart."""

    def program(group: ThreadGroup, train: bool) -> tuple[list[tierckpt.Event], Any]:
        model = torch.nn.Linear(200, 200)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        counter, events = Counter(), list[tierckpt.Event]()
        with tierckpt.Checkpointer(
            model,
            optimizer,
            group=group,
            extra_per_rank={"counter": counter},
            on_event=events.append,
            path=path,
            shm_dir=shm_dir,
            when_busy="wait",
            **settings,
        ) as ckpt:
            restored = ckpt.restore()
            for _ in range(3 * train):
                counter.value += 1
                model(torch.ones(1, 200)).sum().backward()
                optimizer.step()
                ckpt.step()
            found = counter.value
            if train:
                after(counter, group.rank)
            else:
                assert restored.version == 3
        return events, found

    both = run_ranks(2, lambda group: program(group, True))
    again = run_ranks(2, lambda group: program(group, False))
    return [(events, found) for (events, _), (_, found) in zip(both, again, strict=True)]


@pytest.mark.parametrize("every", [1, 100])
def test_where_one_rank_has_moved_on_all_ranks_take_it_again(
    every: int, path: Path, shm_dir: Path
) -> None:
    def after(counter: Counter, rank: int) -> None:
        counter.value += 10 * rank

    told = ranks_end(path, shm_dir, after, memory_every_steps=every, local_every_steps=every)
    assert [found for _, found in told] == [3, 13]
    ((id_),) = {id_ for id_ in ids_on_disk(path) if id_.version == 3}
    assert id_.generation == (2 if every == 1 else 1)


def test_a_file_that_one_rank_cannot_store_costs_no_version(path: Path, shm_dir: Path) -> None:
    """All ranks have the version of the boundary, and report it."""

    def after(counter: Counter, rank: int) -> None:
        counter.value = object() if rank else 4

    told = ranks_end(path, shm_dir, after, memory_every_steps=1, local_every_steps=100)
    assert [found for _, found in told] == [3, 3]
    messages = [event.message for events, _ in told for event in events]
    assert any("stored as of its boundary" in each for each in messages)
    assert any("cannot be stored without pickle" in each for each in messages)


def test_a_run_without_steps_keeps_the_restored_version(path: Path, shm_dir: Path) -> None:
    """Also if the version was only in memory: the result is the same whether or not an agent of the
    previous run had brought it to disk before it was killed."""
    settings = {"local_every_steps": 100}
    job = TinyJob(path, **settings).run(STEPS)
    live = job.fingerprint()
    job.checkpointer.wait()
    job.checkpointer.abandon()
    with TinyJob(path, seed=99, **settings) as looking:
        assert looking.restore().levels == {"memory": 1}
        draw(looking)
    assert ids_on_disk(path) == [VersionId(1, STEPS)]
    assert in_shm(shm_dir) == []
    with TinyJob(path, seed=99, **settings) as again:
        again.restore()
        assert again.fingerprint() == live
        draw(again)
        again.checkpointer.save(now=True)  # but a request stores the live state
        schedule(again)
        live = again.fingerprint()
    assert ids_on_disk(path)[-1].generation == 3
    with TinyJob(path, seed=99, **settings) as again:
        again.restore()
        assert again.fingerprint() == live


# --- epochs --------------------------------------------------------------------------------------


class Script:
    """Epochs over a loader, with the usual work at the end of an epoch. Draws random numbers in
    every step."""

    def __init__(self, path: Path | None, kind: str, seed: int = 1, **settings: Any) -> None:
        seed_everything(seed)
        samples = TensorDataset(torch.arange(4 * BATCH).float())
        self.model = tiny_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        extra: dict[str, Any] = {"schedule": self.schedule}
        per_rank: dict[str, Any] = {}
        self.sampler = None
        if kind == "sampler":
            self.sampler = tierckpt.ResumableSampler(samples, BATCH, rank=0, ranks=1)
            generator = torch.Generator()
            self.data: Any = DataLoader(samples, batch_sampler=self.sampler, generator=generator)
            extra["position"] = self.sampler.position
        else:
            loader = DataLoader(samples, BATCH, shuffle=True)
            self.data = tierckpt.ResumableLoader(loader)
            per_rank["data"] = self.data
        self.losses: list[float] = []
        self.ckpt: tierckpt.Checkpointer | None = None
        self.path = path
        if path is not None:
            given = {"extra": extra, "extra_per_rank": per_rank, "path": path, **settings}
            self.ckpt = tierckpt.Checkpointer(self.model, self.optimizer, **given)
            self.ckpt.restore()

    def run(self, epochs: int, stop: Callable[[Script], None] | None = None, at: str = "") -> None:
        """Run to the end of this number of epochs, or of `stop`, which is called at that point of
        the last one."""
        places = self.data if self.sampler is None else self.sampler
        for epoch in range(places.epoch, epochs):
            places.set_epoch(epoch)
            here = at if epoch == epochs - 1 else ""
            for number, (features,) in enumerate(self.data):
                if here == "with a batch that is not used" and number == 2:
                    return stop(self) if stop else None
                self.train(features)
                if here == "at the last batch" and number == 3:
                    return stop(self) if stop else None
            if here == "before the end is done":
                return stop(self) if stop else None
            self.evaluate()
            if here == "after an evaluation":
                return stop(self) if stop else None
            self.schedule.step()
        return stop(self) if stop else None

    def train(self, features: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        inputs = features[:, None].expand(-1, IN_FEATURES) + torch.rand(1)
        target = features.long() % CLASSES
        loss = torch.nn.functional.cross_entropy(self.model(inputs), target)
        loss.backward()
        self.optimizer.step()
        if self.sampler is not None:
            self.sampler.step()
        self.losses.append(loss.item())
        if self.ckpt is not None:
            self.ckpt.step()

    def evaluate(self) -> None:
        """Draw random numbers that the training does not depend on; the sampler does not restore
        them."""
        if self.sampler is None:
            torch.rand(3)


def closed(script: Script) -> None:
    assert script.ckpt is not None
    script.ckpt.close()


def saved(script: Script) -> None:
    assert script.ckpt is not None
    script.ckpt.save(now=True)
    script.ckpt.abandon()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[float]]:
    found = {}
    for kind in ("loader", "sampler"):
        script = Script(None, kind)
        script.run(4)
        found[kind] = script.losses
    return found


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # restored, then stepped
@pytest.mark.parametrize(
    ("kind", "at", "end"),
    [
        ("loader", "", closed),
        ("loader", "before the end is done", saved),
        ("loader", "after an evaluation", closed),
        ("loader", "with a batch that is not used", closed),
        ("sampler", "", saved),
        ("sampler", "at the last batch", saved),
        ("sampler", "before the end is done", closed),
    ],
)
def test_more_epochs_follow_as_if_nothing_had_happened(
    kind: str,
    at: str,
    end: Callable[[Script], None],
    tmp_path: Path,
    undisturbed: dict[str, list[float]],
) -> None:
    """Work at the end of an epoch is done once, wherever in it a version was taken."""
    paths = []
    for every in (1, 100):
        path = tmp_path / str(every)
        paths.append(path)
        settings = {"memory_every_steps": every, "local_every_steps": every}
        first = Script(path, kind, **settings)
        first.run(2, end, at)
        steps = len(first.losses)
        assert steps == (6 if "not used" in at else 8)
        second = Script(path, kind, seed=2, **settings)
        second.run(4, closed)
        assert second.losses == undisturbed[kind][steps:], every
        assert second.schedule.last_epoch == 4
    assert differences(*paths) == []


def test_the_newest_version_of_each_level_is_known(tmp_path: Path) -> None:
    far = {"persistent_path": str(tmp_path / "far"), "persistent_every_steps": 100}
    with TinyJob(tmp_path / "ckpts", local_every_steps=2, **far) as job:
        assert job.checkpointer.newest == {"memory": None, "local": None, "persistent": None}
        job.run(STEPS)
        known = job.checkpointer.newest
        assert known["memory"] in range(1, STEPS + 1)
        assert known["persistent"] is None
        job.checkpointer.save(now=True)
        assert job.checkpointer.newest == {"memory": STEPS, "local": STEPS, "persistent": None}
    assert job.checkpointer.newest == {"local": STEPS, "persistent": STEPS}
