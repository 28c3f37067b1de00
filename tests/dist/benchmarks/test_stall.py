"""benchmarks/stall.py for real, at toy size: cut short and resumed, and on Horovod's ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.horovod_here import horovod_missing
from tests.support.thorough import on_demand
from tests.support.warm_python.servers import PYTHON, THROUGHOUT

STALL = Path(__file__).resolve().parents[3] / "benchmarks" / "stall.py"


def start(folder: Path, line: str) -> subprocess.Popen[str]:
    command = [PYTHON, str(STALL), "--toy", "--dir", str(folder), *line.split()]
    # No commit: changes of the working tree during the test do not make it another measurement.
    environment = {**os.environ, **THROUGHOUT, "GIT_DIR": str(folder / "no-repository")}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def results(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_run_that_was_ended_continues_with_the_missing_rounds(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    line = f"--methods nothing,ours-memory --rounds 3 --json {path}"
    with start(tmp_path, line) as first:
        assert first.stderr is not None
        for progress in first.stderr:
            if progress.startswith("round 2"):
                first.send_signal(signal.SIGTERM)
                break
        said = first.communicate()[1]
    assert first.returncode == 1
    assert f"go on with --resume {path}" in said
    kept = results(path)
    assert kept["partial"]["rounds"] in (1, 2)
    assert list(tmp_path.iterdir()) == [path]

    with start(tmp_path, f"{line} --resume {path}") as second:
        assert second.communicate()[0].count("Tierckpt, to memory") == 1
    assert second.returncode == 0
    complete = results(path)
    assert "partial" not in complete
    assert complete["date"] == kept["date"]
    assert len(complete["resumed"]) == 1
    ours = complete["methods"][1]
    assert (ours["status"], ours["due"], ours["others"]["count"]) == ("ok", 3 * 4, 3)

    with start(tmp_path, f"{line} --resume {path}") as third:
        assert "nothing is missing" in third.communicate()[1]
    assert third.returncode == 1


@on_demand("half a minute for code of the benchmarks alone")
def test_the_usual_ways_to_save_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    names = ["nothing", "dcp-thread", "dcp-tuned"]
    if importlib.util.find_spec("torchsnapshot"):
        names.append("torchsnapshot")
    line = f"--methods {','.join(names)} --rounds 1 --steps 4 --json {path}"
    with start(tmp_path, line) as run:
        output, said = run.communicate()
    assert run.returncode == 0, said
    rows = {row["name"]: row for row in results(path)["methods"]}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(names, "ok"), said
    assert all(rows[name]["taken"] == rows[name]["due"] > 0 for name in names[1:]), said
    assert "DCP async_save, best tuned" in output
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(bool(horovod_missing()), reason=horovod_missing())
@on_demand("35 s; the table for DDP is made by the same code")
def test_horovods_table(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    names = "nothing,torch-save,hvd-commit,ours-off,ours-commit"
    with start(tmp_path, f"--launcher horovod --methods {names} --rounds 1 --json {path}") as run:
        output, said = run.communicate()
    assert run.returncode == 0, said
    rows = {row["name"]: row for row in results(path)["methods"]}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "ok"), said
    taken = {name for name, row in rows.items() if row["taken"]}
    assert taken == {"torch-save", "hvd-commit", "ours-commit"}
    assert rows["ours-off"]["call"]["count"] == rows["nothing"]["call"]["count"]
    for title in (
        "torch.save on rank 0",
        "hvd.elastic.TorchState.commit",
        "Tierckpt, TorchState.commit",
    ):
        assert title in output
