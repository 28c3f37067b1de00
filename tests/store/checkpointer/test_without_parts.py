"""The delete test: without a feature's code and its row in the table, the kernel works.

A checkout is copied without the feature, and tests of the kernel run there.
"""

from __future__ import annotations

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
SINGLE = "tests/store/checkpointer/test_single_process.py"
KERNEL = (
    "test_checkpointing_changes_nothing",
    "test_killed_anywhere_it_resumes_bit_for_bit[kill@sealed:version=5-forward-native]",
    "test_memory_lost_too_it_resumes_from_disk",
    "test_saving_now_is_durable_when_it_returns",
    "test_going_back_within_one_run",
)
NEEDED = ("setup.cfg", "tests/conftest.py", "tests/support", "tests/store/conftest.py", SINGLE)


def copy_to(target: Path) -> None:
    """Copy what the tests need."""
    for name in (*NEEDED, str(PACKAGE), "ddp_ckpt", "horovod_ckpt"):
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy)  # with compiled bytecode, which is valid there
        else:
            shutil.copy(source, copy)


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
def test_the_kernel_works_without(part: str, warm_python: None, tmp_path: Path) -> None:
    copy_to(tmp_path)
    for feature in PARTS.values() if part == ALL else [PARTS[part]]:
        if (tmp_path / PACKAGE / feature).exists():
            remove(feature, tmp_path)
    if part == ALL:
        empty_table(tmp_path)
    names = KERNEL if part == ALL else KERNEL[:2]
    tests = [f"{SINGLE}::{name}" for name in names]
    command = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-q", *tests]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(names)} passed" in done.stdout
