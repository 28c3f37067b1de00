"""The net, the data and the journal of the example, for DDP and for Horovod."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

import tierckpt

BATCH = 64
IMAGES = 1800
GLYPHS = (
    *("111101101101111", "010110010010111", "111001111100111", "111001111001111"),
    *("101101111001001", "111100111001111", "111100111101111", "111001010010010"),
    *("111101111101111", "111101111001111"),
)
"""The digits from 0 on, five rows of three points each."""


def build_model() -> nn.Module:
    """Make a net with BatchNorm and dropout, which make an exact restart difficult."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(128 * 16, 128),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(128, 10),
    )


def options(description: str | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--path", default="ckpts", help="where checkpoints go")
    parser.add_argument("--journal", type=Path, help="folder for a JSON line per step")
    parser.add_argument("--plain", action="store_true", help="take no checkpoints")
    parser.add_argument("--kill-step", type=int, default=-1, help="SIGKILL rank 1 in this step")
    return parser.parse_args()


def drawn() -> TensorDataset:
    """Draw digits of 8 x 8 points, at random places, with noise. They are made, as the library with
    the usual ones takes longer to import than torch."""
    source = torch.Generator().manual_seed(11)
    labels = torch.randint(10, (IMAGES,), generator=source)
    images = 0.4 * torch.rand(IMAGES, 1, 8, 8, generator=source)
    glyphs = torch.tensor([[float(point) for point in glyph] for glyph in GLYPHS]).view(10, 5, 3)
    top, left = torch.randint(4, (2, IMAGES, 1, 1), generator=source)
    rows, columns = top + torch.arange(5).view(1, 5, 1), left + torch.arange(3).view(1, 1, 3)
    images[torch.arange(IMAGES).view(-1, 1, 1), 0, rows, columns] += 0.5 * glyphs[labels]
    return TensorDataset(images, labels)


class Batches:
    """The batch of each step, from a sampler shuffled by epoch, so that a restart repeats them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.data = drawn()
        self.sampler = DistributedSampler(
            self.data, ranks, rank, shuffle=True, seed=7, drop_last=True
        )
        self.per_epoch = len(self.sampler) // BATCH
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def of_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and labels of this rank in this step."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self.sampler.set_epoch(epoch)
            self._epoch, self._order = epoch, torch.tensor(list(self.sampler))
        chosen = self._order[index * BATCH : (index + 1) * BATCH]
        images = self.data.tensors[0][chosen]
        return images + 0.05 * torch.randn_like(images), self.data.tensors[1][chosen]


class Journal:
    """A file for each rank with a JSON line per step and event, for the demo."""

    def __init__(self, folder: Path | None, rank: Callable[[], int]) -> None:
        self._folder = folder
        self._rank = rank  # a function, since it changes under elastic Horovod
        self._files: dict[int, TextIO] = {}

    def write(self, **values: object) -> None:
        """Add a line."""
        if self._folder is not None:
            rank = self._rank()
            if rank not in self._files:
                self._files[rank] = (self._folder / f"steps-r{rank}.jsonl").open("a", buffering=1)
            self._files[rank].write(json.dumps(values) + "\n")

    def event(self, event: tierckpt.Event) -> None:
        """Add an event of a checkpoint; for `on_event`."""
        self.write(
            event=event.name,
            version=event.version,
            level=event.level,
            seconds=event.seconds,
            at=time.time(),
        )

    def killed(self, step: int) -> None:
        """Add a line, then kill this process with SIGKILL."""
        self.write(killed=step, at=time.time())
        os.kill(os.getpid(), signal.SIGKILL)
