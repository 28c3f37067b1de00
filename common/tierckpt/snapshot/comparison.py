"""Comparison of a sealed version with the live state, bit for bit.

A save on demand, and the save at the end, store the state of that moment. If the version of the
last boundary equals it, no new version is needed.
"""

from __future__ import annotations

import torch

from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import Manifest, digest, digest_at
from tierckpt.format.shard_file import rank_state_blocks
from tierckpt.state.tree_codec import EncodedTree

from .copy_plan import CopyPlan, copy_parts


def is_unmoved(
    plan: CopyPlan, encoded: EncodedTree, manifest: Manifest, image: memoryview | bytes
) -> bool:
    """True if the live state (`plan` and `encoded`) equals a shard (`manifest` and `image`).

    The state must not change or be copied during the call, and `plan.buffers` must be staged. Uses
    up `encoded`. Reads this rank's part of the state once, and needs memory for one block.
    """
    start, low = manifest.header_bytes, manifest.header_bytes + plan.layout.nbytes
    room_bytes = manifest.image_bytes - low
    if encoded.nbytes != manifest.rank_state_bytes or room_bytes < encoded.nbytes:
        return False
    scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    there = memoryview(image)
    # Small parts change most often, so they are compared first.
    return (
        _same_tree(encoded, there[low : low + room_bytes], scratch)
        and plan.encoded_header(room_bytes) == there[:start]
        and _same_blocks(plan, manifest, scratch)
    )


def _same_tree(encoded: EncodedTree, there: memoryview, scratch: torch.Tensor) -> bool:
    low = 0
    for nbytes in rank_state_blocks(len(there)):
        part = scratch[:nbytes]
        encoded.copy(low, part)
        if part.numpy().data != there[low : low + nbytes]:
            return False
        low += nbytes
    return True


def _same_blocks(plan: CopyPlan, manifest: Manifest, scratch: torch.Tensor) -> bool:
    for index, block in enumerate(plan.layout.blocks):
        part = scratch[: block.nbytes]
        copy_parts(part, *plan.source(index))
        # The first digest is the header's.
        if digest(part.numpy().data) != digest_at(manifest.digests, 1 + index):
            return False
    return True


__all__ = ["is_unmoved"]
