"""The experiment of `make spares` with few nodes: one is lost and a spare takes its place; then
another is lost, and no spare is left."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.support.warm_python.servers import PYTHON, THROUGHOUT

ROOT = Path(__file__).resolve().parents[3]
NODES, SPARES = 3, 1


def test_a_spare_takes_a_lost_nodes_place_and_then_the_job_shrinks(tmp_path: Path) -> None:
    script = ROOT / "examples" / "spares" / "experiment.py"
    size = ["--nodes", str(NODES), "--spares", str(SPARES), "--picture", "spares.png"]
    ended = subprocess.run(
        [PYTHON, str(script), *size],
        cwd=tmp_path,
        env={**os.environ, **THROUGHOUT, "COLUMNS": "500", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    said = ended.stdout
    assert ended.returncode == 0, said + ended.stderr
    assert re.search(r"lost node1 in step \d+; spare0 replaces it", said)
    assert re.search(r"lost \w+ in step \d+; no spare is left", said)
    runs = re.findall(r"run \d: (\d) ranks resumed at step (\d+) .* shards from (.*);", said)
    assert [(int(ranks), "'peer': 1" in levels) for ranks, _, levels in runs] == [
        (NODES, True),
        (NODES - 1, True),
    ], said
    assert all(int(step) > 0 for _, step, _ in runs)
    assert "persistent" not in said
    assert f"loss of all {NODES} ranks equals the undisturbed run bit for bit" in said
    assert (tmp_path / "spares.png").stat().st_size > 0
