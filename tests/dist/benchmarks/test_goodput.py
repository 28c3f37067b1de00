"""benchmarks/goodput.py run at toy size: a rank is killed, and the job resumes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support.warm_python.servers import PYTHON, THROUGHOUT

GOODPUT = Path(__file__).resolve().parents[3] / "benchmarks" / "goodput.py"


def test_a_killed_toy_comes_back_and_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    line = f"--toy --methods ours --mtbf 4 --failures 2 --steps 5 --dir {tmp_path} --json {path}"
    done = subprocess.run(
        [PYTHON, str(GOODPUT), *line.split()],
        env={**os.environ, **THROUGHOUT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["status"] == "ok", row
    assert row["failures"] == 2
    assert row["back_seconds"], "it made steps after a failure"
    assert 0 < row["useful_steps"] <= row["made_steps"]
    assert list(tmp_path.iterdir()) == [path]
