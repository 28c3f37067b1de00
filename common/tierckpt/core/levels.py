"""Levels: the places that hold versions, each one row of one table.

Pure. Votes, ledgers, the schedule, intervals, reports and restore plans iterate over the table, so
a new level is one row here, its settings in `config`, and the code that stores and finds shards.
What a version costs on each is measured by `tuning`, for intervals that are automatic.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct, field

from tierckpt.config import Config

__all__ = [
    "AGENT",
    "AWAITED",
    "BROKEN",
    "DONE",
    "FAR",
    "FREE",
    "INTERVALS",
    "LEDGERS",
    "LOCAL",
    "MEMORY",
    "MIRROR",
    "PEER",
    "PENDING",
    "PERSISTENT",
    "RANK",
    "UNMEASURED",
    "Cost",
    "CostEstimate",
    "Facts",
    "Interval",
    "Level",
    "place_of",
]

PENDING, DONE, BROKEN = 0, 1, -1
"""State of one version on one level at one rank. The minimum over ranks is the version's state:
one broken rank breaks it for all, one pending rank keeps it pending."""


class Interval(Struct, frozen=True):
    """First automatic interval of a level, before the job's costs are known."""

    first_steps: int
    failure_share: float
    """Share of failures after which this level is the first that still has a version: processes die
    more often than nodes, and nodes more often than their disks. An assumption, of which only the
    square root matters: a factor of four changes the level's best interval by a factor of two."""
    lasting: bool = True
    """A version is written during later steps, so its cost is spread over several steps."""


class Facts(Struct, frozen=True):
    """One row of the table: all that differs between levels."""

    name: str
    source: str = ""
    """The level that this level copies its versions from. Every version of this level goes to the
    source first. Empty: the source is the slots in memory, which every version is copied to."""
    interval: Interval | None = None
    """None: the level takes all versions of its source, or no versions are written to it."""
    has_ledger: bool = True
    """Ranks vote about the versions of this level."""
    awaited: bool = False
    """A version is open here from its boundary on, and a save waits for its outcome. Otherwise it
    is open once it is complete on the source, and no caller waits."""
    busy: str = ""
    """Reason given for a skipped version when a rank votes that this level cannot take another;
    empty: this level always can."""
    one_at_a_time: bool = False
    """No version is started here while another one is under way."""
    failed_state: int = BROKEN
    """State of a version that one node could not bring here. DONE where the ledger shows only that
    all nodes have finished with a version, with or without success."""
    is_far: bool = False
    """A shard has to be fetched from here; any rank may fetch it."""
    place: str = ""
    """The level's place, as text; empty: a directory or a URL of the settings."""


class Level(StrEnum):
    """A level by name; the cheapest to restore from first."""

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
        """The level that versions are copied from, see `Facts.source`."""
        return next((level for level in Level if level == self.facts.source), None)

    MEMORY = Facts(
        "memory",
        interval=Interval(first_steps=4, failure_share=0.8, lasting=False),
        awaited=True,
        busy="all memory slots of a rank are still in use",
        place="memory",
    )
    LOCAL = Facts(
        "local",
        interval=Interval(first_steps=32, failure_share=0.15),
        awaited=True,
        busy="a rank is still writing the previous version",
        one_at_a_time=True,
    )
    # A second disk of the node, see `stages`.
    MIRROR = Facts("mirror", source="local", has_ledger=False, place="a mirror")
    PEER = Facts("peer", source="local", place="other nodes")
    # Shards that agents of the job's former nodes hold, see `FormerNodes`.
    AGENT = Facts("agent", has_ledger=False, is_far=True, place="former nodes")
    PERSISTENT = Facts(
        "persistent",
        source="local",
        interval=Interval(first_steps=256, failure_share=0.05),
        failed_state=DONE,
        is_far=True,
    )


MEMORY, LOCAL, MIRROR, PEER, AGENT, PERSISTENT = Level
LEDGERS = tuple(level for level in Level if level.facts.has_ledger)
"""Levels that ranks vote about."""
AWAITED = tuple(level for level in LEDGERS if level.facts.awaited)
INTERVALS = {level: level.facts.interval for level in Level if level.facts.interval is not None}
"""Levels that have an interval of their own."""
FAR = frozenset(level for level in Level if level.facts.is_far)
_BY_NAME: dict[str, Level] = {level: level for level in Level}
RANK: dict[str, int] = {level: rank for rank, level in enumerate(Level)}
"""Order of the levels by cost of a restore; 0 is the cheapest."""


def place_of(level: str, config: Config) -> str:
    """Return the place of a level, or of a stage of the setting, as text."""
    if level == LOCAL:
        return config.directory
    if level not in RANK:
        return f"the stage {level!r}"
    return _BY_NAME[level].facts.place or str(getattr(config, level).path)


class Cost(NamedTuple):
    """Cost of a version on one level; 0: not known yet."""

    us: int = 0
    """Microseconds that a version adds to the steps during which it is written."""
    steps: int = 0
    """Number of these steps; 0 where the write ends within one step."""


class CostEstimate(Struct, frozen=True):
    """Cost of checkpoints; 0: not known yet."""

    step_us: int = 0
    """Microseconds of a step during which no checkpoint is made."""
    levels: Mapping[Level, Cost] = field(default_factory=dict)
    """Costs by level; levels without a measurement are left out."""

    def of(self, level: Level) -> Cost:
        """Return the cost of a version on a level beyond that on the levels before it."""
        return self.levels.get(level, FREE)


FREE = Cost()
UNMEASURED = CostEstimate()
