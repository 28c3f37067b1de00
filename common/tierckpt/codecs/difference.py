"""The difference of two blocks: that of their numbers' bits, as integers.

The bits of two floating-point numbers that are close, and have the same sign, are close as
integers, too: their high bytes differ by little or nothing, and compress. (fpzip, TVCG 2006, codes
differences of floating-point numbers as integers; Delta-DNN and ExCP store differences of networks.
The exclusive or of the bits, as in Gorilla, VLDB 2015, gets less short, as a carry flips many bits:
see docs/figures.md.) The sign of a difference is its lowest bit, so that small negative ones have
zeros above as well.

numpy is imported here, so only agents that store differences pay for it.
"""

from __future__ import annotations

import numpy as np

from tierckpt.errors import CorruptShardError
from tierckpt.format.manifest import Buffer

from .codec import BlockId, Codec

SAMPLES, SAMPLE_BYTES = 4, 16 * 1024
"""Parts of a block on which the choice is tried."""
MAX_ITEM_BYTES = 8


def item_bytes_of(nbytes: int, item_bytes: int) -> int:
    """The size of the integers for a block of that length, from the size of its numbers."""
    size = min(item_bytes, MAX_ITEM_BYTES)
    return size if nbytes % size == 0 else 1


def difference(block: Buffer, base: Buffer, item_bytes: int) -> Buffer:
    """The difference of a block to a base of the same length, in integers of that size."""
    now, before = (np.frombuffer(each, f"<u{item_bytes}") for each in (block, base))
    signed = (now - before).view(f"<i{item_bytes}")
    found: np.ndarray = (signed << 1) ^ (signed >> (8 * item_bytes - 1))
    return found.data.cast("B")


def undone(stored: Buffer, base: Buffer, item_bytes: int) -> Buffer:
    """The block, from its difference to a base. Raises CorruptShardError for other lengths."""
    if len(stored) != len(base) or len(base) % item_bytes:
        raise CorruptShardError(f"{len(stored)} bytes are no difference to {len(base)} bytes")
    change, before = (np.frombuffer(each, f"<u{item_bytes}") for each in (stored, base))
    one = change.dtype.type(1)
    found: np.ndarray = ((change >> one) ^ (~(change & one) + one)) + before
    return found.data.cast("B")


def pays(changed: Buffer, block: Buffer, codec: Codec, where: BlockId) -> bool:
    """Whether the difference gets shorter than the block itself; tried on a part of large blocks.
    Raises as `Codec.encode`."""
    lengths = [len(codec.encode(_sample(each), where)) for each in (changed, block)]
    return lengths[0] < lengths[1]


def _sample(block: Buffer) -> Buffer:
    if len(block) <= 2 * SAMPLES * SAMPLE_BYTES:
        return block
    view = memoryview(block)
    starts = range(0, len(block), len(block) // SAMPLES // 16 * 16)  # multiples of any item's size
    return b"".join(view[start : start + SAMPLE_BYTES] for start in starts[:SAMPLES])
