"""A job of Hugging Face's Trainer for tests, as the variable LIGHTNING_SCENARIO describes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.lightning import scenario
from tests.support.lightning.scenario import VARIABLE


@dataclass(frozen=True)
class Scenario(scenario.Scenario):
    """Also the fields of the Lightning jobs: `folder`, `run`, `kill`, `signal`, `error`, `ranks`,
    `workers`, `settings`."""

    kind: str = "trainer"
    """The Trainer's kind: "trainer" or "seq2seq"."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of TrainingArguments."""
    patience: int = 0
    """Of an EarlyStoppingCallback; 0: without it."""
    train: dict[str, Any] = field(default_factory=dict)
    """Arguments of `train`."""


__all__ = ["VARIABLE", "Scenario"]
