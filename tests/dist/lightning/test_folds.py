"""Several fits of one process at one path: a fold never takes the end of another for its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python.servers import LIGHTNING, PYTHON

SCRIPT = """
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader

from tierckpt.errors import RestoreError
from tierckpt.lightning import TierCheckpoint

BATCHES = 4
data = DataLoader(torch.arange(float(BATCHES)).reshape(-1, 1), 1)
events = []


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.steps = torch.nn.Linear(1, 1), 0

    def training_step(self, batch, index):
        self.steps += 1
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(epochs=1, **settings):
    given = {"path": sys.argv[1], "shm_dir": sys.argv[2], "agent": "inline", **settings}
    quiet = dict.fromkeys(("progress_bar", "model_summary", "checkpointing"), False)
    made = TierCheckpoint(on_event=events.append, **given)
    return L.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, callbacks=[made],
        **{f"enable_{name}": off for name, off in quiet.items()},
    )


first, model = trainer(), Model()
first.fit(model, data)
for other in (Model(), model):  # a further fold, and fine-tuning
    try:
        trainer().fit(other, data)
    except RestoreError as error:
        assert "has the end of another training" in str(error), error
    else:
        raise AssertionError("it was not refused")
assert model.steps == BATCHES
first.fit_loop.max_epochs = 2
first.fit(model, data)
assert model.steps == 2 * BATCHES, "the same Trainer goes on"
asked = Model()
trainer(epochs=3, rollback_to=2 * BATCHES).fit(asked, data)
assert asked.steps == BATCHES

assert not [each for each in events if "nothing is left" in each.message]
again = Model()
trainer(epochs=3, rollback_to=3 * BATCHES).fit(again, data)
assert again.steps == 0
(text,) = [each.message for each in events if "nothing is left" in each.message]
assert f"started with v{3 * BATCHES}" in text, text
"""


def test_a_further_fold_is_refused_and_a_trainer_continues(tmp_path: Path, shm_dir: Path) -> None:
    pytest.importorskip("lightning", exc_type=ImportError)
    command = [PYTHON, "-c", SCRIPT, str(tmp_path / "ckpts"), str(shm_dir)]
    environment = {**os.environ, **LIGHTNING}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
