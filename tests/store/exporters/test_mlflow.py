"""MLflow with a local store: its own client reads the metrics back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow")

BEFORE = """
import json, os, mlflow
from msgspec.structs import replace
from tests.support.exported_job import *
from tierckpt.exporters import MLflow, exporter
exporter.END_SECONDS = 120
MLflow.turn_seconds = 0.01
store = "sqlite:///" + os.path.abspath("mlflow.db")

def show():
    client = mlflow.MlflowClient(store)
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            history = {
                key: [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, key)]
                for key in run.data.metrics
            }
            print(json.dumps([experiment.name, run.info.run_name, run.info.status, history]))
"""

OWN = """
play(MLflow("checkpoints", store), FIRST)
play(MLflow("checkpoints", store), FIRST, EVENTS[-1:] + (replace(EVENTS[1], version=12),))
show()
"""

BESIDE = """
mlflow.set_tracking_uri(store)
with mlflow.start_run(run_name="mine"):
    play(MLflow(), FIRST)
    mlflow.log_metric("loss", 2.0, step=11)
show()
"""

GIVEN = """
client = mlflow.MlflowClient(store)
made = client.create_run("0", run_name="given")
play(MLflow(run_id=made.info.run_id, tracking_uri=store), FIRST)
show()
"""

NO_RUN = """
play(MLflow(), FIRST)
"""


def run(program: str, folder: Path) -> tuple[list[Any], str]:
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + program],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def check(history: dict[str, Any]) -> None:
    assert history["tierckpt/stall_seconds"] == [[9, 0.3]]
    assert history["tierckpt/store_seconds/local"] == [[8, 0.75]]
    assert history["tierckpt/restore_seconds/total"] == [[7, 0.25]]
    assert history["tierckpt/failed/local"] == [[10, 1.0]]


def test_a_run_of_its_own_has_the_curves_and_continues_after_a_restart(tmp_path: Path) -> None:
    ((experiment, name, status, history),), _ = run(OWN, tmp_path)
    assert (experiment, name, status) == ("checkpoints", "demo-1a2b", "FINISHED")
    assert history["tierckpt/stall_seconds"] == [[9, 0.3], [12, 0.002]]


def test_the_active_run_of_the_script_gets_the_curves(tmp_path: Path) -> None:
    ((_, name, _, history),), _ = run(BESIDE, tmp_path)
    assert name == "mine"
    check(history)
    assert history["loss"] == [[11, 2.0]]


def test_a_given_run_gets_the_curves(tmp_path: Path) -> None:
    """The run of a logger, which ends it."""
    ((_, name, status, history),), _ = run(GIVEN, tmp_path)
    assert (name, status) == ("given", "RUNNING")
    check(history)


def test_without_a_run_it_says_so_at_the_end(tmp_path: Path) -> None:
    _, said = run(NO_RUN, tmp_path)
    assert "MLflow: nothing was logged, as the script has no active run; call" in said
