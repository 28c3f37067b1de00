"""A loop over an ordinary loader, resumed in mid-epoch: losses are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tierckpt
from tierckpt.testing.tiny_job import BATCH, CLASSES, IN_FEATURES, seed_everything, tiny_model

LENGTH, EPOCHS = 5 * BATCH, 3


class Script:
    """A user's script, with a checkpointer if it has a path."""

    def __init__(self, seed: int, path: Path | None, **settings: Any) -> None:
        seed_everything(seed)
        features = torch.randn(LENGTH, IN_FEATURES, generator=torch.Generator().manual_seed(9))
        data = TensorDataset(features, torch.arange(LENGTH) % CLASSES)
        self.model = tiny_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.data: tierckpt.ResumableLoader[Any] = tierckpt.ResumableLoader(
            DataLoader(data, BATCH, shuffle=True)
        )
        self.losses: list[float] = []
        self.ckpt: tierckpt.Checkpointer | None = None
        if path is not None:
            self.ckpt = tierckpt.Checkpointer(
                self.model,
                self.optimizer,
                extra={"schedule": self.schedule},
                extra_per_rank={"data": self.data},
                path=path,
                **settings,
            )

    def run(self, steps: int, explicit: bool = True) -> None:
        """Train up to the given number of steps, after an evaluation."""
        self.evaluate()
        for epoch in range(self.data.epoch, EPOCHS):
            self.data.set_epoch(epoch)
            for features, target in self.data:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.model(features), target)
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                if self.ckpt is not None and explicit:
                    self.ckpt.step()
                if len(self.losses) == steps:
                    return
            self.schedule.step()
            self.evaluate()

    def evaluate(self) -> None:
        """Draws random numbers when its loader is made."""
        for _ in DataLoader([0, 1], shuffle=True):
            pass


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # restored, then stepped
@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("killed_after", [3, 5, 6])
def test_losses_continue_as_if_nothing_had_happened(
    killed_after: int, explicit: bool, path: Path, settings: Any
) -> None:
    undisturbed = Script(1, None)
    undisturbed.run(-1)
    # Without step(), a step becomes a version when the next one begins.
    boundary = {"boundary": "explicit" if explicit else "forward", "agent": "inline", **settings}
    first = Script(1, path, **boundary)
    assert first.ckpt is not None
    first.run(killed_after + (not explicit), explicit)
    first.ckpt.abandon()
    second = Script(2, path, **boundary)
    assert second.ckpt is not None
    assert second.ckpt.restore() == killed_after
    second.run(-1, explicit)
    assert second.losses == undisturbed.losses[killed_after:]
    assert second.schedule.last_epoch == undisturbed.schedule.last_epoch
    second.ckpt.close()
