"""benchmarks/stall.py for real, at toy size: cut short and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

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
