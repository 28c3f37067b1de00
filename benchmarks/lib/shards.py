"""Shards without a training: memory like that of a slot, and manifests for it."""

from __future__ import annotations

import json
import mmap
import time

import numpy as np

from tierckpt.format.ids import FORMAT_MAJOR, FORMAT_MINOR, PAGE_BYTES, VersionId
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import DIGEST_BYTES, Manifest, digest, digests_of
from tierckpt.format.records import VersionFacts
from tierckpt.format.shard_file import encode_table


def shared(nbytes: int) -> memoryview:
    """Anonymous shared memory, like a slot, filled with random bytes."""
    view = memoryview(mmap.mmap(-1, nbytes))
    np.frombuffer(view, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    return view


def make_sound(view: memoryview) -> bytes:
    """Write the header of a shard without tensors; return the digests of the shard."""
    data = len(view) - PAGE_BYTES
    blocks = [min(BLOCK_BYTES, data - low) for low in range(0, data, BLOCK_BYTES)]
    metadata = {
        "format_version": f"{FORMAT_MAJOR}.{FORMAT_MINOR}",
        "pieces": encode_table(()),
        "blocks": json.dumps([[1, nbytes] for nbytes in blocks]),
        "structure": "{}",
    }
    header = json.dumps({"__metadata__": metadata}).encode().ljust(PAGE_BYTES - 8)
    view[:PAGE_BYTES] = len(header).to_bytes(8, "little") + header
    return digest(view[:PAGE_BYTES]) + digests_of(view[PAGE_BYTES:], blocks)


def facts_of(version: int, shards: int) -> VersionFacts:
    """The facts of a version of the benchmark's job."""
    return VersionFacts(
        job="benchmark",
        run_id="0",
        id=VersionId(1, version),
        shards=shards,
        lineage=((1, 0),),
        iteration=version,
        iteration_counts="calls",
    )


def manifest(shard: int, shards: int, version: int, nbytes: int, digests: bytes = b"") -> bytes:
    """The encoded manifest of a shard. Without `digests` the shard cannot be verified."""
    return Manifest(
        facts=facts_of(version, shards),
        shard=shard,
        image_bytes=nbytes,
        header_bytes=PAGE_BYTES,
        rank_state_bytes=0,
        digests=digests or bytes(DIGEST_BYTES * (1 + nbytes // BLOCK_BYTES)),
        created_seconds=time.time(),
    ).encode()
