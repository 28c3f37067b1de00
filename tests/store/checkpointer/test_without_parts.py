"""The delete test: without a feature's code and its row in the table, the kernel works.

The package is copied without the feature, and a job of one process runs there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python.servers import PYTHON

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path("common/tierckpt")
TABLE = PACKAGE / "checkpointer/checkpointer.py"
PARTS = {
    "epoch ends": "hooks/epoch_ends.py",
    "forks": "lineage/fork.py",
    "goodput": "goodput",
    "halt": "halt",
    "journal": "journal",
    "replicas": "replicas",
    "tracing": "tracing",
    "unchanged versions": "replicas/unchanged.py",
    "unsaved objects": "hooks/unsaved_objects.py",
}
ALL = "all of them"
KERNEL = """
import os, sys

path, memory = sys.argv[1:]
settings = {"shm_dir": memory, "local_every_steps": 1, "local_keep": 9}
if os.fork() == 0:
    os.environ["TIERCKPT_FAULTS"] = "kill@sealed:version=5"  # read by the import
    from tierckpt.testing import TinyJob

    TinyJob(path, **settings).run(8)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == -9

from tierckpt.testing import TinyJob

undisturbed = TinyJob(None)
course = {step: undisturbed.run(step).fingerprint() for step in range(1, 9)}
with TinyJob(path, seed=9, **settings) as job:
    assert job.restore() == 5
    assert job.checkpointer.restored.levels == {"memory": 1}
    for step in (5, 6, 7):
        job.run(step)
        assert job.fingerprint() == course[step]
    job.checkpointer.save(now=True)
    assert job.heard("committed", "local")[-1].version == 7
    assert job.restore(version=6) == 6
    assert job.fingerprint() == course[6]
    job.run(8)
    assert job.fingerprint() == course[8]
with TinyJob(path, seed=8, **settings) as job:
    assert job.restore(version=8) == 8
    assert job.checkpointer.restored.levels == {"local": 1}
    assert job.fingerprint() == course[8]
print("works")
"""
"""A job of one process: killed, continued from memory, saved, sent back, closed, continued from
disk."""


def remove(feature: str, target: Path) -> None:
    """Remove the feature and its row."""
    gone = target / PACKAGE / feature
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    module = "tierckpt." + feature.removesuffix(".py").replace("/", ".")
    table = (target / TABLE).read_text()
    imports = re.compile(rf"^from {re.escape(module)}\b[\w.]* import (\w+)\n", re.MULTILINE)
    for name in imports.findall(table):
        table = re.sub(rf"^    {name},\n", "", table, flags=re.MULTILINE)
    (target / TABLE).write_text(imports.sub("", table))


def empty_table(target: Path) -> None:
    """Remove the other rows, too."""
    text = (target / TABLE).read_text()
    rows = re.search(r"^PARTS: .*? = \((.*?)^\)", text, re.DOTALL | re.MULTILINE)
    assert rows is not None
    assert "DataWitness" in rows[1]
    (target / TABLE).write_text(text.replace(rows[1], "\n"))


@pytest.mark.parametrize("part", [*PARTS, ALL])
def test_the_kernel_works_without(
    part: str, warm_python: None, tmp_path: Path, shm_dir: Path
) -> None:
    # With compiled bytecode, which is valid there.
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE)
    for feature in PARTS.values() if part == ALL else [PARTS[part]]:
        if (tmp_path / PACKAGE / feature).exists():
            remove(feature, tmp_path)
    if part == ALL:
        empty_table(tmp_path)
    command = [PYTHON, "-c", KERNEL, str(tmp_path / "ckpts"), str(shm_dir)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / PACKAGE.parent)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "works\n"), done.stderr[-4000:]
