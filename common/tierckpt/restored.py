"""The result of a restore, as a number that a loop can start from."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tierckpt.format.ids import VersionId
from tierckpt.format.records import VersionFacts

if TYPE_CHECKING:
    from tierckpt.lineage.fork import PartReport


class Restored(int):
    """The result of `restore()`; as a number, the iteration to resume from (0: nothing was
    found)."""

    version: int = 0
    """Completed optimizer steps."""
    generation: int = 0
    iteration_counts: str = "calls"
    """The unit of the number: `calls` of `step()`, or optimizer `steps` if the version was taken
    with `boundary="forward"`."""
    imported: str = ""
    """The format that the version was imported from (`tierckpt import`), as text; else empty."""
    shard_levels: tuple[str, ...] = ()
    """The level of each shard, by shard number. `peer`: it was rebuilt; `agent`: it was fetched
    from a node no longer part of the job."""
    levels: dict[str, int]
    """Number of shards by level."""
    nbytes: int = 0
    """Bytes of all shards."""
    read_bytes: int = 0
    """Bytes that this rank read from any level, parity included. The sum over ranks is the amount
    that the job read: a shard has one reader, and is loaded from its memory or page cache."""
    exchanged_bytes: int = 0
    """Bytes that this rank received from other ranks."""
    seconds: dict[str, float]
    """By phase: `inventory`, `verify` (includes reading), `rebuild` (in the background of
    `verify`), `load`, `replay` (of the journal), `total`."""
    base: VersionId | None = None
    """The stored version from which the journal of gradients led on to `version`; None if all came
    from a stored version."""
    replayed: int = 0
    """Number of boundaries that the journal led on from `base`."""
    unrepeated: str = ""
    """The reason why the journal's later steps could not be made again exactly; empty if all were,
    or there were none."""
    forked_from: str = ""
    """The version of another job that this one started from, `PATH@v40`; else empty."""
    partial: PartReport | None = None
    """What became of each tensor, if only parts of that version were taken; else None. The number
    is then 0: the job starts with its first iteration."""
    suspect: str = ""
    """The known or possible difference of replicas when the version was taken; empty if none is
    known."""
    rejected: tuple[str, ...] = ()
    """Copies that were found and could not be used, with the reasons."""

    def __new__(cls, iteration: int = 0) -> Restored:
        """Create a result with no levels and no times."""
        made = super().__new__(cls, iteration)
        made.levels, made.seconds = {}, {}
        return made

    @classmethod
    def of(cls, facts: VersionFacts) -> Restored:
        """The result of a restore of the version with these facts."""
        made = cls(facts.iteration)
        made.version, made.generation = facts.id.version, facts.id.generation
        made.iteration_counts, made.suspect = facts.iteration_counts, facts.suspect
        return made

    def __str__(self) -> str:
        """The number, as scripts print it."""
        return int.__repr__(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Copied, and stored by a script's own checkpoints, as a plain number."""
        return int, (int(self),)

    def __repr__(self) -> str:
        counted = f"{int(self)} {self.iteration_counts}"
        return f"Restored({counted}, version={self.version}, levels={self.levels})"


class TransferStats:
    """Counts of the bytes that one rank moved. Any thread."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.exchanged_bytes = 0
        self._lock = threading.Lock()

    def read(self, nbytes: int) -> None:
        """Add bytes that came from a level."""
        with self._lock:
            self.read_bytes += nbytes

    def received(self, nbytes: int) -> None:
        """Add bytes that came from another rank."""
        with self._lock:
            self.exchanged_bytes += nbytes
