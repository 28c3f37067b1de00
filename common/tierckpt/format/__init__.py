"""Format: the bytes that FORMAT.md describes. Pure: values and bytes, no input or output."""

from __future__ import annotations

from .ids import (
    FORMAT_MAJOR,
    PAGE_BYTES,
    ParityKey,
    ShardKey,
    VersionId,
    VersionName,
    newest_first,
    on_lineage,
    parse_run,
    run_name,
)
from .layout import (
    BLOCK_BYTES,
    PER_RANK,
    REPLICATED,
    UNIT_BYTES,
    Layout,
    Piece,
    TensorSpec,
    plan_layout,
)
from .manifest import DIGEST_BYTES, Manifest, digest
from .records import RunEnd, RunRecord, VersionFacts

__all__ = [
    "BLOCK_BYTES",
    "DIGEST_BYTES",
    "FORMAT_MAJOR",
    "PAGE_BYTES",
    "PER_RANK",
    "REPLICATED",
    "UNIT_BYTES",
    "Layout",
    "Manifest",
    "ParityKey",
    "Piece",
    "RunEnd",
    "RunRecord",
    "ShardKey",
    "TensorSpec",
    "VersionFacts",
    "VersionId",
    "VersionName",
    "digest",
    "newest_first",
    "on_lineage",
    "parse_run",
    "plan_layout",
    "run_name",
]
