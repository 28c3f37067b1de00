"""Levels: the places that a version can be on, each one row of one table.

Pure. Votes, ledgers, the schedule, intervals, reports and restore plans iterate over the table, so
a new level is one row here, its settings in `config`, and the code that stores and finds shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tierckpt.config import Config

from .ledger import BROKEN, DONE


@dataclass(frozen=True)
class Interval:
    """How often a level takes a version, as far as it is automatic, before the job is known."""

    first_steps: int
    failure_share: float
    """Share of failures that leave this level as the first that still has a version: processes die
    more often than nodes, and nodes more often than their disks. An assumption, of which only the
    square root matters: four times off costs the level a quarter of its part."""
    lasting: bool = True
    """Versions are written during later steps, so their cost is that of several steps."""


@dataclass(frozen=True)
class Facts:
    """One row: all that differs between levels."""

    name: str
    source: str = ""
    """The level that versions are read from on their way here, hence one that every version of this
    level goes to first; empty: slots in memory, where all versions begin."""
    interval: Interval | None = None
    """None: the level takes all versions of its source, or is none that versions go to."""
    has_ledger: bool = True
    """Ranks vote about the versions here."""
    awaited: bool = False
    """A version is open here from its boundary on, and a save waits for its fate. Otherwise it is
    open once it is complete on the source, and nobody waits."""
    busy: str = ""
    """Why a version that is due is skipped, where a rank votes that this level can take no other;
    empty: this level can always."""
    one_at_a_time: bool = False
    """No version is begun here while another one is under way."""
    failed_state: int = BROKEN
    """State of a version that one node could not bring here. DONE where the ledger tells only that
    all nodes are through with a version, whatever came of it."""
    is_far: bool = False
    """A shard has to be fetched from here; any rank may."""
    place: str = ""
    """Where this level is, in words; empty: a directory or a URL of the settings."""


class Level(StrEnum):
    """A place that versions are on, by name; the cheapest to restore from first."""

    facts: Facts

    def __new__(cls, facts: Facts) -> Level:
        """Make the member of one row."""
        level = str.__new__(cls, facts.name)
        level._value_ = facts.name
        level.facts = facts
        return level

    __repr__ = str.__repr__

    @cached_property
    def source(self) -> Level | None:
        """See `Facts.source`."""
        return next((level for level in Level if level == self.facts.source), None)

    MEMORY = Facts(
        "memory",
        interval=Interval(first_steps=4, failure_share=0.8, lasting=False),
        awaited=True,
        busy="on some rank all slots (buffers in memory) are still in use",
        place="memory",
    )
    LOCAL = Facts(
        "local",
        interval=Interval(first_steps=32, failure_share=0.15),
        awaited=True,
        busy="some rank is still writing the version before",
        one_at_a_time=True,
    )
    PEER = Facts("peer", source="local", place="other nodes")
    # What the agent of a node shows that is none of the job's any more, see `former_nodes`.
    AGENT = Facts("agent", has_ledger=False, is_far=True, place="former nodes")
    PERSISTENT = Facts(
        "persistent",
        source="local",
        interval=Interval(first_steps=256, failure_share=0.05),
        failed_state=DONE,
        is_far=True,
    )


MEMORY, LOCAL, PEER, AGENT, PERSISTENT = Level
LEDGERS = tuple(level for level in Level if level.facts.has_ledger)
"""Levels that ranks vote about."""
AWAITED = tuple(level for level in LEDGERS if level.facts.awaited)
INTERVALS = {level: level.facts.interval for level in Level if level.facts.interval is not None}
"""Levels that versions become due for."""
FAR = frozenset(level for level in Level if level.facts.is_far)
RANK: dict[str, int] = {level: rank for rank, level in enumerate(Level)}
"""The cheapest to restore from is 0."""


def place_of(level: Level, config: Config) -> str:
    """Where a level is, for people."""
    if level == LOCAL:
        return config.directory
    return level.facts.place or str(getattr(config, level).path)


__all__ = [
    "AGENT",
    "AWAITED",
    "FAR",
    "INTERVALS",
    "LEDGERS",
    "LOCAL",
    "MEMORY",
    "PEER",
    "PERSISTENT",
    "RANK",
    "Facts",
    "Interval",
    "Level",
    "place_of",
]
