"""Suite for every codec (`tierckpt.codecs.codec.Codec`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tierckpt.codecs.codec import BlockId, Codec, CodecError
from tierckpt.errors import CorruptShardError

PLACE = BlockId("job", "5eed", 1, 8, 0, 2, 3)
"""Identity of the blocks in these tests; item sizes vary."""
MOST_GROWTH = 1 << 26
"""Limit of the bytes decoded from a damaged block, however small."""


def noise(nbytes: int) -> bytes:
    """Bytes that cannot be compressed; the same every time."""
    return hashlib.shake_128(b"noise").digest(nbytes)


BLOCKS = {
    "nothing": b"",
    "one byte": b"\x07",
    "odd": noise(12_345),
    "noise": noise(1 << 19),
    "zeros": bytes(1 << 19),
    "numbers": b"".join((1000 + i % 91).to_bytes(4, "little") for i in range(1 << 17)),
}


class CodecConformance:
    """Subclass it and define how to make the codec; pytest finds the rest."""

    def make_codec(self) -> Codec:
        """A new codec, with parameters that differ from the defaults, if it has any."""
        raise NotImplementedError

    @pytest.fixture
    def codec(self) -> Codec:
        """The codec under test."""
        return self.make_codec()

    @pytest.fixture(params=BLOCKS)
    def block(self, request: pytest.FixtureRequest) -> bytes:
        """One of many contents."""
        return BLOCKS[request.param]

    @pytest.mark.parametrize("item_bytes", [1, 2, 4, 8, 16])
    def test_an_encoded_block_is_decoded_to_the_byte(
        self, codec: Codec, block: bytes, item_bytes: int
    ) -> None:
        """Another instance can decode, which has only the public parameters and no item size."""
        stored = bytes(codec.encode(memoryview(block), replace(PLACE, item_bytes=item_bytes)))
        reader = type(codec)(**codec.parameters())
        assert bytes(reader.decode(memoryview(stored), PLACE)) == block
        assert bytes(codec.decode(stored, PLACE)) == block

    def test_it_is_not_empty_and_not_longer_than_promised(self, codec: Codec, block: bytes) -> None:
        """Length 0 has another meaning, and writers choose offsets before lengths are known."""
        stored = codec.encode(block, PLACE)
        assert 0 < len(stored) <= len(block) + codec.most_extra_bytes

    def test_the_block_belongs_to_the_caller(self, codec: Codec) -> None:
        """The codec neither changes nor keeps it: the caller overwrites it at once."""
        content = BLOCKS["numbers"]
        buffer = bytearray(content)
        with memoryview(buffer) as view:
            stored = bytes(codec.encode(view, PLACE))
        assert buffer == content
        buffer[:] = bytes(len(buffer))
        assert bytes(codec.decode(stored, PLACE)) == content

    def test_parameters_are_public_and_fit_into_a_manifest(self, codec: Codec) -> None:
        """It also has a name that settings can use."""
        found = dict(codec.parameters())
        assert json.loads(json.dumps(found)) == found
        assert codec.name
        assert not set(codec.name) & set(" ,=")

    def test_threads_may_share_it(self, codec: Codec) -> None:
        """Each thread gets its own block back."""
        contents = [noise(1000 + i) * 20 for i in range(32)]

        def there_and_back(content: bytes) -> bytes:
            return bytes(codec.decode(codec.encode(content, PLACE), PLACE))

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(there_and_back, contents)) == contents

    def test_damage_is_no_disaster(self, codec: Codec) -> None:
        """Damage is reported, or gives a harmless result; no other error, and bounded memory."""
        stored = bytes(codec.encode(BLOCKS["numbers"], PLACE))
        chance = random.Random(0)
        for _ in range(200):
            damaged = bytearray(stored)
            if chance.random() < 0.3:
                del damaged[chance.randrange(1, len(damaged)) :]
            for _ in range(chance.randrange(1, 4)):
                damaged[chance.randrange(min(len(damaged), 64))] ^= 1 << chance.randrange(8)
            with contextlib.suppress(CorruptShardError):
                assert len(codec.decode(bytes(damaged), PLACE)) <= MOST_GROWTH

    def test_a_codec_that_claims_to_encrypt_is_tested_for_it(self, codec: Codec) -> None:
        """Encryption has to pass `HidingConformance`, too."""
        assert codec.hides == isinstance(self, HidingConformance)


class HidingConformance(CodecConformance):
    """Additional suite for encryption."""

    def test_an_encrypting_codec_hides_the_content(self, codec: Codec) -> None:
        """The same block is stored in two different ways, which reveal nothing of it. Each can be
        decoded in its own place only, and any change is detected."""
        content = BLOCKS["numbers"]
        once, again = (bytes(codec.encode(content, PLACE)) for _ in range(2))
        assert once != again
        assert not any(content[i : i + 8] in once for i in range(0, 4096, 8))
        for place in (
            replace(PLACE, index=4),
            replace(PLACE, shard=1),
            replace(PLACE, version=9),
            replace(PLACE, run_id="5eee"),
            replace(PLACE, job="another"),
        ):
            with pytest.raises((CorruptShardError, CodecError)):
                codec.decode(once, place)
        for at in (0, len(once) // 2, len(once) - 1):
            changed = bytearray(once)
            changed[at] ^= 1
            with pytest.raises(CorruptShardError):
                codec.decode(bytes(changed), PLACE)
