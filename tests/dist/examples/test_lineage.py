"""The examples of populations and of recursive stages, as a user runs them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.warm_python.servers import PYTHON
from tierckpt.lineage import tree_of

ROOT = Path(__file__).resolve().parents[3]


def run(example: str, folder: Path) -> str:
    command = [PYTHON, f"examples/{example}/train.py", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_worst_members_copy_the_best_from_memory(tmp_path: Path) -> None:
    out = run("population", tmp_path / "population")
    best = [float(each) for each in re.findall(r"loss ([\d.]+) \(best\)", out)]
    assert len(best) == 5
    assert best[-1] < best[0]
    assert re.search(r"a copy took [\d.]+ ms \(median of 10\)", out)


def test_stages_are_one_tree_and_are_not_trained_twice(tmp_path: Path) -> None:
    first = run("stages", tmp_path)
    assert len(first.splitlines()) == 7
    assert run("stages", tmp_path) == first
    found, left = [], [tree_of(str(tmp_path / "all"))]
    while left:
        job = left.pop()
        found.append(Path(job.path).name)
        left += [fork.job for run_ in job.every_run() for fork in run_.forks if fork.job]
    assert sorted(found) == ["all", "all.0", "all.0.0", "all.0.1", "all.1", "all.1.0", "all.1.1"]
