"""Weights & Biases offline: the files of its runs have the curves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.wandb_records import project, rows

pytest.importorskip("wandb")

BEFORE = """
import sys, wandb
from tests.support.exported_job import *
from tierckpt.events import Event
from tierckpt.exporters import WandB, exporter
exporter.END_SECONDS = 120
WandB.turn_seconds = 0.01

def sealed(version):
    seconds = {"stall": 0.001 * version, "sealed_after": 0.1}
    return Event("sealed", "memory", version, nbytes=1, seconds=seconds)
"""

OWN = """
play(WandB("checkpoints", mode="offline"), FIRST)
"""

BESIDE = """
exporter = WandB(every_seconds=0)
exporter.on_attached(FIRST)
exporter.on_event(sealed(1))  # there is no run yet
run = wandb.init(project="mine", mode="offline")
for step in range(100, 104):
    exporter.on_event(sealed(step - 98))
    wait_until(lambda: not exporter._points and not exporter._queue, "nothing is logged")
    run.log({"loss": step}, step=step)
exporter.on_closed()
run.finish()
"""

NO_RUN = """
play(WandB(), FIRST)
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own: wandb keeps threads and a server."""
    environment = {
        **os.environ,
        "WANDB_SILENT": "true",
        "HOME": str(folder),
        "WANDB_MODE": "offline",
    }
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each project's run."""
    files = folder.glob("wandb/offline-run-*/run-*.wandb")
    return {project(file): rows(file) for file in files}


def test_a_run_of_its_own_has_the_curves(tmp_path: Path) -> None:
    run(OWN, tmp_path)
    ((name, found),) = runs(tmp_path).items()
    assert name == "checkpoints"
    assert [row["tierckpt/version"] for row in found] == [7, 8, 9, 10]
    values = {key: value for row in found for key, value in row.items()}
    assert values["tierckpt/stall_seconds"] == 0.3
    assert values["tierckpt/store_seconds/local"] == 0.75
    assert values["tierckpt/failed/local"] == 1


def test_beside_the_script_its_own_rows_and_steps_stay(tmp_path: Path) -> None:
    run(BESIDE, tmp_path)
    ((name, found),) = runs(tmp_path).items()
    assert name == "mine"
    logged = [(row["_step"], row["loss"]) for row in found if "loss" in row]
    assert logged == [(step, step) for step in range(100, 104)]
    versions = [row["tierckpt/version"] for row in found if "tierckpt/version" in row]
    assert versions[-1] == 5
    assert versions == sorted(versions)


def test_without_a_run_it_says_so_at_the_end(tmp_path: Path) -> None:
    done = run(NO_RUN, tmp_path)
    assert not (tmp_path / "wandb").exists()
    assert (
        "WandB: nothing was logged, as the script started no run; call wandb.init()" in done.stderr
    )
