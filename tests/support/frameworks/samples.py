"""Data of the jobs of several frameworks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

WIDTH, CLASSES = 8, 3


class Samples(Dataset[Any]):
    """With noise of the global generator, as augmentation draws it."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        source = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=source) + 0.1 * torch.randn(WIDTH), index % CLASSES


class Numbered(Samples):
    """Samples with their number as first feature."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((WIDTH,), float(index)), index % CLASSES
