"""Imports and exports that are killed, or find the disk full."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import tierckpt
from tests.support.thorough import points
from tests.support.warm_python.servers import PYTHON
from tierckpt.cli import run_command
from tierckpt.testing import tiny_model

POINTS = [
    f"{action}@file:op={op}"
    for action in ("kill", "enospc")
    for op in ("open", "write", "open_manifest", "rename", "fsync_directory")
]
FEW = ("kill@file:op=write", "kill@file:op=rename", "enospc@file:op=write")


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))


def tierckpt_with(fault: str, folder: Path, *arguments: object) -> int:
    faults = {"TIERCKPT_FAULTS": fault, "TIERCKPT_FAULTS_DIR": str(folder)}
    command = [PYTHON, "-m", "tierckpt", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **faults}, capture_output=True).returncode


@pytest.mark.parametrize("fault", points(POINTS, *FEW))
def test_an_interrupted_import_leaves_no_version(fault: str, tmp_path: Path) -> None:
    source, path = tmp_path / "source.pt", tmp_path / "ckpts"
    torch.save(tiny_model().state_dict(), source)
    status = tierckpt_with(fault, tmp_path, "import", source, path)
    assert status == (-signal.SIGKILL if fault.startswith("kill") else 1)
    assert not list(path.glob("*.manifest"))
    assert run_command(["import", str(source), str(path)]) == 0  # nothing is in the way
    assert tierckpt.load(path).version == 1


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_a_killed_export_leaves_no_target(form: str, tmp_path: Path) -> None:
    source, path, out = tmp_path / "source.pt", tmp_path / "ckpts", tmp_path / "out"
    torch.save(tiny_model().state_dict(), source)
    assert run_command(["import", str(source), str(path)]) == 0
    command = ("export", path, out, "--format", form)
    assert tierckpt_with("kill@target:op=rename", tmp_path, *command) == -signal.SIGKILL
    assert not out.exists()
    assert run_command([*map(str, command)]) == 0
    assert out.exists()
