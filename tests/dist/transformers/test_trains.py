"""Several calls of `train()` of one process at one path."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python.servers import PYTHON, TRANSFORMERS

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
    pytest.importorskip("transformers", exc_type=ImportError)
    places = [str(tmp_path / "ckpts"), str(shm_dir), str(tmp_path / "out")]
    command = [PYTHON, "-c", SCRIPT, *places]
    environment = {**os.environ, **TRANSFORMERS}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
