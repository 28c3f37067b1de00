"""Lightning scripts of one process: that of the documentation, several fits, the callback of the
environment, and an allocation of Slurm, with a stand-in for `scontrol`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.crash.launcher import quiet_environment
from tests.support.frameworks.jobs import Run
from tests.support.frameworks.scenario import VARIABLE, OfLightning
from tests.support.warm_python.servers import LIGHTNING, PYTHON, THROUGHOUT

pytest.importorskip("lightning", exc_type=ImportError)
ROOT = Path(__file__).resolve().parents[3]


def started(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The end of Python with these arguments."""
    variables = {**quiet_environment(), **THROUGHOUT, **LIGHTNING, **environment}
    return subprocess.run(
        [PYTHON, *command], cwd=folder, env=variables, capture_output=True, text=True, timeout=240
    )


def test_the_code_of_the_documentation_trains_and_resumes(tmp_path: Path) -> None:
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
        done = started("-c", before + block + after + of_fabric + end, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"steps 24 {start}" in done.stdout
        assert f"of fabric 2 {start}" in done.stdout


FOLDS = """
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader

from tierckpt.errors import RestoreError
from tierckpt.lightning import TierCheckpoint

BATCHES = 4
data = DataLoader(torch.arange(float(BATCHES)).reshape(-1, 1), 1)
events = []


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.steps = torch.nn.Linear(1, 1), 0

    def training_step(self, batch, index):
        self.steps += 1
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(epochs=1, **settings):
    given = {"path": sys.argv[1], "shm_dir": sys.argv[2], "agent": "inline", **settings}
    quiet = dict.fromkeys(("progress_bar", "model_summary", "checkpointing"), False)
    made = TierCheckpoint(on_event=events.append, **given)
    return L.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, callbacks=[made],
        **{f"enable_{name}": off for name, off in quiet.items()},
    )


first, model = trainer(), Model()
first.fit(model, data)
for other in (Model(), model):  # a further fold, and fine-tuning
    try:
        trainer().fit(other, data)
    except RestoreError as error:
        assert "has the end of another training" in str(error), error
    else:
        raise AssertionError("it was not refused")
assert model.steps == BATCHES
first.fit_loop.max_epochs = 2
first.fit(model, data)
assert model.steps == 2 * BATCHES, "the same Trainer goes on"
asked = Model()
trainer(epochs=3, rollback_to=2 * BATCHES).fit(asked, data)
assert asked.steps == BATCHES

assert not [each for each in events if "nothing is left" in each.message]
again = Model()
trainer(epochs=3, rollback_to=3 * BATCHES).fit(again, data)
assert again.steps == 0
(text,) = [each.message for each in events if "nothing is left" in each.message]
assert f"started with v{3 * BATCHES}" in text, text
"""


def test_a_further_fold_is_refused_and_a_trainer_continues(tmp_path: Path, shm_dir: Path) -> None:
    """A fold never takes the end of another for its own."""
    ended = started("-c", FOLDS, str(tmp_path / "ckpts"), str(shm_dir), folder=tmp_path)
    assert ended.returncode == 0, ended.stderr


class Script:
    """The runs of a script on one rank."""

    def __init__(self, folder: Path, settings: dict[str, Any] | None, **scenario: Any) -> None:
        self.folder, self.runs = folder / "job", 0
        self.folder.mkdir()
        if settings is not None:
            settings = {"path": str(self.folder / "ckpts"), **settings}
        self._scenario = {"ranks": 1, "settings": settings, **scenario}

    def start(self, **environment: str) -> subprocess.CompletedProcess[str]:
        self.runs += 1
        scenario = OfLightning(str(self.folder), self.runs, **self._scenario)
        program = str(ROOT / "tests" / "support" / "lightning" / "job.py")
        self.run = Run(scenario)
        variables = {VARIABLE: scenario.to_json(), **environment}
        return started(program, folder=self.folder, **variables)


# --- the callback of the environment -------------------------------------------------------------


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
    paths = os.pathsep.join([str(info.parent), os.environ["PYTHONPATH"]])
    return {"PYTHONPATH": paths, "TIERCKPT_PATH": str(tmp_path / "own")}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_with_the_variable_set_an_unchanged_script_has_checkpoints(
    package: str, installed: dict[str, str], tmp_path: Path, shm_dir: Path
) -> None:
    variables = {
        **installed,
        "TIERCKPT_REQUEUE_EXIT_STATUS": "75",
        "WARM_PYTHON_FRAMEWORK": package,
    }
    variables["TIERCKPT_SHM_DIR"] = str(shm_dir)
    script = Script(tmp_path, None, package=package, signal="backward:0:8")
    assert script.start(**variables).returncode == 75
    first = script.run
    assert first.lines()[-1]["kind"] == "trained"  # the Trainer's end, not the script's
    done = script.start(**variables)
    assert done.returncode == 0, done.stderr
    last = first.of_kind("step")[-1]["number"]
    assert script.run.of_kind("step")[0]["number"] == last + 1


def test_a_callback_of_the_script_goes_before_the_one_of_the_environment(
    installed: dict[str, str], tmp_path: Path, shm_dir: Path
) -> None:
    script = Script(tmp_path, {"shm_dir": str(shm_dir)})
    done = script.start(**installed)
    assert done.returncode == 0, done.stderr
    assert (script.folder / "ckpts").exists()
    assert not (tmp_path / "own").exists()


# --- Slurm ---------------------------------------------------------------------------------------


@pytest.fixture
def allocation(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of Slurm's; `calls` gets the arguments of `scontrol`, a line each
    call."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    program.chmod(0o755)
    names = ("PROCID", "LOCALID", "NODEID")
    return {
        **{f"SLURM_{name}": "0" for name in names},
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "PATH": f"{program.parent}:{THROUGHOUT['PATH']}",
    }


def test_the_signal_before_the_end_of_the_allocation_requeues_the_job_as_lightning_does(
    allocation: dict[str, str], tmp_path: Path, shm_dir: Path
) -> None:
    settings = {"shm_dir": str(shm_dir)}
    script = Script(tmp_path, settings, sent="SIGUSR1", signal="backward:0:4")
    done = script.start(**allocation)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text() == "requeue 4711\n"
    assert "job 4711 ends early, and Slurm has requeued it" in done.stderr
    last = script.run.of_kind("step")[-1]["number"]
    done = script.start(**allocation)
    assert done.returncode == 0, done.stderr
    assert script.run.of_kind("step")[0]["number"] == last + 1
    assert (tmp_path / "calls").read_text() == "requeue 4711\n"


def test_a_cancelled_job_is_not_requeued(
    allocation: dict[str, str], tmp_path: Path, shm_dir: Path
) -> None:
    settings = {"shm_dir": str(shm_dir), "requeue_exit_status": 75}
    assert Script(tmp_path, settings, signal="backward:0:4").start(**allocation).returncode == 75
    assert not (tmp_path / "calls").exists()
