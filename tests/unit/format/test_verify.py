"""Verification finds a changed byte in every part of a shard."""

from __future__ import annotations

import pytest

from tests.support.facts import manifest_of
from tierckpt.errors import CorruptShardError
from tierckpt.format import (
    ShardKey,
    TensorSpec,
    VersionId,
    decode_header,
    digests_of,
    encode_header,
    plan_layout,
    verify_shard,
)

NAME = b"layer.weight"


def test_a_changed_byte_is_found_in_the_header_and_in_the_data() -> None:
    spec = TensorSpec(NAME.decode(), "float32", (64, 64), None, 4, "cpu")
    header, data_bytes = encode_header(plan_layout([spec], [], 0, 1), 64, {})
    image = bytearray(header + bytes(data_bytes))
    blocks = decode_header(image).block_bytes
    digests = digests_of(memoryview(image), [len(header), *blocks])
    key = ShardKey(VersionId(1, 1), 0, 1)
    manifest = manifest_of(key, len(image), len(header), digests)
    verify_shard(manifest, memoryview(image))
    for at in (image.index(NAME), len(header), len(image) - 1):
        image[at] ^= 1
        decode_header(image)  # the header has the form of one all the same
        with pytest.raises(CorruptShardError, match="differ from their checksum"):
            verify_shard(manifest, memoryview(image))
        image[at] ^= 1
