"""Manifests of arbitrary shards."""

from __future__ import annotations

from tests.support.facts import manifest_of
from tierckpt.format import PAGE_BYTES, Manifest, ShardKey, VersionId

IMAGE_BYTES = 3 * PAGE_BYTES


def manifest(version: int = 1, created: float = 0.0, job: str = "job") -> Manifest:
    key = ShardKey(VersionId(1, version), 0, 1)
    return manifest_of(key, IMAGE_BYTES, PAGE_BYTES, bytes(16), created, job=job)
