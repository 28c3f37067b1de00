"""Level tables: the settings of each level, in a frozen class with defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tierckpt._text import directory_of

AUTO: Literal["auto"] = "auto"
"""Stands for a number of steps: as often as the overhead budget allows; see `core.tuning`."""
Steps = int | Literal["auto"]


@dataclass(frozen=True)
class MemoryConfig:
    """The memory level: sealed slots, which survive a crashed process."""

    every_steps: Steps = 1
    """Take a version to memory every N optimizer steps; 0: not by steps; `auto`: as often as
    `overhead_budget` allows."""
    every_seconds: float = 0.0
    """Take one also after this time; 0: not by time."""
    linger_seconds: float = 3600.0
    """The next job removes the segments of a *dead* job that nobody has restarted for this time."""


@dataclass(frozen=True)
class LocalConfig:
    """The local level: shard files on a node-local file system."""

    every_steps: Steps = 0
    """Take a version to the local level every N optimizer steps; 0: not by steps; `auto`: as often
    as `overhead_budget` allows."""
    every_seconds: float = 60.0
    """Take one also after this time, which bounds the loss, however long a step is; 0: not by
    time."""
    keep_last: int = 2
    """Number of newest complete versions to keep (at least 1)."""
    keep_every: int = 0
    """Also keep a version every so many steps: each multiple, or the next version if a multiple
    was not taken; 0: none."""
    keep_best: int = 0
    """Also keep this number of best versions, by the metric given at boundaries (see `best`); 0:
    none."""
    in_place: bool = True
    """If the directory is in memory (tmpfs, DAX) and there are no codecs, slots are files in it,
    and are committed without a copy (see `image_file`). False: each level has its own copy."""
    journal_steps: int = 0
    """Keep a journal of the gradients of every optimizer step, so that a restart makes the steps
    after the newest version again; and take a version at the latest after N steps, which limits the
    journal's room and the time of a restart. 0: no journal."""
    journal_copy: bool = True
    """If the peer level is on (`peer_redundancy`), also keep a copy of each rank's journal on
    another node, so that it survives the loss of a node. The disks write twice as much."""
    codecs: str = ""
    """Codecs applied to shards on the way to the level, in this order: `incremental`, `zstd
    level=1`, `aes-gcm`, or a codec of yours (see `tierckpt.codecs`); empty: none."""


@dataclass(frozen=True)
class PeerConfig:
    """The peer level: a node's local level can be rebuilt from other nodes'.

    The agents make the redundancy of every version that is complete on local, without delaying
    training.
    """

    redundancy: str = "none"
    """`none`; `partner` or `partner <copies>`; `xor`, which survives one loss in a group; `rs
    <k>+<m>`, which survives m."""
    group_size: int = 8
    """Members of a group; for `rs` they are k + m."""
    domain: str = ""
    """Name of the failure domain (a rack, a switch); empty: the node."""
    interface: str = ""
    """Network interface or address that the agents use, and votes between nodes; empty: the one
    that reaches the other nodes."""
    port: int = 0
    """TCP port of a node's agent; 0: any."""

    @property
    def on(self) -> bool:
        """True unless `redundancy` is `none`."""
        return self.redundancy.strip().lower() != "none"


@dataclass(frozen=True)
class PersistentConfig:
    """The persistent level: whole versions on a parallel file system or an object store.

    Such a version goes to local first, and is flushed from there when it is complete on all ranks.
    """

    path: str = ""
    """A directory that all nodes see, or a URL (s3://bucket/prefix); empty: no such level."""
    every_steps: Steps = 0
    """Take a version to this level every N optimizer steps; 0: not by steps; `auto`: as for memory,
    with at most half of the time spent on flushing."""
    every_seconds: float = 600.0
    """Take one also after this time; 0: not by time."""
    keep_last: int = 2
    """Number of newest versions to keep (at least 1)."""
    keep_every: int = 0
    """Also keep a version every so many steps: each multiple, or the next version if a multiple
    was not taken; 0: none."""
    keep_best: int = 0
    """Also keep this number of best versions, as `local_keep_best` does; 0: none."""
    bytes_per_second: float = 0.0
    """Limit of each node's rate; 0: no limit."""
    nodes_at_once: int = 0
    """Number of nodes that flush at the same time, in turns; 0: no limit."""
    shards_per_file: int = 64
    """Number of ranks' shards that share a file."""
    read_back: bool = False
    """Read every byte again before a version is declared complete."""
    drop_superseded: bool = False
    """Give up a flush when a newer version is waiting for it, at most twice in a row."""
    codecs: str = ""
    """Codecs of this level, as `local_codecs`, which are undone first; empty: none."""
    storage_options: str = field(default="", repr=False)
    """Options for the store's client besides the path: endpoint, keys, region. A
    directory takes `direct` and `shared_writes`. Given as a table (a mapping) or as JSON; kept as
    JSON. The options may be secret: they are shown nowhere, and the agent gets them over its
    private socket."""

    def options(self) -> dict[str, Any]:
        """`storage_options` as keyword arguments."""
        found: dict[str, Any] = json.loads(self.storage_options or "{}")
        return found

    def at(self, place: str) -> PersistentConfig:
        """The settings for another place, to read it or to put marks there. The options are kept
        for a URL; those of a directory concern writing shards."""
        url = "://" in directory_of(place)
        return replace(self, path=place, storage_options=self.storage_options if url else "")


TABLES = {
    "memory": MemoryConfig,
    "local": LocalConfig,
    "peer": PeerConfig,
    "persistent": PersistentConfig,
}
"""Tables with the settings of one level each."""
AUTOMATIC = [
    f"{name}_every_steps" for name, table in TABLES.items() if hasattr(table, "every_steps")
]
"""Settings that may be `auto`."""
STORAGE_OPTIONS = "persistent_storage_options"

__all__ = [
    "AUTO",
    "AUTOMATIC",
    "STORAGE_OPTIONS",
    "TABLES",
    "LocalConfig",
    "MemoryConfig",
    "PeerConfig",
    "PersistentConfig",
    "Steps",
]
