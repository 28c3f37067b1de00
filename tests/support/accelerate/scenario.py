"""A job that uses Accelerate, for tests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scenario:
    """Everything is the same in the runs of a job, except those of `run` to `signal`."""

    folder: str
    run: int = 0
    kill: str = ""
    """`POINT:RANK:STEP`: this rank kills itself there, by SIGKILL, after so many steps."""
    signal: str = ""
    """The same: the rank sends itself SIGTERM."""
    ranks: int = 2
    seed: int = 7
    data: str = "plain"
    """`two`: the loop takes a batch from each of two loaders."""
    workers: int = 0
    seedable: bool = True
    accumulation: int = 1
    optimizers: int = 1
    """2: two models with an optimizer each; 3: the second one accumulates by hand."""
    half: bool = False
    """A GradScaler, whose first steps overflow."""
    sets_epoch: bool = False
    saves: bool = False
    """The script also calls `accelerator.save_state()` at the end of each epoch."""
    batches: int = 0
    """If not 0, the loop leaves an epoch after so many batches."""
    accelerator: dict[str, Any] = field(default_factory=dict)
    """Arguments of Accelerator."""
    loading: dict[str, Any] = field(default_factory=dict)
    """Arguments of DataLoaderConfiguration."""
    settings: dict[str, Any] | None = field(default_factory=dict)
    """Arguments of `attach`; None: without checkpoints."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        return cls(**json.loads(text))
