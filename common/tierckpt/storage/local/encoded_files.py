"""Encoded shards on the local level."""

from __future__ import annotations

import contextlib
import mmap
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from tierckpt.codecs.codec import CodecError
from tierckpt.codecs.decoder import Decoder, Read
from tierckpt.codecs.delta import Chain
from tierckpt.codecs.encoder import Encoder, cut
from tierckpt.codecs.pipeline import Pipeline
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.encoding import Buffer
from tierckpt.format.ids import PAGE_BYTES, ShardKey, round_up
from tierckpt.format.manifest import Manifest

from .store import CommitTimes, Draft, LocalStore

BUFFER_BYTES = 8 * 1024 * 1024
"""Size of one write."""


def commit_encoded(
    store: LocalStore,
    key: ShardKey,
    image: memoryview,
    sealed: bytes,
    pipeline: Pipeline,
    chain: Chain,
    still_sealed: Callable[[], bool] = lambda: True,
) -> tuple[CommitTimes, int]:
    """As `LocalStore.commit`, through the codecs; also returns the number of bytes written.

    `chain` names the version that the shard may refer to, and records the new one. Buffers
    BUFFER_BYTES and a block. Raises OSError or CodecError, after which the shard does not exist.
    """
    begin = time.perf_counter()
    base = chain.base_for_next(pipeline.full_every)
    if base is not None and not store.has(base.manifest.key):
        base = None
    encoder = Encoder(pipeline, sealed, base)
    header_bytes = Manifest.decode(sealed).header_bytes
    with store.draft(key, encoded=True) as draft:
        nbytes = _write_all(draft, encoder.stored(cut(image, header_bytes)))
        draft.sync(nbytes)
        written = time.perf_counter()
        if not still_sealed():
            raise FileNotFoundError(f"the slot of {key} was refilled while it was written")
        draft.commit(encoder.manifest.encode())
    made = encoder.made
    if made is None and base is not None and not store.has(base.manifest.key):
        store.retire(key)  # another agent, which did not know of this one, was working here
        raise FileNotFoundError(f"{base.manifest.key} was retired while {key} still referred to it")
    chain.wrote(made)
    return CommitTimes(written - begin, time.perf_counter() - written, draft.direct), nbytes


def _write_all(draft: Draft, stored: Iterable[Buffer]) -> int:
    """Write blocks of any length to the file with large, aligned writes; returns their length.

    The last write is padded to a page, so that it can bypass the page cache too.
    """
    offset = used = 0
    with contextlib.closing(mmap.mmap(-1, BUFFER_BYTES)) as memory, memoryview(memory) as room:
        for block in stored:
            rest = memoryview(block)
            while rest:
                part = rest[: BUFFER_BYTES - used]
                room[used : used + len(part)] = part
                used, rest = used + len(part), rest[len(part) :]
                if used == BUFFER_BYTES:
                    draft.write(room, offset)
                    offset, used = offset + BUFFER_BYTES, 0
        if used:
            padded = round_up(used, PAGE_BYTES)
            room[used:padded] = bytes(padded - used)
            with room[:padded] as last:
                draft.write(last, offset)
    return offset + used


def open_encoded(store: LocalStore, manifest: Manifest) -> Decoder:
    """An encoded shard. Raises the errors of `Decoder`, and OSError."""

    def other(key: ShardKey) -> tuple[Manifest, Read]:
        found = Manifest.decode(store.read_manifest(key))
        return found, partial(store.read, key)

    return Decoder(manifest, partial(store.read, manifest.key), other)


@contextlib.contextmanager
def unfolded(store: LocalStore, decoder: Decoder) -> Iterator[memoryview]:
    """The whole image, in a file without a name beside the others, so that memory use is bounded.

    Raises CodecError for an encrypted shard: the device would have it in plain text.
    """
    if decoder.hides:
        raise CodecError(f"{decoder.sealed.key} is encrypted, and must not be decoded to a disk")
    with tempfile.TemporaryFile(dir=store.directory) as file:
        for block in decoder.blocks():
            file.write(block)
        file.flush()
        with (
            contextlib.closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as mapped,
            memoryview(mapped) as image,
        ):
            yield image


class References:
    """The shards of a store that other shards refer to. One thread."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._known: dict[ShardKey, ShardKey | None] = {}

    def of(self, keys: Iterable[ShardKey]) -> set[ShardKey]:
        """The shards that `keys` refer to. Unreadable ones refer to nothing, as they cannot be
        restored."""
        keys = set(keys)
        self._known = {key: base for key, base in self._known.items() if key in keys}
        for key in keys - self._known.keys():
            self._known[key] = self._look(key)
        return {base for base in self._known.values() if base is not None}

    def _look(self, key: ShardKey) -> ShardKey | None:
        try:
            encoding = Manifest.decode(self._store.read_manifest(key)).encoding
        except (OSError, CorruptShardError, FormatError):
            return None
        return None if encoding is None else encoding.base_of(key)
