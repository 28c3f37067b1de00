"""Is a shard what its manifest says? Asked whenever it is to count as there somewhere else."""

from __future__ import annotations

from tierckpt.errors import CorruptShardError

from .block_digests import check
from .manifest import DIGEST_BYTES, Manifest
from .shard_file import decode_header


def verify_shard(manifest: Manifest, view: memoryview, what: str = "") -> None:
    """Raise CorruptShardError, or FormatError, unless `view` is, to the byte, the shard that
    `manifest` is about. `what` names it in the error."""
    what = what or str(manifest.key)
    head, digests = manifest.header_bytes, manifest.digests
    if len(view) != manifest.image_bytes:
        raise CorruptShardError(f"{what} has {len(view)} bytes, not {manifest.image_bytes}")
    if not view:
        return
    check(view[:head], [head], digests[:DIGEST_BYTES], what)
    header = decode_header(view[:head])
    check(view[head:], header.block_bytes, digests[DIGEST_BYTES:], what)


__all__ = ["verify_shard"]
