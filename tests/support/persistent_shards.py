"""The persistent store as a store of single shards, for the conformance suite of stores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.facts import facts_named
from tierckpt.format import ShardKey, VersionFacts
from tierckpt.storage.persistent import (
    PersistentStore,
    RetryPolicy,
    ShardSource,
    VersionName,
)

LIFE = "5eed"
SERVED, ENDPOINT = "TEST_S3_SERVED", "TEST_S3_ENDPOINT"
"""Environment variables: the test server's directory (its folders are the buckets), and its URL."""


def name_of(key: ShardKey) -> VersionName:
    return VersionName(key.id, key.shards, LIFE)


def facts_of(key: ShardKey) -> VersionFacts:
    return facts_named(name_of(key), lineage=((key.id.generation, 0),))


class Image(bytearray):
    """Bytes that can be closed, like a mapping."""

    def close(self) -> None:
        self.clear()


class Shards:
    """One try for each operation: the sweeps' faults are transient, and retries would hide them."""

    def __init__(self, path: str, **options: Any) -> None:
        self.store = PersistentStore(path, retry=RetryPolicy(tries=1), **options)

    def create(self) -> None:
        self.store.create()

    def commit(self, key: ShardKey, image: memoryview, manifest: bytes) -> None:
        source = ShardSource(key.shard, image, manifest)
        self.store.flush(facts_of(key), len(image), [source])

    def keys(self) -> list[ShardKey]:
        names = self.store.versions()
        return sorted(ShardKey(n.id, s, n.shards) for n in names for s in range(n.shards))

    def read_manifest(self, key: ShardKey) -> bytes:
        return self.store.open_shard(name_of(key), key.shard).manifest

    def open_image(self, key: ShardKey) -> Image:
        return Image(self.store.open_shard(name_of(key), key.shard).read())

    def retire(self, key: ShardKey) -> None:
        self.store.retire(name_of(key))

    def clean(self, shard: int) -> list[str]:
        gone = [*self.store.retired(), *self.store.incomplete()]
        for name in gone:
            self.store.retire(name)
        self.store.clean()
        return [name.stem for name in gone]


def shared(directory: Path) -> Shards:
    """A store with one file for many writers."""
    return Shards(str(directory))


def own(directory: Path) -> Shards:
    """A store with a file for each writer."""
    return Shards(str(directory), shared_writes=False)


def fsspec_local(directory: Path) -> Shards:
    """A store on fsspec's own view of the local file system."""
    return Shards(f"local://{directory}", auto_mkdir=True)


def s3(directory: Path) -> Shards:
    """A store on the test server, which keeps objects as files below `directory`."""
    path = directory.relative_to(os.environ[SERVED])
    return Shards(f"s3://{path}", **s3_options(os.environ[ENDPOINT]))


def s3_options(endpoint: str) -> dict[str, Any]:
    """Options without the client's own retries: Tierckpt's are tested."""
    return {
        "access_key_id": "testkey",
        "secret_access_key": "testsecret",
        "endpoint": endpoint,
        "region": "us-east-1",
        "retry_config": {"max_retries": 0},
    }
