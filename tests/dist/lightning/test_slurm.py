"""A Lightning job in an allocation of Slurm, with a stand-in for `scontrol`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.crash.launcher import quiet_environment
from tests.support.frameworks.fixtures import MakeJob
from tests.support.frameworks.jobs import Run
from tests.support.frameworks.scenario import VARIABLE, Scenario
from tests.support.warm_python.servers import PYTHON, THROUGHOUT

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "lightning" / "job.py"
ALLOCATION = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "127.0.0.1",
}
Launch = Callable[[Scenario], subprocess.CompletedProcess[str]]


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """A file with the arguments of `scontrol`, a line each call."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    program.chmod(0o755)
    return tmp_path / "calls"


@pytest.fixture
def launch(warm_python: None, calls: Path) -> Launch:
    def started(scenario: Scenario) -> subprocess.CompletedProcess[str]:
        environment = {**quiet_environment(), **THROUGHOUT, **ALLOCATION}
        environment[VARIABLE] = scenario.to_json()
        environment["PATH"] = f"{calls.parent / 'bin'}:{environment['PATH']}"
        command = [PYTHON, str(SCRIPT)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return started


def test_the_signal_before_the_end_of_the_allocation_requeues_the_job_as_lightning_does(
    make_job: MakeJob, launch: Launch, calls: Path
) -> None:
    job = make_job(ranks=1, sent="SIGUSR1", signal="backward:0:4").scenario
    first = launch(job)
    assert first.returncode == 0, first.stderr
    assert calls.read_text() == "requeue 4711\n"
    assert "job 4711 ends early, and Slurm has requeued it" in first.stderr
    again = replace(job, run=1)
    second = launch(again)
    assert second.returncode == 0, second.stderr
    last = Run(job).of_kind("step")[-1]["number"]
    assert Run(again).of_kind("step")[0]["number"] == last + 1
    assert calls.read_text() == "requeue 4711\n"


def test_a_cancelled_job_is_not_requeued(make_job: MakeJob, launch: Launch, calls: Path) -> None:
    job = make_job({"halt_exit_status": 75}, ranks=1, signal="backward:0:4").scenario
    assert launch(job).returncode == 75
    assert not calls.exists()
