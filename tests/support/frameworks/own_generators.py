"""Data with random generators of their own: in attributes of a data set and a collate function, one
made at its first use, and two that only arguments of the checkpointer name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate


class Hidden:
    """Generators outside of all searched places."""

    given = torch.Generator()
    extra = torch.Generator()

    @classmethod
    def noise(cls) -> torch.Tensor:
        return sum(torch.rand((), generator=each) for each in (cls.given, cls.extra))  # type: ignore[return-value]


class Noisy(Dataset[Any]):
    """The first tensor of another data set's samples, with noise."""

    def __init__(self, plain: Dataset[Any]) -> None:
        self.plain, self.source = plain, torch.Generator()

    def __len__(self) -> int:
        return len(self.plain)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        first, *rest = self.plain[index]
        return first + torch.rand((), generator=self.source) + Hidden.noise(), *rest


class Collate:
    def __init__(self) -> None:
        self.source: np.random.Generator | None = None

    def __call__(self, samples: Any) -> Any:
        self.source = self.source or np.random.default_rng(5)
        first, *rest = default_collate(samples)
        return [first * float(self.source.random()), *rest]


ARGUMENTS = {"generators": [Hidden.given], "extra_per_rank": {"hidden": Hidden.extra}}
"""Of a checkpointer."""

__all__ = ["ARGUMENTS", "Collate", "Hidden", "Noisy"]
