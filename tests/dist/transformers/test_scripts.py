"""Scripts with Hugging Face's Trainer of one process: those of the documentation, and several calls
of `train()` at one path."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python.servers import PYTHON, TRANSFORMERS

pytest.importorskip("transformers", exc_type=ImportError)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "transformers.md"


def output_of(code: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [PYTHON, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, **TRANSFORMERS},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_code_of_the_documentation_trains_and_resumes(tmp_path: Path) -> None:
    first, second, of_a_fork = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    compile(of_a_fork, "docs/transformers.md", "exec")
    before = """
import torch, transformers
config = transformers.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1)
model = transformers.GPT2LMHeadModel(config)
dataset = [{"input_ids": torch.tensor([i % 9, 1, 2, 3]), "labels": torch.tensor([1, 2, 3, 4])}
    for i in range(64)]
"""
    after = "\nprint('steps', trainer.state.global_step, int(trainer.checkpointer.restored))"
    for code, start in ((first, 0), (second, 24)):
        assert f"steps 24 {start}" in output_of(before + code + after, tmp_path)


SCRIPT = """
import sys

import torch
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

from tierckpt.errors import RestoreError
from tierckpt.transformers import TierTrainer


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self):
        super().__init__(PretrainedConfig())
        self.net = torch.nn.Linear(1, 1)
        self.post_init()

    def forward(self, x):
        return {"loss": self.net(x).pow(2).mean()}


data = [{"x": torch.tensor([float(number)])} for number in range(8)]
args = TrainingArguments(
    sys.argv[3], num_train_epochs=1, per_device_train_batch_size=2, use_cpu=True,
    report_to="none", save_strategy="no", disable_tqdm=True,
)
settings = {"path": sys.argv[1], "shm_dir": sys.argv[2], "agent": "inline"}
trainer = TierTrainer(Model(), args, train_dataset=data, tierckpt=settings)
trainer.train()
assert trainer.state.global_step == 4
assert trainer.checkpointer.end.complete
for each in (trainer, TierTrainer(Model(), args, train_dataset=data, tierckpt=settings)):
    try:
        each.train()
    except RestoreError as error:
        assert "has the end of another training" in str(error), error
    else:
        raise AssertionError("it was not refused")
args.num_train_epochs = 2
more = TierTrainer(
    Model(), args, train_dataset=data, tierckpt={**settings, "rollback_to": 4}
)
more.train()
assert more.state.global_step == 8
"""


def test_a_further_train_is_refused_or_asked_for(tmp_path: Path, shm_dir: Path) -> None:
    output_of(SCRIPT, tmp_path, str(tmp_path / "ckpts"), str(shm_dir), str(tmp_path / "out"))
