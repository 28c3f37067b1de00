"""Facts of arbitrary versions, and copies and manifests with these facts."""

from __future__ import annotations

from typing import Any

from tierckpt.core import Found, FoundParity, Location
from tierckpt.format import (
    Lineage,
    Manifest,
    ParityKey,
    ShardKey,
    VersionFacts,
    VersionId,
    VersionName,
)

RUN = "5eed"


def facts_of(
    id_: VersionId,
    shards: int = 1,
    run_id: str = RUN,
    lineage: Lineage = ((1, 0),),
    job: str = "job",
    **more: Any,
) -> VersionFacts:
    more = {"iteration": id_.version, "iteration_counts": "calls", **more}
    return VersionFacts(job, run_id, id_, shards, lineage, **more)


def facts_named(name: VersionName, **more: Any) -> VersionFacts:
    return facts_of(name.id, name.shards, name.run_id, **more)


def found_at(
    key: ShardKey,
    place: Location,
    lineage: Lineage = ((1, 0),),
    run_id: str = "",
    created_seconds: float | None = None,
) -> Found:
    return Found(key, place, facts_of(key.id, key.shards, run_id, lineage), created_seconds)


def parity_at(
    key: ParityKey,
    place: Location,
    lineage: Lineage,
    run_id: str,
    group: tuple[int, ...],
    k: int,
    m: int,
) -> FoundParity:
    return FoundParity(key, place, facts_of(key.id, key.shards, run_id, lineage), group, k, m)


def manifest_of(
    key: ShardKey,
    image_bytes: int,
    header_bytes: int,
    digests: bytes,
    created_seconds: float = 0.0,
    **facts: Any,
) -> Manifest:
    made = facts_of(key.id, key.shards, **facts)
    return Manifest(made, key.shard, image_bytes, header_bytes, 0, digests, created_seconds)
