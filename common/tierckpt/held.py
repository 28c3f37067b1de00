"""Local shards that an agent still reads: to flush them, or to protect them with peers."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

from .localstore import LocalStore
from .naming import ShardKey


class Held:
    """Local shards that must not be retired now. Any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Hold it from asking to retiring."""
        self._keys: dict[ShardKey, int] = {}

    def add(self, keys: list[ShardKey]) -> None:
        """Once for every use."""
        with self.lock:
            for key in keys:
                self._keys[key] = self._keys.get(key, 0) + 1

    def discard(self, keys: list[ShardKey]) -> None:
        """The inverse of `add`."""
        with self.lock:
            for key in keys:
                self._keys[key] -= 1
                if not self._keys[key]:
                    del self._keys[key]

    def __contains__(self, key: ShardKey) -> bool:
        return key in self._keys


@contextlib.contextmanager
def open_shard(local: LocalStore, key: ShardKey) -> Iterator[tuple[memoryview, bytes]]:
    """A held shard's bytes, mapped, and its manifest. Raises OSError."""
    manifest = local.read_manifest(key)
    mapped: mmap.mmap = local.open_image(key)
    with contextlib.closing(mapped), memoryview(mapped) as image:
        yield image, manifest
