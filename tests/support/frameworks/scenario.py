"""A job of a training framework for tests, as the variable FRAMEWORK_SCENARIO describes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

VARIABLE = "FRAMEWORK_SCENARIO"


@dataclass(frozen=True)
class Scenario:
    """What all frameworks share. Everything is the same in the runs of a job, except those of `run`
    to `signal`."""

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
