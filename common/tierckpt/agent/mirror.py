"""The stage `mirror`: the node's shards on a second disk of the node, as a level of its own.

A restart looks there, too: a lost or damaged disk costs neither a rebuild nor a fetch. An example
of a level that is one class, one row of `core.levels` and a name in `stages`.
"""

from __future__ import annotations

import contextlib

from tierckpt.format.ids import ShardKey
from tierckpt.stages import LocalVersion, mirror_of
from tierckpt.storage.local import LocalStore

__all__ = ["KEPT", "Mirror"]

KEPT = 2
"""Number of newest versions that stay, whatever the local level still has."""


class Mirror:
    """Copies shards to a directory of the same form as the local level's. It keeps the versions
    that the local level keeps, and its own newest ones. One thread."""

    def __init__(self, place: str) -> None:
        """`place`: a directory; each job has its own folder there."""
        self._place = place

    def accept(self, version: LocalVersion) -> None:
        """Copy the shards, then remove older ones, see `stages.Stage`. Raises OSError."""
        store = LocalStore(mirror_of(self._place, version.facts.job))
        store.create()
        for key in version.shards:
            store.clean(key.shard)  # what a killed agent has left
            with version.open(key) as (image, manifest):
                if not _has(store, key, manifest):
                    store.commit(key, image, manifest)
                version.advance(len(image))
        self._retire(store, version)

    def _retire(self, store: LocalStore, version: LocalVersion) -> None:
        here, shards = {key.shard for key in version.shards}, version.shards[0].shards
        stored, local = store.keys(), LocalStore(version.directory).keys()
        mine = [k for k in stored if k.shard in here or k.shard >= shards]  # or nobody's
        stay = {*(key.id for key in local), *sorted({key.id for key in mine})[-KEPT:]}
        for key in mine:
            if key.id not in stay:
                with contextlib.suppress(FileNotFoundError):
                    store.retire(key)


def _has(store: LocalStore, key: ShardKey, manifest: bytes) -> bool:
    """Whether the shard was copied before: by an agent that was killed after that."""
    with contextlib.suppress(FileNotFoundError):
        return store.has(key) and store.read_manifest(key) == manifest
    return False
