"""Scripts that use Accelerate in one process: that of the documentation, one with a checkpointer
made without `attach`, and one that starts with a part of another job's version."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python.servers import PYTHON

pytest.importorskip("accelerate", exc_type=ImportError)
ROOT = Path(__file__).resolve().parents[3]


def test_the_code_of_the_documentation_trains_and_resumes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "accelerate.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    before = """
import torch
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
"""
    after = "\nprint('steps', int(ckpt.restored), ckpt.iteration)"
    for start in (0, 12):
        done = subprocess.run(
            [PYTHON, "-c", before + block + after], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert f"steps {start} 12" in done.stdout


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
    tmp_path: Path, shm_dir: Path
) -> None:
    _, wanted = trained("result", 6, tmp_path / "whole", shm_dir)
    folder = tmp_path / "resumed"
    assert trained("result", 2, folder, shm_dir)[0] == "versions 0 2"
    assert trained("inside", 4, folder, shm_dir)[0] == "versions 2 4"
    assert trained("result", 6, folder, shm_dir) == ["versions 4 6", wanted]


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
    tmp_path: Path, shm_dir: Path
) -> None:
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
