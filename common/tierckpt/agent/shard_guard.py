"""Local shards that an agent still reads, for a flush or for an exchange with peers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tierckpt.format.ids import ShardKey
from tierckpt.format.manifest import Manifest
from tierckpt.storage.local.store import LocalStore


class ShardGuard:
    """Set of local shards that must not be retired now. Any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Hold it from the check to the removal of a shard."""
        self._keys: dict[ShardKey, int] = {}

    def add(self, keys: list[ShardKey]) -> None:
        """Guard the shards; call it once for every use."""
        with self.lock:
            for key in keys:
                self._keys[key] = self._keys.get(key, 0) + 1

    def discard(self, keys: list[ShardKey]) -> None:
        """Undo one `add`."""
        with self.lock:
            for key in keys:
                self._keys[key] -= 1
                if not self._keys[key]:
                    del self._keys[key]

    def __contains__(self, key: ShardKey) -> bool:
        return key in self._keys


@contextlib.contextmanager
def open_shard(local: LocalStore, key: ShardKey) -> Iterator[tuple[memoryview, bytes]]:
    """A guarded shard's image, mapped, and the manifest that it was sealed with.

    The image is checked, because other nodes and the persistent level trust it. An encoded shard is
    decoded first, into a file without a name. Raises OSError, CorruptShardError, and the errors of
    `codecs.decoder.Decoder`.
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
    """Bytes of a shard stored without codecs, mapped and checked."""
    from tierckpt.format.verify import verify_shard

    mapped = local.open_image(manifest.key)
    image = memoryview(mapped)
    try:
        verify_shard(manifest, image, f"{manifest.key} in {local.directory}")
        yield image
    finally:
        with contextlib.suppress(BufferError):  # a traceback has a view, and frees it later
            image.release()
            mapped.close()
