"""A job of Lightning's Trainer for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.frameworks import scenario


@dataclass(frozen=True)
class Scenario(scenario.Scenario):
    """Adds what Lightning's jobs have."""

    package: str = "lightning.pytorch"
    model: str = "plain"
    half: bool = False
    """Mixed precision with float16, and a GradScaler."""
    callbacks: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer."""
    fit: dict[str, Any] = field(default_factory=dict)
    """Arguments of `fit`."""
