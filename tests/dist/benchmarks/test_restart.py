"""benchmarks/restart.py at toy size: a rank is killed under each launcher."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support.warm_python.servers import PYTHON, THROUGHOUT

RESTART = Path(__file__).resolve().parents[3] / "benchmarks" / "restart.py"


def test_each_launcher_comes_back_after_each_kill(tmp_path: Path) -> None:
    """Nothing but the results is left in the folder."""
    path = tmp_path / "kills.json"
    launchers = "torchrun;tierckpt run"
    more = f"--kill 1 --megabytes 1 --dir {tmp_path} --json {path}".split()
    done = subprocess.run(
        [PYTHON, str(RESTART), "--launchers", launchers, *more],
        env={**os.environ, **THROUGHOUT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["launcher"]: row for row in json.loads(path.read_text())["kills"]}
    assert set(rows) == set(launchers.split(";"))
    for row in rows.values():
        total = sum(part["median"] for part in row["parts"].values())
        assert abs(row["total"]["median"] - total) < 1e-3
    assert list(tmp_path.iterdir()) == [path]
    assert set(rows["tierckpt run"]["shim"]) == {"death", "noticed", "ended", "forked", "script"}
