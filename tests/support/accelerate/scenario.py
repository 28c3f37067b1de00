"""A job that uses Accelerate, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.frameworks import scenario


@dataclass(frozen=True)
class Scenario(scenario.Scenario):
    """Adds what jobs with Accelerate have. `data` may be `two`: the loop takes a batch from each of
    two loaders."""

    seed: int = 7
    seedable: bool = True
    accumulation: int = 1
    optimizers: int = 1
    """2: two models with an optimizer each; 3: the second one accumulates by hand."""
    lora: bool = False
    """Trains adapters of PEFT only."""
    half: bool = False
    """A GradScaler with an overflow in its first steps."""
    sets_epoch: bool = False
    saves: bool = False
    """The script also calls `accelerator.save_state()` at the end of each epoch."""
    batch_size: int = 4
    """Of numbered samples."""
    batches: int = 0
    """If not 0, the loop leaves an epoch after so many batches."""
    accelerator: dict[str, Any] = field(default_factory=dict)
    """Arguments of Accelerator."""
    loading: dict[str, Any] = field(default_factory=dict)
    """Arguments of DataLoaderConfiguration."""
