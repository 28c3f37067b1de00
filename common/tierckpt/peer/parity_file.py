"""The parity file and its manifest: what a member stores for the others (see FORMAT.md).

A parity file is valid by itself as soon as it is committed, whatever became of the other members'.
Its manifest holds digests of its own bytes, and the manifests of all the shards that it was made
from: enough to know what it can rebuild, and to prove what was rebuilt. So no commit is agreed on
with anybody; a restart takes the parities that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from tierckpt.erasure.parity_manifest import ParityManifest
from tierckpt.errors import CorruptShardError
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import digest, digest_at
from tierckpt.format.verify import check, parity_blocks
from tierckpt.storage.local.store import Draft

Read = Callable[[int, memoryview], None]
"""`read(offset, into)`: fill `into` from byte `offset` of a shard or parity on, or raise."""


class ParityWriter:
    """Writes parity window by window, in any order of segments, and digests it meanwhile.

    Blocks are counted from the beginning of the file, windows from that of a segment, so a block
    may come in parts. A part is put aside: two for each segment at most.
    """

    def __init__(self, draft: Draft, nbytes: int) -> None:
        """`draft` is the caller's; `nbytes` is the length of the whole."""
        self._draft, self._nbytes = draft, nbytes
        self._digests: dict[int, bytes] = {}
        self._parts: dict[int, tuple[bytearray, list[int]]] = {}

    def write(self, data: memoryview, offset: int) -> None:
        """Put `data` at `offset`; every byte of the file comes exactly once. Raises OSError."""
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
        """Of all blocks, once all is written."""
        blocks = len(parity_blocks(self._nbytes))
        assert len(self._digests) == blocks, "a plan covers the file"
        return b"".join(self._digests[block] for block in range(blocks))


def check_parity(
    record: ParityManifest, read: Read, segments: Collection[int] | None = None
) -> int:
    """Read the parity once, and raise CorruptShardError unless it is what `record` says.

    Of `segments` alone, by number, where these are given: the blocks that they lie in. Returns the
    bytes read. To be done by whoever holds it, before it counts as there. Holds one block.
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
