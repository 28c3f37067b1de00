"""Whether slots are files of the local level (see `imagefile`), and what memory that takes.

Every rank decides for itself, at attach: nothing that ranks agree on depends on it.
"""

from __future__ import annotations

from pathlib import Path

from tierckpt.config import Config
from tierckpt.storage.local.store import LocalStore

from .image_file import filesystem_of, memory_kind


def place_for_slots(config: Config) -> LocalStore | None:
    """The local level's store, where slots are to be files of it; makes its directory."""
    if not _wanted(config):
        return None
    store = LocalStore(config.directory)
    try:
        store.create()
        return store if memory_kind(store.directory) else None
    except OSError:
        return None  # the first commit will say what is wrong there


def expected(config: Config) -> bool:
    """The same, without touching the directory, which may hang; a DAX one is not recognised."""
    return _wanted(config) and filesystem_of(Path(config.directory)) == "tmpfs"


def most_files(config: Config, slots: int) -> int:
    """How many images a rank has at most: in slots, committed, and given back for reuse.

    What is committed is often still in a slot, and is then one file. Versions that are kept beyond
    `local_keep_last` come on top.
    """
    return slots + config.local.keep_last + 1


def told(config: Config, slots: int, shard_bytes: int) -> str:
    """In words and bytes, what was decided."""
    return (
        f"{config.directory} is memory ({memory_kind(Path(config.directory))}): slots are files "
        "there, and versions are committed without a copy. A rank takes up to "
        f"{most_files(config, slots)} x {shard_bytes} bytes of it, and more for versions that are "
        "kept beyond local_keep_last"
    )


def _wanted(config: Config) -> bool:
    # What modules make of a shard are other bytes than the slot's.
    return config.uses("local") and config.local.in_place and not config.local.modules
