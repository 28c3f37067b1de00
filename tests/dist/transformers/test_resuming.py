"""A killed job of Hugging Face's Trainer continues with exactly the steps of an undisturbed one:
batches, gradients, weights, learning rates, random states, and everything logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks.fixtures import MakeJob, Undisturbed, fixtures_of
from tests.support.frameworks.jobs import Run
from tests.support.frameworks.killed_job import (
    OTHER_DATA,
    Case,
    a_fork_continues_exactly,
    is_refused,
    resumes_exactly,
    resumes_under_a_launcher,
    trains_on_the_samples,
)
from tests.support.frameworks.scenario import OfTransformers
from tests.support.warm_python.servers import PYTHON, TRANSFORMERS

forks, undisturbed, make_job = fixtures_of("transformers", OfTransformers, TRANSFORMERS)

BEST = {
    "save_strategy": "steps",
    "save_steps": 4,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}
# 7 batches an epoch, 13 on one rank. A case has features that fail in different lines of the
# records: data in `batch`, the others in `gradients`, `step` or `logged`.
CASES = {
    "every phase": Case(
        {"arguments": BEST},
        ("begin:0:0", "evaluation:0:4", "save:0:8", "error at backward:1:9"),
        from_the_start=2,
    ),
    "workers": Case({"workers": 2, "arguments": BEST}, ("SIGTERM at backward:1:9",)),
    # 3 steps an epoch, of 3, 3 and 1 batches.
    "accumulation, clipping, a limit of steps": Case(
        {
            "arguments": {
                "gradient_accumulation_steps": 3,
                "max_grad_norm": 0.1,
                "max_steps": 8,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 3,
            }
        },
        ("backward:0:2", "epoch end:1:3", "epoch end:0:8"),
    ),
    "all work at the end of epochs, a plateau scheduler": Case(
        {
            "arguments": {
                **BEST,
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
                "logging_strategy": "epoch",
                "eval_on_start": True,
                "lr_scheduler_type": "reduce_lr_on_plateau",
            }
        },
        ("evaluation:0:7", "evaluation:1:21"),
    ),
    # The job's own version goes before the checkpoints of the Trainer's.
    "early stopping, LoRA": Case(
        {"arguments": {**BEST, "save_strategy": "best"}, "patience": 2, "lora": True},
        ("evaluation:0:8",),
        restarts={"train": {"resume_from_checkpoint": True}},
        says="resume_from_checkpoint is not used: the job continues from its own v",
        finished=("logged", "trained", "done"),  # with the best weights
    ),
    "own generators, seq2seq, a sampler without seeds": Case(
        {
            "data": "own generators",
            "kind": "seq2seq",
            "arguments": {"accelerator_config": {"use_seedable_sampler": False}},
        },
        ("backward:1:3", "backward:0:10"),
    ),
    "compiled on one rank": Case(
        {
            "ranks": 1,
            "arguments": {
                "torch_compile": True,
                "torch_compile_backend": "eager",
                "max_steps": 7,
                "eval_strategy": "no",
            },
        },
        ("backward:0:4",),
    ),
    "tokens counted, own sampler, bf16": Case(
        {
            "arguments": {
                "include_num_input_tokens_seen": "all",
                "train_sampling_strategy": "group_by_length",
                "ignore_data_skip": True,
                "bf16": True,
            }
        },
        ("backward:1:9",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_resumes_exactly(
    name: str, make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    scenario = CASES[name].scenario
    resumes_exactly(make_job(**scenario), CASES[name], undisturbed(**scenario))


def test_a_fork_by_the_environment_continues_exactly(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    source = make_job({"local_every_steps": 1, "when_busy": "wait"})
    a_fork_continues_exactly(source, make_job(), ("backward:1:9", "backward:0:9"), undisturbed())


def test_after_a_signal_the_job_ends_with_the_status_of_the_setting(make_job: MakeJob) -> None:
    run = make_job({"requeue_exit_status": 75}, ranks=1).start(signal="backward:0:4")
    assert run.of_kind("exited") == [{"kind": "exited", "status": 75}], run.output()
    assert run.lines()[-2] == {"kind": "trained"}  # the Trainer's end, not the script's


def test_another_number_of_ranks_continues_with_the_same_samples_a_step_and_no_other_job_does(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    """52 samples; the last step of an epoch is filled up with some of its first ones."""
    scenario = {"data": "numbered", "dropout": 0.0}
    whole, job = undisturbed(**scenario), make_job(**scenario)
    last = trains_on_the_samples(job.start("step end:1:4"), whole, 7)
    is_refused(job, "RestoreError: ", OTHER_DATA, data="plain", before="step")
    way_out = "Set gradient_accumulation_steps=2, or start 2 ranks"
    is_refused(job, "8 samples a step (2 ranks, per_device_train_batch_size=4", way_out, ranks=1)
    more = {"gradient_accumulation_steps": 2}
    way_out = "Set gradient_accumulation_steps=1"
    is_refused(job, "this job has 16", way_out, arguments=more)
    run = job.start("step end:0:9", ranks=1, arguments=more)
    last = trains_on_the_samples(run, whole, 7, last)
    larger = {"per_device_train_batch_size": 8}
    last = trains_on_the_samples(
        job.start("step end:0:12", ranks=1, arguments=larger), whole, 7, last
    )
    run = job.start()
    assert run.ended(), run.output()
    trains_on_the_samples(run, whole, 7, last)
    assert loss_of(run) == pytest.approx(loss_of(whole), rel=0.01)


def loss_of(run: Run) -> float:
    """The newest loss in an evaluation."""
    return float([x["eval_loss"] for x in run.of_kind("logged") if "eval_loss" in x][-1])


def test_ranks_restarted_by_torchrun_resume_exactly(
    make_job: MakeJob, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1"]
    command += [str(Path(__file__).resolve().parents[2] / "support" / "transformers" / "job.py")]
    environment = {**TRANSFORMERS, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    resumes_under_a_launcher(command, make_job(), "backward:1:8", undisturbed(), environment)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ({"data": "stream", "arguments": {"max_steps": 4}}, "Use a data set with indices"),
        ({"arguments": {"auto_find_batch_size": True}}, "auto_find_batch_size=False"),
        ({"arguments": {"enable_jit_checkpoint": True}}, "Set enable_jit_checkpoint=False"),
        (
            {"ranks": 2, "arguments": {"fsdp": "full_shard"}},
            "FSDP: Tierckpt stores states that are the same",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_way_out(
    scenario: dict[str, Any], words: str, make_job: MakeJob
) -> None:
    run = make_job(**{"ranks": 1, **scenario}).start()
    assert words in (run.error(0) or run.error(1)), run.output()


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
