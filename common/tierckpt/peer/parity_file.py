"""The parity file: a member's contribution to its group, with its manifest (see FORMAT.md).

A parity file is valid by itself as soon as it is committed, whether or not the other members commit
theirs. Its manifest holds the digests of its own bytes and the manifests of all shards that it was
computed from: enough to know which shards it can rebuild, and to verify them. So members need not
agree on a commit; a restart uses the parities that exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from tierckpt.erasure.parity_manifest import ParityManifest
from tierckpt.errors import CorruptShardError
from tierckpt.format.ids import ParityKey, ShardKey
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import check, digest, digest_at, parity_blocks
from tierckpt.storage.local import Draft, LocalStore

Read = Callable[[int, memoryview], None]
"""`read(offset, into)`: fill `into` with the bytes from `offset` of a shard or parity, or raise."""


class ParityWriter:
    """Writes parity window by window, the segments in any order, and digests it on the way.

    Blocks are counted from the start of the file, windows from the start of a segment, so a
    block may arrive in parts. Parts are kept in memory: at most two for each segment.
    """

    def __init__(self, draft: Draft, nbytes: int) -> None:
        """`draft` belongs to the caller; `nbytes` is the length of the whole file."""
        self._draft, self._nbytes = draft, nbytes
        self._digests: dict[int, bytes] = {}
        self._parts: dict[int, tuple[bytearray, list[int]]] = {}

    def write(self, data: memoryview, offset: int) -> None:
        """Put `data` at `offset`; write every byte of the file exactly once. Raises OSError."""
        self._draft.write(data, offset)
        for block in range(offset // BLOCK_BYTES, -(-(offset + len(data)) // BLOCK_BYTES)):
            low, high = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._nbytes)
            first, last = max(low, offset), min(high, offset + len(data))
            part = data[first - offset : last - offset]
            if len(part) < high - low:
                whole, missing = self._parts.setdefault(
                    block, (bytearray(high - low), [high - low])
                )
                whole[first - low : last - low] = part
                missing[0] -= len(part)
                if missing[0]:
                    continue
                del self._parts[block]
                part = memoryview(whole)
            self._digests[block] = digest(part)

    def digests(self) -> bytes:
        """Digests of all blocks, once everything is written."""
        blocks = len(parity_blocks(self._nbytes))
        assert len(self._digests) == blocks, "a plan covers the file"
        return b"".join(self._digests[block] for block in range(blocks))


class ParityDraft:
    """A member's parity file while it is made. Keeps an error of the device for later: the others
    need this member."""

    def __init__(
        self, stack: contextlib.ExitStack, store: LocalStore, shard: ShardKey, nbytes: int
    ) -> None:
        self.error: OSError | None = None
        try:
            store.create()
            key = ParityKey(shard.id, shard.shard, shard.shards)
            self._draft = stack.enter_context(store.draft(key, nbytes))
            self._parity = ParityWriter(self._draft, nbytes)
        except OSError as error:
            self.error = error

    def write(self, data: memoryview, offset: int) -> None:
        """Write as `ParityWriter.write`, but never raise."""
        try:
            if self.error is None:
                self._parity.write(data, offset)
        except OSError as error:
            self.error = error

    def commit(self, manifest: Callable[[bytes], ParityManifest]) -> None:
        """Commit the parity with the manifest made from its digests; never raises."""
        try:
            if self.error is None:
                self._draft.sync()
                self._draft.commit(manifest(self._parity.digests()).encode())
        except OSError as error:
            self.error = error


def check_parity(
    record: ParityManifest, read: Read, segments: Collection[int] | None = None
) -> int:
    """Read the parity once, and raise CorruptShardError unless it matches `record`.

    With `segments` (numbers), only the blocks in which these segments lie are read. Returns the
    bytes read. The node that holds a parity calls this before it counts the parity as present.
    Holds one block in memory.
    """
    block, read_bytes = memoryview(bytearray(BLOCK_BYTES)), 0
    for index, nbytes in enumerate(parity_blocks(record.image_bytes)):
        low = index * BLOCK_BYTES
        inside = range(low // record.segment_bytes, -(-(low + nbytes) // record.segment_bytes))
        if segments is not None and not any(s in segments for s in inside):
            continue
        read_bytes += nbytes
        view = block[:nbytes]
        try:
            read(low, view)
        except EOFError as error:
            raise CorruptShardError(f"{record.key} is truncated: {error}") from error
        check(view, [nbytes], digest_at(record.digests, index), f"{record.key} from byte {low} on")
    return read_bytes
