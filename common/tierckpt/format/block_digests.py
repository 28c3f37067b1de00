"""The proof that bytes are right: a code fills gaps, and believes whatever it is given.

One wrong byte in any source makes a wrong byte in what is rebuilt, and nothing in the code says
so. Hence two rules. Who holds a shard or parity checks it against its own manifest before it counts
as there; damaged, it is lost. And what was rebuilt is checked against the manifest of the shard
that was lost, which the survivors keep beside their parity, before it is used or committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierckpt.errors import CorruptShardError

from .layout import BLOCK_BYTES
from .manifest import DIGEST_BYTES, digest, digest_at


def parity_blocks(parity_bytes: int) -> list[int]:
    """Lengths of the blocks that so many bytes of parity are hashed in; the last may be short."""
    return [min(BLOCK_BYTES, parity_bytes - low) for low in range(0, parity_bytes, BLOCK_BYTES)]


def digests_of(view: memoryview, block_bytes: Sequence[int]) -> bytes:
    """The blocks' digests, one behind the other, as manifests hold them.

    Raises ValueError when the blocks do not cover `view` exactly.
    """
    if sum(block_bytes) != len(view):
        raise ValueError(f"blocks of {sum(block_bytes)} bytes for a view of {len(view)}")
    return b"".join(digest(view[low:high]) for low, high in _ranges(block_bytes))


def check(view: memoryview, block_bytes: Sequence[int], digests: bytes, what: str) -> None:
    """Raise CorruptShardError unless every block of `view` has the digest that `digests` holds.

    `view` must have the blocks' length exactly. `what` names it in the error, which tells the first
    range that differs.
    """
    if len(view) != sum(block_bytes) or len(digests) != DIGEST_BYTES * len(block_bytes):
        raise CorruptShardError(
            f"{what} is {len(view)} bytes long and has {len(digests) // DIGEST_BYTES} digests; it "
            f"should have {sum(block_bytes)} bytes, in {len(block_bytes)} blocks"
        )
    for index, (low, high) in enumerate(_ranges(block_bytes)):
        if digest(view[low:high]) != digest_at(digests, index):
            raise CorruptShardError(f"{what}: bytes {low} to {high} differ from their checksum")


def _ranges(block_bytes: Sequence[int]) -> Iterator[tuple[int, int]]:
    low = 0
    for nbytes in block_bytes:
        yield low, low + nbytes
        low += nbytes
