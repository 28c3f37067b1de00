"""A killed Lightning job continues with exactly the steps of an undisturbed one: batches,
gradients, weights, learning rates, random states, and everything logged."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from tests.support.frameworks.fixtures import MakeJob, Undisturbed
from tests.support.frameworks.killed_job import (
    a_fork_continues_exactly,
    ends_by_a_signal_and_resumes,
    goes_back_once,
    refuses_other_data,
    resumes_after_an_error,
    resumes_exactly,
    resumes_with_the_same_samples,
)

CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    # Kills of one job, one after the other; the scenario. 6 batches an epoch, unless it says more.
    "every phase": (
        [
            *("fit start:0:0", "backward:1:2", "validation:0:4", "epoch end:1:6"),
            *("model checkpoint:0:10", "batch end:1:15", "epoch end:0:18"),
        ],
        {"callbacks": ("model checkpoint",)},
    ),
    "workers, bf16": (["backward:1:8"], {"workers": 2, "trainer": {"precision": "bf16-mixed"}}),
    "fp16": (["backward:1:9", "backward:0:14"], {"half": True}),
    "accumulation, clipping, averaged weights": (
        ["backward:1:4", "validation:1:5", "epoch end:0:6"],
        {
            "model": "cycle",
            "callbacks": ("ema",),
            "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        },
    ),
    "manual optimization": (
        ["backward:1:7", "backward:0:16"],
        {"model": "manual", "trainer": {"strategy": "ddp_find_unused_parameters_true"}},
    ),
    "stochastic weight averaging": (
        ["backward:1:8", "epoch end:1:12", "backward:0:14"],
        {"callbacks": ("swa",), "model": "averaged"},
    ),
    "weight averaging with a scheduler": (
        ["backward:1:10"],
        {"callbacks": ("swa",), "trainer": {"max_epochs": 3}},
    ),
    "stateful loader": (["backward:1:8"], {"data": "stateful"}),
    "shuffled stateful loader": (["backward:1:8"], {"data": "shuffled stateful", "workers": 1}),
    "iterable data set": (["backward:1:8", "epoch end:1:12"], {"data": "stream"}),
    "a combined loader of the script's": (["backward:1:8"], {"data": "combined"}),
    "compiled": (
        ["backward:1:8"],
        {"model": "compiled", "trainer": {"max_epochs": 2, "num_sanity_val_steps": 0}},
    ),
    "LoRA": (["backward:1:8"], {"model": "LoRA"}),
    "two loaders": (["backward:1:8", "validation:0:16"], {"data": "two"}),
    "own generators": (["backward:1:3", "backward:0:8"], {"data": "own generators"}),
    "early stopping": (["epoch end:1:6"], {"callbacks": ("stopping",)}),
    "a limit of steps": (
        ["backward:0:8", "epoch end:1:15"],
        {"trainer": {"max_steps": 15, "max_epochs": -1}},
    ),
    "loaders made again": (
        ["backward:0:8"],
        {"trainer": {"reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 0}},
    ),
    "one rank": (["backward:0:14"], {"ranks": 1}),
    "pytorch_lightning": (["backward:1:8"], {"package": "pytorch_lightning"}),
    "fabric": (["backward:1:2", "backward:0:9", "epoch end:1:12"], {"model": "fabric"}),
    "fabric on one rank": (
        ["backward:0:8", "epoch end:0:12", "backward:0:15"],
        {"model": "fabric", "ranks": 1, "data": "numbered"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_resumes_exactly(
    name: str, make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    kills, scenario = CASES[name]
    if "ema" in scenario.get("callbacks", ()) and version("lightning") < "2.6":
        pytest.skip("this Lightning has no averaging of weights at every step")
    resumes_exactly(make_job(**scenario), kills, undisturbed(**scenario), start="start")


@pytest.mark.parametrize("model", ["plain", "fabric"])
def test_other_data_after_a_restart_are_refused(model: str, make_job: MakeJob) -> None:
    why = "on ranks 0, 1 of 2: its data after the restore"
    refuses_other_data(make_job(model=model), "backward:1:8", "numbered", why)


def test_a_fork_by_the_environment_continues_exactly(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    source = make_job({"local_every_steps": 1, "when_busy": "wait"})
    a_fork_continues_exactly(source, make_job(), ("backward:1:8", "backward:0:8"), undisturbed())


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


def test_a_finished_job_started_again_trains_no_step_and_has_its_final_weights(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    job = make_job(callbacks=("swa",), model="averaged")
    first, again = job.start(), job.start()
    assert first.ended(), first.output()
    assert [x["kind"] for x in again.lines()] == ["done"], again.output()
    assert again.lines()[-1] == first.lines()[-1]


def test_a_signal_ends_the_job_at_the_boundary_and_the_next_run_resumes_exactly(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    ends_by_a_signal_and_resumes(make_job(), "backward:1:8", (9, 12), undisturbed())


def test_after_an_exception_of_the_script_the_next_run_resumes_exactly(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    resumes_after_an_error(make_job(), "backward:1:8", undisturbed())


@pytest.mark.parametrize(
    ("ranks", "others", "accumulation", "at"),
    [
        (2, 1, 1, "batch end:0:8"),
        (1, 2, 1, "epoch end:0:12"),
        (2, 4, 1, "batch end:0:8"),
        (2, 1, 2, "epoch end:0:12"),
    ],
)
def test_another_number_of_ranks_continues_with_the_same_samples_a_step(
    ranks: int, others: int, accumulation: int, at: str, make_job: MakeJob
) -> None:
    """Batches of 4 samples for 2 ranks, of 8 for 1 and of 2 for 4."""
    steps = 6 // accumulation
    at = at.replace("12", str(2 * steps))
    trainer = {"accumulate_grad_batches": accumulation}
    scenario = {"data": "numbered", "ranks": ranks, "trainer": trainer}
    plain, job = make_job(**scenario), make_job(**scenario)
    whole = plain.start()
    assert whole.ended(), whole.output()
    killed = job.start(at)
    other = job.start(ranks=others)
    assert other.ended(), other.output()
    resumes_with_the_same_samples(killed, other, whole, steps)
    assert "the epoch continues with its next samples" in other.output()
    assert other.of_kind("trained") == whole.of_kind("trained")


def test_another_number_of_ranks_without_the_same_samples_a_step_is_refused(
    make_job: MakeJob,
) -> None:
    job = make_job()
    job.start("backward:1:8")
    alone = job.start(ranks=1, trainer={"accumulate_grad_batches": 3})
    assert "8 samples a step (2 ranks, batch_size=4" in alone.error(), alone.output()
    alone = job.start(ranks=1, trainer={"accumulate_grad_batches": 2})
    assert "no DistributedSampler" in alone.error(), alone.output()
    assert not alone.of_kind("batch")


def test_another_batch_size_within_an_epoch_is_refused(make_job: MakeJob) -> None:
    job = make_job(ranks=1)
    job.start("backward:0:8")
    other = job.start(data="larger batches")
    assert "Set batch_size=4" in other.error(), other.output()
    assert not other.of_kind("batch")


def test_the_jobs_own_version_goes_before_a_file_of_lightnings(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    scenario = {"callbacks": ("model checkpoint",), "fit": {"ckpt_path": "last"}}
    plain, job = undisturbed(**scenario), make_job(**scenario)
    job.start("backward:1:14")
    again = job.start()
    assert again.ended(), again.output()
    assert again.place_in(plain) > 0
    assert "last.ckpt' is not loaded: the job continues from its own v" in again.output()


def test_persistent_workers_are_warned_of(make_job: MakeJob) -> None:
    run = make_job(data="persistent", workers=1, trainer={"max_epochs": 1}).start()
    assert "set persistent_workers=False" in run.output()


def test_a_training_step_that_fetches_its_batches_is_refused(make_job: MakeJob) -> None:
    run = make_job(ranks=1, model="fetching").start()
    assert "training_step has an argument dataloader_iter" in run.error(), run.output()
