"""Manifests of nothing in particular."""

from __future__ import annotations

from tierckpt.format.ids import PAGE_BYTES
from tierckpt.format.manifest import Manifest

IMAGE_BYTES = 3 * PAGE_BYTES


def manifest(version: int = 1, created: float = 0.0, job: str = "job") -> Manifest:
    return Manifest(
        job=job,
        version=version,
        generation=1,
        run_id="5eed",
        lineage=((1, 0),),
        iteration=version,
        shard=0,
        shards=1,
        image_bytes=IMAGE_BYTES,
        header_bytes=PAGE_BYTES,
        rank_state_bytes=0,
        digests=bytes(16),
        created_seconds=created,
    )
