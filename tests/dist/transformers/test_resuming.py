"""A killed job of Hugging Face's Trainer continues with exactly the steps of an undisturbed one:
batches, gradients, weights, learning rates, random states, and everything logged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.frameworks.fixtures import MakeJob, Undisturbed
from tests.support.frameworks.jobs import Run
from tests.support.frameworks.killed_job import (
    a_fork_continues_exactly,
    ends_by_a_signal_and_resumes,
    goes_back_once,
    refuses_other_data,
    resumes_after_an_error,
    resumes_exactly,
    resumes_with_the_same_samples,
)

BEST = {
    "save_strategy": "steps",
    "save_steps": 4,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    # Kills of one job, one after the other; the scenario. 7 batches an epoch.
    "every phase": (
        [
            *("begin:0:0", "backward:1:2", "evaluation:0:4", "epoch end:1:7"),
            *("save:0:8", "step end:1:12", "backward:0:15", "epoch end:0:21"),
        ],
        {"arguments": BEST},
    ),
    "workers, bf16": (
        ["backward:1:9", "step end:0:18"],
        {"workers": 2, "arguments": {"bf16": True, "eval_strategy": "no"}},
    ),
    "accumulation": (
        # 3 steps an epoch, of 3, 3 and 1 batches
        ["backward:0:2", "epoch end:1:3", "evaluation:0:4", "backward:1:7"],
        {"arguments": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1}},
    ),
    "all work at the end of epochs": (
        ["epoch end:1:7", "evaluation:0:7", "save:0:14", "backward:1:16", "evaluation:1:21"],
        {
            "arguments": {
                **BEST,
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
                "logging_strategy": "epoch",
                "eval_on_start": True,
            }
        },
    ),
    "own generators": (["backward:1:3", "backward:0:10"], {"data": "own generators"}),
    "early stopping": (
        ["evaluation:0:8", "epoch end:1:12"],
        {"arguments": {**BEST, "save_strategy": "best"}, "patience": 2},
    ),
    "a limit of steps": (
        ["step end:1:4", "epoch end:0:11"],
        {"arguments": {"max_steps": 11, "lr_scheduler_type": "cosine", "warmup_steps": 3}},
    ),
    "a plateau scheduler": (
        ["backward:0:9", "evaluation:1:12"],
        {"arguments": {**BEST, "lr_scheduler_type": "reduce_lr_on_plateau"}},
    ),
    "seq2seq": (["backward:1:9"], {"kind": "seq2seq"}),
    "LoRA": (["backward:1:9", "evaluation:0:16"], {"lora": True, "arguments": BEST}),
    "a sampler without seeds": (
        ["backward:1:9", "step end:0:14"],
        {"arguments": {"accelerator_config": {"use_seedable_sampler": False}}},
    ),
    "one rank": (["backward:0:9", "step end:0:20"], {"ranks": 1}),
    "compiled": (
        ["backward:0:4"],
        {
            "ranks": 1,
            "arguments": {
                "torch_compile": True,
                "torch_compile_backend": "eager",
                "max_steps": 7,
                "eval_strategy": "no",
            },
        },
    ),
    "tokens counted, own sampler": (
        ["backward:1:9"],
        {
            "arguments": {
                "include_num_input_tokens_seen": "all",
                "train_sampling_strategy": "group_by_length",
                "ignore_data_skip": True,
            }
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_resumes_exactly(
    name: str, make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    kills, scenario = CASES[name]
    resumes_exactly(make_job(**scenario), kills, undisturbed(**scenario), start="begin")


def test_other_data_after_a_restart_are_refused(make_job: MakeJob) -> None:
    why = "on ranks 0, 1 of 2: its data after the restore"
    refuses_other_data(make_job(), "backward:1:8", "numbered", why)


def test_a_fork_by_the_environment_continues_exactly(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    source = make_job({"local_every_steps": 1, "when_busy": "wait"})
    a_fork_continues_exactly(source, make_job(), ("backward:1:9", "backward:0:9"), undisturbed())


def test_a_rollback_by_the_environment_is_made_once(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    job = make_job({"local_every_steps": 1, "local_keep_last": 99, "when_busy": "wait"})
    goes_back_once(job, ("backward:1:11", "backward:0:8"), 3, undisturbed())


def test_checkpoints_leave_the_training_unchanged(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    run = make_job(arguments=BEST).start()
    assert run.ended(), run.output()
    assert run.lines(0) == undisturbed(arguments=BEST).lines(0)
    assert run.lines(1) == undisturbed(arguments=BEST).lines(1)


def test_a_finished_job_started_again_trains_no_step_and_has_its_best_weights(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    job = make_job(arguments=BEST, patience=2)
    first, again = job.start(), job.start()
    assert first.ended(), first.output()
    assert again.ended(), again.output()
    assert not [x for x in again.lines() if x["kind"] in ("batch", "epoch end")], again.output()
    assert again.lines()[-1] == first.lines()[-1]


def test_a_signal_ends_the_job_at_the_boundary_and_the_next_run_resumes_exactly(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    ends_by_a_signal_and_resumes(
        make_job(arguments=BEST), "backward:1:9", (10, 13), undisturbed(arguments=BEST)
    )


def test_after_a_signal_the_job_ends_with_the_status_of_the_setting(make_job: MakeJob) -> None:
    job = make_job({"halt_exit_status": 75}, ranks=1)
    first, again = job.start(signal="backward:0:4"), job.start()
    assert first.of_kind("exited") == [{"kind": "exited", "status": 75}], first.output()
    assert first.lines()[-2] == {"kind": "trained"}  # the Trainer's end, not the script's
    assert again.ended(), again.output()


def test_after_an_exception_of_the_script_the_next_run_resumes_exactly(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    resumes_after_an_error(make_job(arguments=BEST), "backward:1:9", undisturbed(arguments=BEST))


def test_the_jobs_own_version_goes_before_a_checkpoint_of_the_trainers(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    plain, job = undisturbed(arguments=BEST), make_job(arguments=BEST)
    job.start("backward:1:10")
    again = job.start(train={"resume_from_checkpoint": True})
    assert again.ended(), again.output()
    assert again.place_in(plain) > 0
    assert "resume_from_checkpoint is not used: the job continues from its own v" in again.output()


@pytest.mark.parametrize(
    ("ranks", "others", "batch", "accumulation"),
    [(2, 1, 4, 2), (2, 1, 8, 1), (1, 2, 2, 1)],
)
def test_another_number_of_ranks_continues_with_the_same_samples_a_step(
    ranks: int, others: int, batch: int, accumulation: int, make_job: MakeJob
) -> None:
    """52 samples; the last step of an epoch is filled up with some of its first ones."""
    scenario = {"data": "numbered", "dropout": 0.0, "ranks": ranks}
    changed = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    plain, job = make_job(**scenario), make_job(**scenario)
    whole = plain.start()
    assert whole.ended(), whole.output()
    killed = job.start(f"step end:{ranks - 1}:9")
    other = job.start(ranks=others, arguments=changed)
    assert other.ended(), other.output()
    resumes_with_the_same_samples(killed, other, whole, 7 if ranks == 2 else 13)
    assert loss_of(other) == pytest.approx(loss_of(whole), rel=0.01)


def loss_of(run: Run) -> float:
    """The newest loss in an evaluation."""
    return float([x["eval_loss"] for x in run.of_kind("logged") if "eval_loss" in x][-1])


def test_another_number_of_samples_a_step_is_refused_before_the_first_one(
    make_job: MakeJob,
) -> None:
    job = make_job()
    job.start("backward:1:9")
    alone = job.start(ranks=1)
    assert "8 samples a step (2 ranks, per_device_train_batch_size=4" in alone.error()
    assert "Set gradient_accumulation_steps=2, or start 2 ranks" in alone.error()
    more = job.start(arguments={"gradient_accumulation_steps": 2})
    error = more.error(0) or more.error(1)
    assert "this job has 16" in error, more.output()
    assert "Set gradient_accumulation_steps=1" in error
    assert not alone.of_kind("batch") + more.of_kind("batch")


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ({"data": "stream", "arguments": {"max_steps": 4}}, "Use a data set with indices"),
        ({"arguments": {"auto_find_batch_size": True}}, "auto_find_batch_size=False"),
        ({"arguments": {"enable_jit_checkpoint": True}}, "Set enable_jit_checkpoint=False"),
        ({"arguments": {"fsdp": "full_shard"}}, "FSDP: Tierckpt stores states that are the same"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_way_out(
    scenario: dict[str, Any], words: str, make_job: MakeJob
) -> None:
    run = make_job(**scenario).start()
    assert words in (run.error(0) or run.error(1)), run.output()


def test_persistent_workers_are_warned_of(make_job: MakeJob) -> None:
    persistent = {"dataloader_persistent_workers": True, "max_steps": 2}
    run = make_job(workers=1, arguments=persistent).start()
    assert run.ended(), run.output()
    assert "set persistent_workers=False" in run.output()


def test_a_job_may_start_from_a_checkpoint_of_the_trainers(make_job: MakeJob) -> None:
    before = make_job(arguments={**BEST, "max_steps": 10, "load_best_model_at_end": False})
    assert before.start().ended()
    path = f"{before.scenario.folder}/out/checkpoint-8"
    started = {"train": {"resume_from_checkpoint": path}}
    plain, job = make_job(**started), make_job(**started)
    whole = plain.start()
    assert whole.ended(), whole.output()
    assert whole.of_kind("step")[0]["number"] == 9
    job.start("backward:1:12")
    again = job.start()
    assert again.ended(), again.output()
    assert all(again.place_in(whole, rank) > 0 for rank in range(2))
