"""A job of a training framework for tests, as the variable FRAMEWORK_SCENARIO describes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

VARIABLE = "FRAMEWORK_SCENARIO"


@dataclass(frozen=True)
class Scenario:
    """What all frameworks share. Everything is the same in the runs of a job, except those of `run`
    to `error`."""

    folder: str
    run: int = 0
    kill: str = ""
    """`POINT:RANK:STEP`: this rank kills itself there, by SIGKILL, after so many steps."""
    signal: str = ""
    """The same: the rank sends itself `sent`."""
    sent: str = "SIGTERM"
    error: bool = False
    """True: at both, it raises an exception instead."""
    ranks: int = 2
    data: str = "plain"
    workers: int = 0
    settings: dict[str, Any] | None = field(default_factory=dict)
    """Arguments of the checkpointer; None: without it."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class OfAccelerate(Scenario):
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


@dataclass(frozen=True)
class OfLightning(Scenario):
    """Adds what jobs of Lightning's Trainer have."""

    package: str = "lightning.pytorch"
    model: str = "plain"
    half: bool = False
    """Mixed precision with float16, and a GradScaler."""
    callbacks: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer."""
    fit: dict[str, Any] = field(default_factory=dict)
    """Arguments of `fit`."""


@dataclass(frozen=True)
class OfTransformers(Scenario):
    """Adds what jobs of Hugging Face's Trainer have."""

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
