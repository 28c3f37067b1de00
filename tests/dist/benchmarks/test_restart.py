"""benchmarks/restart.py at toy size: a rank is killed under each launcher, and a node is lost."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.thorough import on_demand
from tests.support.warm_python.servers import PYTHON, THROUGHOUT

RESTART = Path(__file__).resolve().parents[3] / "benchmarks" / "restart.py"


def measured(folder: Path, launchers: str, *options: str) -> dict[str, dict[str, Any]]:
    """The rows by launcher; nothing else is left in the folder."""
    path = folder / "kills.json"
    more = f"--megabytes 1 --dir {folder} --json {path}".split()
    done = subprocess.run(
        [PYTHON, str(RESTART), *options, "--launchers", launchers, *more],
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
    assert list(folder.iterdir()) == [path]
    return rows


def test_each_launcher_comes_back_after_each_kill(tmp_path: Path) -> None:
    rows = measured(tmp_path, "torchrun;tierckpt run", "--kill", "1")
    assert set(rows["tierckpt run"]["shim"]) == {"death", "noticed", "ended", "forked", "script"}


@on_demand("20 s; tests/dist/run/test_standby.py has lost nodes")
def test_a_spare_comes_back_after_a_lost_node(tmp_path: Path) -> None:
    measured(tmp_path, "tierckpt run --standby", "--lose", "1")
