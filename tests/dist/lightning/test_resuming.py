"""A killed Lightning job continues with exactly the steps of an undisturbed one: batches,
gradients, weights, learning rates, random states, and everything logged."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.crash.launcher import quiet_environment
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
from tests.support.frameworks.scenario import VARIABLE, OfLightning
from tests.support.warm_python.servers import LIGHTNING, PYTHON, THROUGHOUT
from tierckpt.testing import free_ports

forks, undisturbed, make_job = fixtures_of("lightning", OfLightning, LIGHTNING)

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "lightning" / "job.py"
# 6 batches an epoch, 12 on one rank. A case has features that fail in different lines of the
# records: data in `batch`, the others in `gradients`, `step` or `logged`.
CASES = {
    # The job's own version goes before the file of Lightning's that the script names.
    "every phase": Case(
        {"callbacks": ("model checkpoint",), "fit": {"ckpt_path": "last"}},
        (
            *("fit start:0:0", "validation:0:4", "epoch end:1:6"),
            *("model checkpoint:0:10", "epoch end:0:18"),
        ),
        from_the_start=2,
        says="last.ckpt' is not loaded: the job continues from its own v",
    ),
    "a combined loader of the script's, LoRA, fp16": Case(
        {"data": "combined", "model": "LoRA", "half": True}, ("backward:1:9",)
    ),
    "two loaders, accumulation, clipping, averaged weights": Case(
        {
            "data": "two",
            "model": "cycle",
            "callbacks": ("ema",),
            "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        },
        ("backward:1:4", "epoch end:0:6"),
    ),
    "own generators, manual optimization": Case(
        {
            "data": "own generators",
            "model": "manual",
            "trainer": {"strategy": "ddp_find_unused_parameters_true"},
        },
        ("backward:1:7", "backward:0:16"),
    ),
    "stochastic weight averaging": Case(
        {"callbacks": ("swa",), "model": "averaged"},
        ("backward:1:8", "epoch end:1:12"),
        finished=("done",),  # with the averaged weights
    ),
    "weight averaging with a scheduler": Case({"callbacks": ("swa",)}, ("backward:1:10",)),
    "workers, bf16": Case(
        {"workers": 2, "trainer": {"precision": "bf16-mixed"}}, ("backward:1:8",)
    ),
    "stateful loader, early stopping": Case(
        {"data": "stateful", "callbacks": ("stopping",)}, ("error at backward:1:3", "epoch end:1:6")
    ),
    "shuffled stateful loader, a limit of steps": Case(
        {
            "data": "shuffled stateful",
            "workers": 1,
            "trainer": {"max_steps": 15, "max_epochs": -1},
        },
        ("SIGTERM at backward:1:8", "epoch end:1:15"),
    ),
    "iterable data set": Case({"data": "stream"}, ("backward:1:8", "epoch end:1:12")),
    "compiled, loaders made again": Case(
        {
            "model": "compiled",
            "trainer": {
                "max_epochs": 2,
                "num_sanity_val_steps": 0,
                "reload_dataloaders_every_n_epochs": 1,
            },
        },
        ("backward:0:8",),
    ),
    "pytorch_lightning on one rank": Case(
        {"package": "pytorch_lightning", "ranks": 1}, ("backward:0:14",)
    ),
    "fabric": Case({"model": "fabric"}, ("backward:1:2", "epoch end:1:12")),
    "fabric on one rank": Case(
        {"model": "fabric", "ranks": 1, "data": "numbered"}, ("backward:0:8", "epoch end:0:12")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_resumes_exactly(
    name: str, make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    scenario = CASES[name].scenario
    if "ema" in scenario.get("callbacks", ()) and version("lightning") < "2.6":
        pytest.skip("this Lightning has no averaging of weights at every step")
    resumes_exactly(make_job(**scenario), CASES[name], undisturbed(**scenario))


def test_a_fork_by_the_environment_continues_exactly(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    source = make_job({"local_every_steps": 1, "when_busy": "wait"})
    a_fork_continues_exactly(source, make_job(), ("backward:1:8", "backward:0:8"), undisturbed())


def test_another_number_of_ranks_continues_with_the_same_samples_a_step_and_no_other_job_does(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    """Batches of 4 samples for 2 ranks, of 8 for 1 and of 2 for 4."""
    whole, job = undisturbed(data="numbered"), make_job(data="numbered")
    last = trains_on_the_samples(job.start("batch end:0:8"), whole, 6)
    is_refused(job, "RestoreError: ", OTHER_DATA, data="plain", before="step")
    other = {"ranks": 1, "trainer": {"accumulate_grad_batches": 3}}
    is_refused(job, "8 samples a step (2 ranks, batch_size=4", **other)
    other = {"ranks": 1, "data": "plain", "trainer": {"accumulate_grad_batches": 2}}
    is_refused(job, "no DistributedSampler", **other)
    for ranks, kill in ((1, "epoch end:0:12"), (4, "")):
        run = job.start(kill, ranks=ranks)
        assert run.ended() is not bool(kill), run.output()
        assert "the epoch continues with its next samples" in run.output()
        last = trains_on_the_samples(run, whole, 6, last)
    assert run.of_kind("trained") == whole.of_kind("trained")


def test_ranks_restarted_by_the_shim_resume_exactly(
    make_job: MakeJob, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tierckpt.run", str(SCRIPT)]
    environment = {**LIGHTNING, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    resumes_under_a_launcher(command, make_job(), "backward:1:8", undisturbed(), environment)


def test_under_lightnings_launcher_the_script_resumes_exactly_when_it_is_started_again(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    """It starts rank 1 as a child of rank 0, and ends it when rank 0 fails."""
    plain, job = undisturbed(), make_job()
    for number, kill in enumerate(("backward:1:8", "")):
        scenario = replace(job.scenario, run=number, kill=kill)
        environment = {**quiet_environment(), **THROUGHOUT, **LIGHTNING}
        environment |= {VARIABLE: scenario.to_json(), "MASTER_PORT": str(free_ports(1)[0])}
        done = subprocess.run(
            [PYTHON, str(SCRIPT)], env=environment, capture_output=True, text=True
        )
        assert (done.returncode == 0) is not bool(kill), done.stderr
        assert job.fired("backward:1:8")
    run = Run(scenario)
    assert run.ended()
    assert all(run.place_in(plain, rank) > 0 for rank in range(2))
