"""A job that uses Accelerate starts with a part of another job's version."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python.servers import PYTHON

SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from tierckpt.accelerate import attach
from tierckpt.errors import RestoreError

path, source, classes, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
accelerator = Accelerator(cpu=True)
torch.manual_seed(len(path))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, classes))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randint(0, 2, (24,)))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with attach(accelerator, path=path, local_every_steps=2, when_busy="wait") as ckpt:
    batches = ckpt.resume(loader)
    if source and not ckpt.restored:
        print(ckpt.load_from(source, strict=False))
    print("begins at", int(ckpt.restored), "with", float(model[0].weight.double().sum()))
    for inputs, targets in batches:
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        if ckpt.version == steps:
            break
    if source and ckpt.version > 3:  # between the passes of a step
        accelerator.gradient_accumulation_steps = 2
        place = batches.state_dict()
        report = ckpt.load_from(source, only=("model", "extra"), strict=False)
        print("extra:", report.kept)
        assert batches.state_dict() == place
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        ckpt.step()
        try:
            ckpt.load_from(source, strict=False)
        except RestoreError as error:
            print("refused:", error)
        model.zero_grad()
        ckpt.load_from(source, strict=False)
        ckpt.abandon()
print("ends with", float(model[0].weight.double().sum()))
"""


def test_parts_of_another_version_are_loaded_once_and_a_restart_continues(
    warm_python: None, tmp_path: Path, shm_dir: Path
) -> None:
    pytest.importorskip("accelerate", exc_type=ImportError)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(name: str, source: str, classes: int, steps: int) -> list[str]:
        done = subprocess.run(
            [PYTHON, str(script), name, source, str(classes), str(steps)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "TIERCKPT_SHM_DIR": str(shm_dir)},
            timeout=120,
        )
        assert not done.returncode, done.stderr
        return done.stdout.splitlines()

    *_, ended = run("first job", "", 2, 4)
    weight = ended.removeprefix("ends with ")
    report, started, last = run("b", "first job", 3, 3)
    assert report.startswith("first job@v4: 2 loaded, 0 skipped, 0 missing, 2 of another shape")
    assert started == f"begins at 0 with {weight}"
    again, extra, refused, _ = run("b", "first job", 3, 4)
    assert extra == "extra: [\"extra['accelerator']\", \"extra_per_rank['loader0']\"]"
    assert refused.startswith("refused: load_from() in the middle of a gradient accumulation")
    assert again == f"begins at 3 with {last.removeprefix('ends with ')}"
