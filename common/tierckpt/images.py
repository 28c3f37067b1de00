"""A stored shard's bytes, wherever they are: mapped from a slot or a file, or fetched; checked."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from pathlib import Path

from .errors import CorruptShardError, FormatError
from .inventory import Place
from .localstore import LocalStore
from .manifest import DIGEST_BYTES, Manifest, digest
from .naming import ShardKey
from .persistent import PersistentError, PersistentStore, VersionName
from .persistent.backend import WINDOW_BYTES
from .shardfile import ShardHeader, decode_header
from .slots import Slot

LOST = (OSError, EOFError, ImportError, CorruptShardError, FormatError, PersistentError)
"""What reading raises where a copy is as good as lost."""


class Image:
    """One shard's bytes, mapped or received."""

    def __init__(self, manifest: Manifest, view: memoryview, close: Callable[[], None]) -> None:
        self.manifest = manifest
        self.view = view
        self._close = close

    def close(self) -> None:
        """Unmap."""
        self.view.release()
        self._close()


def open_image(key: ShardKey, place: Place, life: str = "") -> Image:
    """Map the shard, or fetch it. Raises OSError, PersistentError, CorruptShardError or
    FormatError."""
    if place.level == "persistent":
        return _fetch(key, place, life)
    if place.level == "memory":
        slot = Slot.open(Path(place.where))
        if slot is None:
            raise FileNotFoundError(f"slot {place.where} is gone")
        data = slot.manifest_bytes()
        if data is None or (manifest := Manifest.decode(data)).key != key:
            slot.close()
            raise CorruptShardError(f"slot {place.where} no longer holds {key}")
        return Image(manifest, slot.image(), slot.close)
    store = LocalStore(place.where)
    manifest = Manifest.decode(store.read_manifest(key))
    mapped: mmap.mmap = store.open_image(key)
    return Image(manifest, memoryview(mapped), mapped.close)


def _fetch(key: ShardKey, place: Place, life: str) -> Image:
    shared = PersistentStore(place.where)
    with contextlib.closing(shared):
        reader = shared.open_shard(VersionName(key.id, key.shards, life), key.shard)
        manifest = Manifest.decode(reader.manifest)
        if manifest.key != key:
            raise CorruptShardError(f"{place.where} has {manifest.key} in the place of {key}")
        fetched = bytearray(manifest.image_bytes)
        for low in range(0, len(fetched), WINDOW_BYTES):
            nbytes = min(WINDOW_BYTES, len(fetched) - low)
            fetched[low : low + nbytes] = reader.read(low, nbytes)
    return Image(manifest, memoryview(fetched), lambda: None)


def verify(image: Image) -> ShardHeader:
    """Check every byte against the manifest's digests, and return the header.

    Raises CorruptShardError, naming the first damaged range, or FormatError.
    """
    manifest, view = image.manifest, image.view
    if len(view) < manifest.image_bytes:
        raise CorruptShardError(f"truncated: {len(view)} of {manifest.image_bytes} bytes")
    digests = manifest.digests
    offset = manifest.header_bytes
    if digest(view[:offset]) != digests[:DIGEST_BYTES]:
        raise CorruptShardError(f"bytes 0 to {offset} (the header) differ from their checksum")
    header = decode_header(view)
    total = offset + header.data_bytes
    if (len(header.block_bytes) + 1) * DIGEST_BYTES != len(
        digests
    ) or total != manifest.image_bytes:
        raise CorruptShardError("the header and the manifest do not belong together")
    for index, nbytes in enumerate(header.block_bytes, start=1):
        expected = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if digest(view[offset : offset + nbytes]) != expected:
            raise CorruptShardError(
                f"bytes {offset} to {offset + nbytes} differ from their checksum"
            )
        offset += nbytes
    return header
