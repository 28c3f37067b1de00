"""Format: the bytes that FORMAT.md describes. Pure: values and bytes, no input or output."""

from __future__ import annotations

from .ids import FORMAT_MAJOR, GROUP, MANIFEST, PAGE_BYTES, PART_BYTES, RETIRED, SHARDS, Groups
from .ids import Lineage, ParityKey, ShardKey, SharedPlaces, VersionId, VersionName, check_version
from .ids import newest_first, on_lineage, parse_run, round_up, run_name
from .layout import BLOCK_BYTES, PER_RANK, REPLICATED, UNIT_BYTES, Layout, Piece, TensorSpec
from .layout import plan_layout, stripes
from .manifest import DIGEST_BYTES, Buffer, Encoding, Manifest, Parameter, check, digest, digests_of
from .manifest import parity_blocks, verify_shard
from .records import ITERATION_COUNTS, RunEnd, RunRecord, ShardRecord, VersionFacts, VersionManifest
from .records import decode_shards, encode_shards, seal, unseal, with_check
from .shard_file import RANK_STATE, RankState, ShardHeader, ShardSummary, VersionSummary
from .shard_file import counts, decode_header, encode_header, encode_table, lacking
