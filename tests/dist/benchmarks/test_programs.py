"""Benchmarks for real, at toy size: ranks are killed or lost, and the jobs resume."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_python.servers import PYTHON, THROUGHOUT

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def started(program: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [PYTHON, str(BENCHMARKS / program), "--dir", str(folder), *arguments]
    # No commit: changes of the working tree during the test do not make it another measurement.
    environment = {**os.environ, **THROUGHOUT, "GIT_DIR": str(folder / "no-repository")}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def results(program: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The results of a benchmark, which leaves nothing else behind."""
    path = folder / "results.json"
    with started(program, folder, *arguments, "--json", str(path)) as process:
        said = process.communicate()[1]
    assert process.returncode == 0 or "no network namespaces" in said, said
    assert list(folder.iterdir()) == [path]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_goodput_counts_a_killed_job_that_comes_back(tmp_path: Path) -> None:
    line = "--toy --methods ours --mtbf 4 --failures 2 --steps 5"
    (row,) = results("goodput.py", tmp_path, *line.split())["rows"]
    assert row["status"] == "ok", row
    assert row["failures"] == 2
    assert row["back_seconds"], "it made steps after a failure"
    assert 0 < row["useful_steps"] <= row["made_steps"]


def test_restart_times_a_kill_under_the_shim(tmp_path: Path) -> None:
    line = ["--kill", "1", "--megabytes", "1", "--launchers", "tierckpt run"]
    (row,) = results("restart.py", tmp_path, *line)["kills"]
    total = sum(part["median"] for part in row["parts"].values())
    assert abs(row["total"]["median"] - total) < 1e-3


def test_a_job_of_checkfreq_resumes_from_a_persisted_snapshot(tmp_path: Path) -> None:
    line = "lightcheck --toy --parts recovery --methods checkfreq"
    (row,) = results("papers.py", tmp_path, *line.split())["rows"]
    assert row["resumed_from"] in (2, 4, 6), "the newest whose persist was finished"
    assert [step for step, _, _ in row["curve"]] == list(range(row["resumed_from"] + 1, 9))


def test_a_job_survives_the_loss_of_its_node_and_its_log_stays_the_same(tmp_path: Path) -> None:
    line = "scr-exa --toy --parts spares --methods ours-xor"
    (row,) = results("papers.py", tmp_path, *line.split())["rows"]
    if "no network namespaces" in row["status"]:
        pytest.skip(row["status"])
    assert row["status"] == "ok"
    assert (row["survived"], row["losses_differing"]) == (1, 0)
    assert row["losses_compared"] == 2 * row["steps"]
    assert row["starts"][0]["resumed_from"] in (0, 4, 8), "0: the first loss came too early"


def test_a_cold_restart_by_root_checkpointing_continues_bit_for_bit(tmp_path: Path) -> None:
    line = "scr-exa --toy --parts restarts --methods root-shared"
    (row,) = results("papers.py", tmp_path, *line.split())["rows"]
    assert row["status"] == "ok"
    assert [start["resumed_from"] for start in row["starts"]] == [8]
    assert (row["losses_compared"], row["losses_differing"]) == (2 * 16, 0)


def test_stall_counts_the_checkpoints_of_all_visits(tmp_path: Path) -> None:
    line = "--toy --methods nothing,ours-memory --rounds 2"
    plain, ours = results("stall.py", tmp_path, *line.split())["methods"]
    assert (plain["status"], plain["taken"]) == ("ok", 0)
    assert (ours["status"], ours["due"], ours["others"]["count"]) == ("ok", 2 * 4, 2)
    assert 0 < ours["taken"] <= ours["due"]
    assert ours["call"]["median"] > 0
