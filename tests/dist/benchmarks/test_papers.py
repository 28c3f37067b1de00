"""benchmarks/papers.py at toy size: CheckFreq, written from its paper, saves and resumes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support.warm_python.servers import PYTHON, THROUGHOUT

PAPERS = Path(__file__).resolve().parents[3] / "benchmarks" / "papers.py"


def test_a_killed_job_resumes_from_a_persisted_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    line = f"lightcheck --toy --parts recovery --methods checkfreq --dir {tmp_path} --json {path}"
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [PYTHON, str(PAPERS), *line.split()],
        env={**os.environ, **THROUGHOUT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["resumed_from"] in (2, 4, 6), "the newest whose persist was finished"
    assert [step for step, _, _ in row["curve"]] == list(range(row["resumed_from"] + 1, 9))
    assert list(tmp_path.iterdir()) == [path]
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "papers" in name]
