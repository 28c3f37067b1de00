"""Local shards that an agent still reads: to flush them, or to protect them with peers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tierckpt.format.ids import ShardKey
from tierckpt.format.manifest import Manifest
from tierckpt.storage.local.store import LocalStore


class ShardGuard:
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
    """A held shard's image, mapped, and the manifest that it was sealed with.

    Checked: what other nodes or the persistent level were given would count as good there. What
    codecs did to it is undone first, into a file that has no name. Raises OSError,
    CorruptShardError, and what `codecs.decoder.Decoder` raises.
    """
    data = local.read_manifest(key)
    manifest = Manifest.decode(data)
    if manifest.encoding is not None:
        from tierckpt.storage.local.encoded_files import open_encoded, unfolded

        decoder = open_encoded(local, manifest)
        with unfolded(local, decoder) as image:
            yield image, decoder.sealed_bytes
        return
    with sound_image(local, manifest) as image:
        yield image, data


@contextlib.contextmanager
def sound_image(local: LocalStore, manifest: Manifest) -> Iterator[memoryview]:
    """The bytes of a shard that is stored as it was sealed, mapped and checked."""
    from tierckpt.format.verify import verify_shard

    mapped = local.open_image(manifest.key)
    image = memoryview(mapped)
    try:
        verify_shard(manifest, image, f"{manifest.key} in {local.directory}")
        yield image
    finally:
        with contextlib.suppress(BufferError):  # a failure's traceback has a view: freed with it
            image.release()
            mapped.close()
