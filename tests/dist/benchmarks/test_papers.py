"""benchmarks/papers.py at toy size: jobs that are killed, or lose a node, resume exactly."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_python.servers import PYTHON, THROUGHOUT

PAPERS = Path(__file__).resolve().parents[3] / "benchmarks" / "papers.py"


def made(tmp_path: Path, arguments: str) -> list[dict[str, Any]]:
    """The rows of a toy, which leaves nothing else behind."""
    path = tmp_path / "rows.json"
    line = f"{arguments} --toy --dir {tmp_path} --json {path}"
    done = subprocess.run(
        [PYTHON, str(PAPERS), *line.split()],
        env={**os.environ, **THROUGHOUT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 or "no network namespaces" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == [path]
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_a_killed_job_resumes_from_a_persisted_snapshot(tmp_path: Path) -> None:
    (row,) = made(tmp_path, "lightcheck --parts recovery --methods checkfreq")
    assert row["resumed_from"] in (2, 4, 6), "the newest whose persist was finished"
    assert [step for step, _, _ in row["curve"]] == list(range(row["resumed_from"] + 1, 9))


def test_a_job_survives_the_loss_of_its_node_and_its_log_stays_the_same(tmp_path: Path) -> None:
    (row,) = made(tmp_path, "scr-exa --parts spares --methods ours-xor")
    if "no network namespaces" in row["status"]:
        pytest.skip(row["status"])
    assert row["status"] == "ok"
    assert (row["survived"], row["losses_differing"]) == (1, 0)
    assert row["losses_compared"] == 2 * row["steps"]
    assert row["starts"][0]["resumed_from"] in (0, 4, 8), "0: the first loss came too early"


def test_a_cold_restart_by_root_checkpointing_continues_bit_for_bit(tmp_path: Path) -> None:
    (row,) = made(tmp_path, "scr-exa --parts restarts --methods root-shared")
    assert row["status"] == "ok"
    assert [start["resumed_from"] for start in row["starts"]] == [8]
    assert (row["losses_compared"], row["losses_differing"]) == (2 * 16, 0)
