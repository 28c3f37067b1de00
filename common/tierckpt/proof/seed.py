"""The seed: a verified copy of the version that runs start from, in the local level's format."""

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
    """Copy this version, or the one that a restart takes, into `folder`; returns its number. Files
    at `path` are only read. Raises as `open_version` and reading do."""
    from tierckpt.offline.stored_version import open_version  # imports torch

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
    """Hard-link all files below `folder` into `target`. This is safe: a store never writes to a
    file with several names."""
    target.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            link_all(path, target / path.name)
        else:
            os.link(path, target / path.name)


def version_in(folder: Path) -> int | None:
    """The newest version in a store below `folder`; None if there is none."""
    stores = [LocalStore(path) for path in {p.parent for p in folder.rglob("*.manifest")}]
    keys = chain.from_iterable(map(LocalStore.keys, stores))
    return max((key.id.version for key in keys), default=None)


__all__ = ["copy_version", "link_all", "version_in"]
