"""What a restore did, as a number that a loop can start from."""

from __future__ import annotations

import threading

from tierckpt.format.facts import VersionFacts


class Restored(int):
    """What `restore()` did; as a number, the iteration to go on from (0: nothing was there)."""

    version: int = 0
    """Completed optimizer steps."""
    generation: int = 0
    iteration_counts: str = "calls"
    """What the number counts: `calls` of `step()`, or optimizer `steps` where the version was taken
    with `boundary="forward"`."""
    shard_levels: tuple[str, ...] = ()
    """The level that each shard came from, by shard number; `peer` is one that was rebuilt, `agent`
    one that was fetched from a node which is none of the job's any more."""
    levels: dict[str, int]
    """How many shards came from which level."""
    nbytes: int = 0
    """Bytes of all shards."""
    read_bytes: int = 0
    """Bytes that this rank read from some level, parity included. The ranks' sum is what the job
    read: a shard has one reader, and is in its memory or page cache when it is loaded."""
    exchanged_bytes: int = 0
    """Bytes that this rank received from other ranks."""
    seconds: dict[str, float]
    """By phase: `inventory`, `verify` (reading is in it), `rebuild` (in the background of it),
    `load`, `total`."""
    suspect: str = ""
    """In what replicas differed, or may have, when the version was taken; empty where they did not,
    as far as is known."""
    rejected: tuple[str, ...] = ()
    """Copies that were there and could not be used, and why."""

    def __new__(cls, iteration: int = 0) -> Restored:
        """See the class."""
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

    def __repr__(self) -> str:
        counted = f"{int(self)} {self.iteration_counts}"
        return f"Restored({counted}, version={self.version}, levels={self.levels})"


class TransferStats:
    """Bytes that one rank moved. Any thread."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.exchanged_bytes = 0
        self._lock = threading.Lock()

    def read(self, nbytes: int) -> None:
        """Bytes came from a level."""
        with self._lock:
            self.read_bytes += nbytes

    def received(self, nbytes: int) -> None:
        """Bytes came from another rank."""
        with self._lock:
            self.exchanged_bytes += nbytes
