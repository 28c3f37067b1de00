"""A version that runs begin with: a verified copy of it, in the form of the local level."""

from __future__ import annotations

import os
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.storage.local.store import LocalStore

if TYPE_CHECKING:
    from tierckpt.offline.stored_version import Shard


def copy_version(path: str, version: int | None, folder: Path) -> int:
    """Copy what a restart would take, or that version, into `folder`; returns which it is. What is
    at `path` is read, and nothing of it shared. Raises what `open_version` and reading raise."""
    from tierckpt.offline.stored_version import open_version  # and torch

    with closing(open_version(path, version, lambda nbytes: None)) as found:
        store = LocalStore(folder)
        store.create()
        for shard in found.shards:
            _copy(shard, store)
        return found.manifest.id.version


def _copy(shard: Shard, store: LocalStore) -> None:
    manifest = shard.manifest
    with store.draft(manifest.key, manifest.image_bytes) as draft:
        for low, data in shard.all_bytes():
            draft.write(memoryview(data), low)
        draft.commit(manifest.encode())


def link_all(folder: Path, target: Path) -> None:
    """What is in a folder, and in those in it, in another one, too: a store never writes to a file
    that has several names."""
    target.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            link_all(path, target / path.name)
        else:
            os.link(path, target / path.name)


def version_in(folder: Path) -> int | None:
    """The newest that some folder in it has; None where there is none."""
    stores = [LocalStore(path) for path in {p.parent for p in folder.rglob("*.manifest")}]
    keys = chain.from_iterable(map(LocalStore.keys, stores))
    return max((key.id.version for key in keys), default=None)


__all__ = ["copy_version", "link_all", "version_in"]
