"""Accelerate's wrapper of an optimizer in a checkpointer that a script made without `attach`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python.servers import PYTHON

PROGRAM = """
import sys, torch, ddp_ckpt
from accelerate import Accelerator

torch.manual_seed(3)
model = torch.nn.Linear(4, 4)
given = torch.optim.AdamW(model.parameters())
accelerator = Accelerator(cpu=True)
model, prepared = accelerator.prepare(model, given)
optimizer = {"argument": given, "result": prepared, "inside": prepared.optimizer}[sys.argv[1]]
with ddp_ckpt.Checkpointer(model, optimizer, path="ckpts", shm_dir=sys.argv[2]) as ckpt:
    for step in range(ckpt.restore(), int(sys.argv[3])):
        accelerator.backward(model(torch.full((2, 4), float(step))).sum())
        prepared.step()
        prepared.zero_grad()
        ckpt.step()
    print("versions", int(ckpt.restored), ckpt.version)
moments = [[each[name].tolist() for name in sorted(each)] for each in given.state.values()]
print("weights", [p.tolist() for p in model.parameters()], moments)
"""


def trained(given: str, steps: int, folder: Path, shm_dir: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    command = [PYTHON, "-c", PROGRAM, given, str(shm_dir), str(steps)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("versions", "weights"))]


def test_the_result_of_prepare_and_the_optimizer_inside_it_have_the_same_versions(
    warm_python: None, tmp_path: Path, shm_dir: Path
) -> None:
    pytest.importorskip("accelerate", exc_type=ImportError)
    _, wanted = trained("result", 6, tmp_path / "whole", shm_dir)
    folder = tmp_path / "resumed"
    assert trained("result", 2, folder, shm_dir)[0] == "versions 0 2"
    assert trained("inside", 4, folder, shm_dir)[0] == "versions 2 4"
    assert trained("result", 6, folder, shm_dir) == ["versions 4 6", wanted]
