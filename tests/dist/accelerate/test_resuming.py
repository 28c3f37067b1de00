"""A killed job that uses Accelerate continues with exactly the steps of an undisturbed one:
batches, gradients, weights, learning rates, and random states."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.frameworks.fixtures import MakeJob, Undisturbed, fixtures_of
from tests.support.frameworks.killed_job import (
    OTHER_DATA,
    Case,
    is_refused,
    resumes_exactly,
    resumes_under_a_launcher,
    trains_on_the_samples,
)
from tests.support.frameworks.scenario import OfAccelerate
from tests.support.warm_python.servers import PYTHON
from tierckpt._version import version_numbers
from tierckpt.testing import free_ports

forks, undisturbed, make_job = fixtures_of("accelerate", OfAccelerate)

# 7 batches an epoch, 13 on one rank. A case has features that fail in different lines of the
# records: data in `batch`, the others in `gradients` or `step`.
CASES = {
    "every phase": Case(
        {},
        ("backward:1:2", "backward:0:7", "epoch end:1:14"),
        restarts={"seed": 8},  # another seed of the script does not matter to a resumed run
        finished=("epoch end", "done"),
    ),
    # 4 steps an epoch: the last batch of an epoch makes one. The signal comes between two passes.
    "accumulation, two models": Case(
        {"accumulation": 2, "optimizers": 2, "sets_epoch": True, "saves": True},
        ("backward:1:3", "epoch end:0:4", "SIGTERM at backward:1:5"),
    ),
    "a weighted sampler, workers, bf16": Case(
        {"data": "weighted", "workers": 2, "accelerator": {"mixed_precision": "bf16"}},
        ("backward:1:10",),
    ),
    "own generators, LoRA, a scaler": Case(
        {"data": "own generators", "lora": True, "half": True}, ("backward:1:3", "backward:1:10")
    ),
    "two loaders, an optimizer that accumulates by hand": Case(
        {"data": "two", "optimizers": 3}, ("backward:1:4", "backward:1:10")
    ),
    "split batches, without a seedable sampler": Case(
        {"seedable": False, "loading": {"split_batches": True}}, ("backward:1:4", "backward:1:11")
    ),
    "dispatched and split, last batches dropped": Case(
        {"data": "drop last", "loading": {"dispatch_batches": True, "split_batches": True}},
        ("epoch end:0:6", "backward:0:10"),
    ),
    # Also after the first two batches of an epoch: torchdata's iterator of the first pass of a
    # process is made by `prepare`, those of the others draw a seed.
    "stateful loader": Case(
        {"loading": {"use_stateful_dataloader": True}},
        ("backward:1:3", "backward:0:8", "backward:1:9"),
    ),
    "iterable data set": Case({"data": "stream"}, ("backward:1:10",)),
    "iterable data set, not dispatched": Case(
        {"data": "stream", "loading": {"dispatch_batches": False}}, ("backward:1:10",)
    ),
    "one rank, epochs that are cut": Case(
        {"ranks": 1, "batches": 5}, ("backward:0:6", "epoch end:0:10")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_resumes_exactly(
    name: str, make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    scenario = CASES[name].scenario
    resumes_exactly(make_job(**scenario), CASES[name], undisturbed(**scenario))


def test_a_stateful_loader_with_workers_resumes_exactly_and_refuses_another_seed(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    """In the first pass, whose workers `prepare` has started."""
    if version_numbers(version("accelerate")) < (1, 13):
        pytest.skip("this Accelerate fails with such loaders, also without Tierckpt")
    scenario = {"workers": 1, "loading": {"use_stateful_dataloader": True}}
    job = make_job(**scenario)
    job.start("backward:1:3")
    is_refused(job, "Call accelerate.utils.set_seed() with the same number", seed=8)
    later = Case(scenario, ("backward:1:10",), from_the_start=0)
    resumes_exactly(job, later, undisturbed(**scenario))


def test_a_rollback_by_the_environment_is_made_once(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    """The next start, in the same environment, continues from where the second run was."""
    plain = undisturbed()
    job = make_job({"local_every_steps": 1, "local_keep": 99, "when_busy": "wait"})
    assert not job.start("backward:1:11").ended()
    environment = {"TIERCKPT_ROLLBACK_TO": "3"}
    back = job.start("backward:0:8", environment)
    assert job.fired("backward:0:8"), back.output()
    again = job.start("", environment)
    assert again.ended(), again.output()
    first = [run.of_kind("step")[0]["number"] for run in (back, again)]
    last = back.of_kind("step")[-1]["number"]
    assert first[0] == 4, back.output()
    assert 4 < first[1] <= last + 1, again.output()
    for rank in range(2):
        assert 0 < back.place_in(plain, rank) < again.place_in(plain, rank)


def test_another_number_of_ranks_continues_with_the_same_samples_a_step_and_no_other_job_does(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    whole, job = undisturbed(data="numbered"), make_job(data="numbered")
    last = trains_on_the_samples(job.start("batch end:0:4"), whole, 7)
    is_refused(job, "RestoreError: ", OTHER_DATA, data="plain", before="step")
    way_out = "Set gradient_accumulation_steps=2, or start 2 ranks"
    is_refused(job, "8 samples a step (2 ranks, batch_size=4", way_out, ranks=1)
    run = job.start("batch end:0:9", ranks=1, batch_size=8)
    last = trains_on_the_samples(run, whole, 7, last)
    run = job.start("batch end:0:12", ranks=1, batch_size=4, accumulation=2)
    last = trains_on_the_samples(run, whole, 7, last)
    run = job.start()
    assert run.ended(), run.output()
    trains_on_the_samples(run, whole, 7, last)


@pytest.mark.parametrize("program", [[], ["--module", "tierckpt.run"]], ids=["script", "shim"])
def test_ranks_restarted_by_accelerate_launch_resume_exactly(
    program: list[str], make_job: MakeJob, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    command = [PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_ports(1)[0])]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    if not program:
        command += ["--max_restarts", "1", "--monitor_interval", "0.1", "--rdzv_backend", "c10d"]
    script = Path(__file__).resolve().parents[2] / "support" / "accelerate" / "job.py"
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command += [*program, str(script)]
    resumes_under_a_launcher(command, make_job(), "backward:1:10", undisturbed(), home)
