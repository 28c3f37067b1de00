"""Shards without a training: memory like a slot's, and manifests that name it."""

from __future__ import annotations

import mmap
import time

import numpy as np

from tierckpt.layout import BLOCK_BYTES
from tierckpt.manifest import Manifest
from tierckpt.naming import PAGE_BYTES


def shared(nbytes: int) -> memoryview:
    """Anonymous shared memory, as a slot is, with something in it."""
    view = memoryview(mmap.mmap(-1, nbytes))
    np.frombuffer(view, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    return view


def manifest(shard: int, shards: int, version: int, nbytes: int) -> bytes:
    """Of shard number `shard` of `shards`, encoded. Its digests are nobody's: nothing is loaded."""
    return Manifest(
        job="benchmark",
        version=version,
        generation=1,
        life="0",
        lineage=((1, 0),),
        iteration=version,
        shard=shard,
        shards=shards,
        image_bytes=nbytes,
        header_bytes=PAGE_BYTES,
        rank_state_bytes=0,
        digests=bytes(8 * (1 + nbytes // BLOCK_BYTES)),
        created_seconds=time.time(),
    ).encode()
