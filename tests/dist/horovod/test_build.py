"""The Horovod of `make horovod`, pip, and an environment without a Horovod that works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.horovod_here import horovod_missing

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(bool(horovod_missing()), reason=horovod_missing())
def test_the_extra_adds_nothing_to_an_installed_horovod(tmp_path: Path) -> None:
    """`pip install ".[horovod]"` up to the start of the installation, and without any index."""
    tree, report = tmp_path / "tree", tmp_path / "report.json"
    tree.mkdir()  # pip writes where it builds
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("common", "ddp_ckpt", "horovod_ckpt"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--report", str(report)]
    command += ["--disable-pip-version-check", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*command, f"{tree}[horovod]"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())["install"]
    assert [each["metadata"]["name"] for each in found] == ["tierckpt"]


def test_without_a_horovod_the_adapter_says_where_one_comes_from(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-c", "import horovod_ckpt"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "undefined symbol" in said
    assert "python tools/make_horovod.py" in said
    assert (ROOT / "tools" / "make_horovod.py").exists()
