"""A job of Lightning's Trainer for tests, as the variable LIGHTNING_SCENARIO describes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

VARIABLE = "LIGHTNING_SCENARIO"


@dataclass(frozen=True)
class Scenario:
    """Everything is the same in the runs of a job, except `run` and `kill`."""

    folder: str
    run: int = 0
    kill: str = ""
    """`POINT:RANK:STEP`: this rank kills itself there, by SIGKILL, after so many steps."""
    signal: str = ""
    """The same: the rank sends itself SIGTERM."""
    error: bool = False
    """True: at both, it raises an exception instead."""
    ranks: int = 2
    package: str = "lightning.pytorch"
    model: str = "plain"
    data: str = "plain"
    workers: int = 0
    half: bool = False
    """Mixed precision with float16, and a GradScaler."""
    callbacks: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer."""
    fit: dict[str, Any] = field(default_factory=dict)
    """Arguments of `fit`."""
    settings: dict[str, Any] | None = field(default_factory=dict)
    """Arguments of TierCheckpoint; None: without it."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        return cls(**json.loads(text))
