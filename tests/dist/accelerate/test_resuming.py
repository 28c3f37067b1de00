"""A killed job that uses Accelerate continues with exactly the steps of an undisturbed one:
batches, gradients, weights, learning rates, and random states."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from tests.support.frameworks.fixtures import MakeJob, Undisturbed
from tests.support.frameworks.killed_job import (
    a_fork_continues_exactly,
    goes_back_once,
    refuses_other_data,
    resumes_exactly,
    resumes_with_the_same_samples,
)
from tierckpt._version import version_numbers

CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    # Kills of one job, one after the other; the scenario. 7 batches an epoch, unless it says more.
    "every phase": (
        ["backward:1:2", "batch end:0:5", "backward:0:7", "epoch end:1:14", "backward:1:19"],
        {},
    ),
    "without a seedable sampler": (["backward:1:4", "backward:1:11"], {"seedable": False}),
    "accumulation": (
        # 4 steps an epoch: the last batch of an epoch makes one.
        ["backward:1:3", "epoch end:0:4", "backward:0:10"],
        {"accumulation": 2, "sets_epoch": True, "saves": True},
    ),
    "workers, bf16": (
        ["backward:1:10"],
        {"workers": 2, "accelerator": {"mixed_precision": "bf16"}},
    ),
    "a scaler": (["backward:1:9"], {"half": True}),
    "two models": (["backward:1:10"], {"optimizers": 2, "accumulation": 2}),
    "an optimizer that accumulates by hand": (
        ["backward:1:10", "backward:0:15"],
        {"optimizers": 3},
    ),
    "split batches": (["backward:1:10"], {"loading": {"split_batches": True}}),
    "dispatched batches": (
        ["backward:1:4", "backward:0:10"],
        {"loading": {"dispatch_batches": True}},
    ),
    "dispatched and split": (
        ["backward:1:10"],
        {"seedable": False, "loading": {"dispatch_batches": True, "split_batches": True}},
    ),
    "stateful loader": (
        # Also after the first two batches of an epoch: torchdata's iterator of the first pass of a
        # process is made by `prepare`, those of the others draw a seed.
        ["backward:1:3", "backward:0:8", "backward:1:9"],
        {"loading": {"use_stateful_dataloader": True}},
    ),
    "stateful loader with workers": (
        ["backward:1:10"],
        {"workers": 1, "loading": {"use_stateful_dataloader": True}},
    ),
    "iterable data set": (["backward:1:10"], {"data": "stream"}),
    "iterable data set, not dispatched": (
        ["backward:1:10"],
        {"data": "stream", "loading": {"dispatch_batches": False}},
    ),
    "weighted sampler": (["backward:1:4", "backward:1:10"], {"data": "weighted"}),
    "own generators": (["backward:1:3", "backward:1:10"], {"data": "own generators"}),
    "two loaders": (["backward:1:4", "backward:1:10"], {"data": "two"}),
    "last batches dropped": (["epoch end:0:6"], {"data": "drop last"}),
    "epochs that are cut": (["backward:1:6", "epoch end:1:10"], {"batches": 5}),
    "LoRA": (["backward:1:10"], {"lora": True}),
    "one rank": (["backward:0:16"], {"ranks": 1}),
}


def skip_without_stateful_workers() -> None:
    if version_numbers(version("accelerate")) < (1, 13):
        pytest.skip("this Accelerate fails with such loaders, also without Tierckpt")


@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_resumes_exactly(
    name: str, make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    kills, scenario = CASES[name]
    if name == "stateful loader with workers":
        skip_without_stateful_workers()
    resumes_exactly(make_job(**scenario), kills, undisturbed(**scenario))


def test_other_data_after_a_restart_are_refused(make_job: MakeJob) -> None:
    why = "on ranks 0, 1 of 2: its data after the restore"
    refuses_other_data(make_job(), "backward:1:8", "numbered", why)


def test_a_fork_by_the_environment_continues_exactly(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    source = make_job({"local_every_steps": 1, "when_busy": "wait"})
    a_fork_continues_exactly(source, make_job(), ("backward:1:10", "backward:0:10"), undisturbed())


def test_a_rollback_by_the_environment_is_made_once(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    job = make_job({"local_every_steps": 1, "local_keep_last": 99, "when_busy": "wait"})
    goes_back_once(job, ("backward:1:11", "backward:0:8"), 3, undisturbed())


def test_checkpoints_leave_the_training_unchanged(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    run = make_job().start()
    assert run.ended(), run.output()
    assert run.lines(0) == undisturbed().lines(0)
    assert run.lines(1) == undisturbed().lines(1)


def test_a_signal_ends_an_accumulating_job_after_a_step_and_the_next_run_resumes_exactly(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    scenario = {"accumulation": 3, "loading": {"use_seedable_sampler": False}}
    plain, job = undisturbed(**scenario), make_job(**scenario)
    first = job.start(signal="backward:1:1")
    assert first.ended(), first.output()
    assert job.fired("backward:1:1")
    assert not first.of_kind("epoch end", 0) or len(first.of_kind("epoch end")) < 3
    again = job.start()
    assert again.ended(), again.output()
    for rank in range(2):
        steps = [run.of_kind("step", rank) for run in (first, again)]
        assert steps[0] + steps[1] == plain.of_kind("step", rank)
        assert again.place_in(plain, rank) > 0


def test_a_finished_job_started_again_trains_no_step(make_job: MakeJob) -> None:
    job = make_job()
    first, again = job.start(), job.start()
    assert first.ended(), first.output()
    assert again.ended(), again.output()
    assert not again.of_kind("batch")


@pytest.mark.parametrize(
    ("ranks", "others", "batch", "accumulation"), [(2, 1, 8, 1), (1, 2, 2, 1), (2, 1, 4, 2)]
)
def test_another_number_of_ranks_continues_with_the_same_samples_a_step(
    ranks: int, others: int, batch: int, accumulation: int, make_job: MakeJob
) -> None:
    scenario = {"data": "numbered", "ranks": ranks}
    plain, job = make_job(**scenario), make_job(**scenario)
    whole = plain.start()
    assert whole.ended(), whole.output()
    killed = job.start("batch end:0:9")
    other = job.start(ranks=others, batch_size=batch, accumulation=accumulation)
    assert other.ended(), other.output()
    resumes_with_the_same_samples(killed, other, whole, 7 if ranks == 2 else 13)


def test_another_number_of_samples_a_step_is_refused_before_the_first_one(
    make_job: MakeJob,
) -> None:
    job = make_job()
    job.start("backward:1:8")
    alone = job.start(ranks=1)
    assert "8 samples a step (2 ranks, batch_size=4" in alone.output()
    assert "Set gradient_accumulation_steps=2, or start 2 ranks" in alone.output()
    assert not alone.of_kind("batch")


def test_workers_that_prepare_started_with_another_seed_are_refused(make_job: MakeJob) -> None:
    skip_without_stateful_workers()
    job = make_job(workers=1, loading={"use_stateful_dataloader": True})
    job.start("backward:1:3")
    again = job.start(seed=8)
    assert "Call accelerate.utils.set_seed() with the same number" in again.output()
    assert not again.of_kind("batch")
    assert job.start().of_kind("batch")


def test_another_seed_of_the_script_does_not_matter_to_a_resumed_run(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    plain, job = undisturbed(), make_job()
    job.start("backward:1:3")
    again = job.start(seed=8)
    assert again.ended(), again.output()
    assert all(again.place_in(plain, rank) > 0 for rank in range(2))


def test_persistent_workers_are_warned_of(make_job: MakeJob) -> None:
    run = make_job(ranks=1, workers=1, data="persistent", batches=1).start()
    assert "set persistent_workers=False" in run.output()
