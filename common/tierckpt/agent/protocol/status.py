"""The status of an agent, for processes outside the job. Pure; neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass

from tierckpt.format.ids import VersionId


@dataclass(frozen=True)
class TaskStatus:
    """A version on its way to a level."""

    level: str
    id: VersionId
    began_seconds: float
    """Unix time."""
    shard: int | None = None
    """None: all shards of the node."""
    done_bytes: int = 0
    total_bytes: int = 0
    """Upper bound; 0 while it is unknown."""


@dataclass(frozen=True)
class LevelStatus:
    """The results of an agent's work for one level, since the agent began."""

    level: str
    stored: int = 0
    """Number of results: one for each shard on local, one for each version on other levels."""
    failed: int = 0
    superseded: int = 0
    """Number of versions that were given up for newer ones."""
    stored_bytes: int = 0
    waiting: int = 0
    """Number of versions that wait for their turn."""
    newest: VersionId | None = None
    """The newest version of which this node's part was stored."""
    newest_at_seconds: float = 0.0
    """Unix time when it was stored."""
    last_bytes: int = 0
    """Bytes of the last result."""
    last_seconds: float = 0.0
    """Seconds that the last result took."""
    last_failure: str = ""
    """Version and reason of the last failure."""


@dataclass(frozen=True)
class AgentStatus:
    """What an agent does, and has done since its start."""

    pid: int
    host: str
    began_seconds: float
    """Unix time."""
    trainers: tuple[int, ...]
    """Ranks that are connected."""
    awaited: tuple[int, ...]
    """Ranks that were killed and may come back."""
    shutting_down: bool
    quiet_seconds: float
    """Time since the flush under way last proceeded; 0.0: none is under way."""
    tasks: tuple[TaskStatus, ...]
    levels: tuple[LevelStatus, ...]
    local_quiet_seconds: float = 0.0
    """Time since the slowest order for the local level last proceeded; 0.0: none is under way."""


__all__ = ["AgentStatus", "LevelStatus", "TaskStatus"]
