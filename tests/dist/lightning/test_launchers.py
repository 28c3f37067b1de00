"""Lightning jobs under real launchers: torchrun, `tierckpt run`, Lightning's own."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.crash.launcher import quiet_environment
from tests.support.frameworks.fixtures import MakeJob, Undisturbed
from tests.support.frameworks.jobs import Run
from tests.support.frameworks.killed_job import resumes_under_a_launcher
from tests.support.frameworks.scenario import VARIABLE, Scenario
from tests.support.warm_python.servers import LIGHTNING, PYTHON, THROUGHOUT
from tierckpt.testing import free_ports

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "support" / "lightning" / "job.py"
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_python: None) -> None:
    """Started before the first test, as it starts processes that last."""


def launch(
    command: list[str], scenario: Scenario, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={
            **quiet_environment(),
            **THROUGHOUT,
            **LIGHTNING,
            VARIABLE: scenario.to_json(),
            **(environment or {}),
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("shim", [[], ["-m", "tierckpt.run"]], ids=["torchrun", "tierckpt run"])
def test_ranks_restarted_by_the_launcher_resume_exactly(
    shim: list[str], make_job: MakeJob, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    restarts = [] if shim else ["--max-restarts", "1", "--monitor-interval", "0.1"]
    command = [*TORCHRUN, *restarts, *shim, str(SCRIPT)]
    environment = {**LIGHTNING, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    resumes_under_a_launcher(command, make_job(), "backward:1:8", undisturbed(), environment)


def test_under_lightnings_launcher_the_script_resumes_exactly_when_it_is_started_again(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    """It starts rank 1 as a child of rank 0, and ends it when rank 0 fails."""
    plain, job = undisturbed(), make_job()
    scenario = replace(job.scenario, kill="backward:1:8")
    port = {"MASTER_PORT": str(free_ports(1)[0])}
    failed = launch([PYTHON, str(SCRIPT)], scenario, port)
    assert failed.returncode != 0
    assert job.fired("backward:1:8")
    port = {"MASTER_PORT": str(free_ports(1)[0])}
    again = replace(scenario, run=1)
    done = launch([PYTHON, str(SCRIPT)], again, port)
    assert done.returncode == 0, done.stderr
    run = Run(again)
    assert run.ended()
    assert all(run.place_in(plain, rank) > 0 for rank in range(2))


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which Lightning finds the entry points of setup.cfg."""
    options = (ROOT / "setup.cfg").read_text()
    groups = re.findall(r"^(\S+\.callbacks_factory) =\n    (\S+ = \S+)", options, re.MULTILINE)
    assert [group for group, _ in groups] == [
        "lightning.pytorch.callbacks_factory",
        "pytorch_lightning.callbacks_factory",
    ]
    info = tmp_path / "site" / "entry_points_of_tierckpt-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: entry_points_of_tierckpt\nVersion: 0\n")
    text = "\n".join(f"[{group}]\n{line}" for group, line in groups)
    (info / "entry_points.txt").write_text(text)
    paths = [str(info.parent), os.environ["PYTHONPATH"]]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_with_the_variable_set_an_unchanged_script_has_checkpoints(
    package: str, make_job: MakeJob, installed: dict[str, str], tmp_path: Path
) -> None:
    scenario = replace(make_job(ranks=1, package=package).scenario, settings=None)
    variables = {**installed, "TIERCKPT_PATH": str(tmp_path / "own")}
    variables["TIERCKPT_HALT_EXIT_STATUS"] = "75"
    variables["WARM_PYTHON_FRAMEWORK"] = package
    scenario = replace(scenario, signal="backward:0:8")
    assert launch([PYTHON, str(SCRIPT)], scenario, variables).returncode == 75
    assert Run(scenario).lines()[-1]["kind"] == "trained"  # the Trainer's end, not the script's
    again = replace(scenario, run=1)
    done = launch([PYTHON, str(SCRIPT)], again, variables)
    assert done.returncode == 0, done.stderr
    assert (
        Run(again).of_kind("step")[0]["number"] == Run(scenario).of_kind("step")[-1]["number"] + 1
    )


def test_a_callback_of_the_script_goes_before_the_one_of_the_environment(
    make_job: MakeJob, installed: dict[str, str], tmp_path: Path
) -> None:
    scenario = make_job(ranks=1).scenario
    variables = {**installed, "TIERCKPT_PATH": str(tmp_path / "own")}
    done = launch([PYTHON, str(SCRIPT)], scenario, variables)
    assert done.returncode == 0, done.stderr
    assert Path(scenario.folder, "ckpts").exists()
    assert not (tmp_path / "own").exists()


def test_the_code_of_the_documentation_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    page = (ROOT / "docs" / "lightning.md").read_text()
    block, of_fabric, of_a_fork = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    compile(of_a_fork, "docs/lightning.md", "exec")
    before = """
import torch, lightning.pytorch.demos.boring_classes as demos
model = demos.BoringModel()
loader = torch.utils.data.DataLoader(demos.RandomDataset(32, 64), batch_size=8)
"""
    after = """
print('steps', trainer.global_step, int(trainer.callbacks[0].checkpointer.restored))
model = torch.nn.Linear(32, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
    end = "\nprint('of fabric', data.epoch, int(ckpt.restored))"
    for start in (0, 24):
        done = subprocess.run(
            [PYTHON, "-c", before + block + after + of_fabric + end],
            cwd=tmp_path,
            env={**os.environ, **LIGHTNING},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert f"steps 24 {start}" in done.stdout
        assert f"of fabric 2 {start}" in done.stdout
