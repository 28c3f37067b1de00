"""Waits and sizes of the product that several tests change; only this module knows their places."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from tierckpt.agent import client, connection_states
from tierckpt.checkpointer import shutdown
from tierckpt.coordination import ballots
from tierckpt.core import decisions
from tierckpt.snapshot import snapshot
from tierckpt.storage import claims, slot_pool


@dataclass(frozen=True)
class Limit:
    """A constant of a module."""

    module: ModuleType
    name: str

    @property
    def value(self) -> Any:
        """As it is now."""
        return getattr(self.module, self.name)

    def set(self, patch: pytest.MonkeyPatch, value: float) -> None:
        """Until `patch` is undone."""
        patch.setattr(self.module, self.name, value)


AGENT_ANSWERS = Limit(connection_states, "ANSWER_SECONDS")
AGENT_JOINS = Limit(connection_states, "JOIN_SECONDS")
AGENTS_TRIED = Limit(connection_states, "MAX_AGENTS")
LOOKS_FOR_ANSWERS = Limit(client, "LOOK_SECONDS")
"""Seconds between a trainer's looks at its agent, when it waits for it."""
FINAL_NOTICE = Limit(shutdown, "NOTICE_SECONDS")
QUIET_LEVEL = Limit(decisions, "QUIET_SECONDS")
"""Seconds without progress, until a disk or store has failed."""
BALLOT_TURNS = Limit(ballots, "TURNS")
BALLOT_PATIENCE = Limit(ballots, "PATIENCE_SECONDS")
BALLOT_MEETING = Limit(ballots, "MEETING_SECONDS")
TREE_RANKS = Limit(ballots, "TREE_RANKS")
COPIER_QUIET = Limit(snapshot, "QUIET_SECONDS")
COPIER_LINGERS = Limit(snapshot, "LINGER_SECONDS")
CLAIM_HERE = Limit(claims, "HERE_SECONDS")
CLAIM_ELSEWHERE = Limit(claims, "ELSEWHERE_SECONDS")
SLOT_LATE = Limit(slot_pool, "LATE_SECONDS")
SLOT_TAKEN = Limit(slot_pool, "TAKEN_SECONDS")
