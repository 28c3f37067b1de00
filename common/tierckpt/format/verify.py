"""Verification: whether a shard's bytes match its manifest. Done before a copy counts as stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierckpt.errors import CorruptShardError

from .layout import BLOCK_BYTES
from .manifest import DIGEST_BYTES, Manifest, digest, digest_at
from .shard_file import decode_header


def verify_shard(manifest: Manifest, view: memoryview, what: str = "") -> None:
    """Raise CorruptShardError, or FormatError, unless the bytes of `view` are the shard of
    `manifest`. `what` names it in the error."""
    what = what or str(manifest.key)
    head, digests = manifest.header_bytes, manifest.digests
    if len(view) != manifest.image_bytes:
        raise CorruptShardError(f"{what} has {len(view)} bytes, not {manifest.image_bytes}")
    if not view:
        return
    check(view[:head], [head], digests[:DIGEST_BYTES], what)
    header = decode_header(view[:head])
    check(view[head:], header.block_bytes, digests[DIGEST_BYTES:], what)


def parity_blocks(parity_bytes: int) -> list[int]:
    """Return the lengths of the blocks in which parity is hashed; the last may be shorter."""
    return [min(BLOCK_BYTES, parity_bytes - low) for low in range(0, parity_bytes, BLOCK_BYTES)]


def digests_of(view: memoryview, block_bytes: Sequence[int]) -> bytes:
    """Return the blocks' digests, one after the other, as manifests hold them.

    Raises ValueError when the blocks do not cover `view` exactly.
    """
    if sum(block_bytes) != len(view):
        raise ValueError(f"blocks of {sum(block_bytes)} bytes for a view of {len(view)}")
    return b"".join(digest(view[low:high]) for low, high in _ranges(block_bytes))


def check(view: memoryview, block_bytes: Sequence[int], digests: bytes, what: str) -> None:
    """Raise CorruptShardError unless every block of `view` has the digest that `digests` holds.

    `view` must have exactly the blocks' length. `what` names it in the error, which gives the first
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


__all__ = ["check", "digests_of", "parity_blocks", "verify_shard"]
