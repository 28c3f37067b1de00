"""A job of Hugging Face's Trainer for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.frameworks import scenario


@dataclass(frozen=True)
class Scenario(scenario.Scenario):
    """Adds what jobs of the Trainer have."""

    kind: str = "trainer"
    """The Trainer's kind: "trainer" or "seq2seq"."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of TrainingArguments."""
    dropout: float = 0.1
    lora: bool = False
    """Trains adapters of PEFT only."""
    patience: int = 0
    """Of an EarlyStoppingCallback; 0: without it."""
    train: dict[str, Any] = field(default_factory=dict)
    """Arguments of `train`."""
