"""Decoding of a shard: stored blocks in, plain blocks out, in any order, by any thread."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.encoding import Buffer, Encoding
from tierckpt.format.ids import ShardKey
from tierckpt.format.manifest import DIGEST_BYTES, Manifest, digest, digest_at

from .encoder import where
from .pipeline import Pipeline

Read = Callable[[int, int], bytes]
"""`read(offset, nbytes)`: a range of a stored shard; shorter where it ends. Any thread."""
OpenOther = Callable[[ShardKey], tuple[Manifest, Read]]
"""Opens the same shard of another version on the same level."""


class Decoder:
    """One encoded shard. Any thread may ask for blocks; each call holds one in memory."""

    def __init__(self, manifest: Manifest, read: Read, open_other: OpenOther) -> None:
        """Read the sealed manifest, which also proves that codecs and keys are the right ones.

        Raises the errors of `read` and `open_other`; CodecError; CorruptShardError or FormatError
        when the stored bytes do not match the manifests.
        """
        self._manifest, self._read = manifest, read
        self.encoding = _encoding_of(manifest)
        self._pipeline = Pipeline.of_description(self.encoding.codecs)
        self._base = self._open_base(open_other)
        self.sealed_bytes = bytes(self._block(len(self.encoding.plain_bytes)))
        """The manifest that the shard was sealed with."""
        self.sealed = Manifest.decode(self.sealed_bytes)
        total = self.encoding.plain_offsets[-1]
        if (self.sealed.key, self.sealed.facts.run_id, self.sealed.image_bytes) != (
            manifest.key,
            manifest.facts.run_id,
            total,
        ):
            raise CorruptShardError(f"{manifest.key} has the sealed manifest of another shard")

    @property
    def hides(self) -> bool:
        """True when the shard is encrypted."""
        return self._pipeline.hides

    def _open_base(self, open_other: OpenOther) -> Decoder | None:
        key = self._manifest.key
        other = self.encoding.base_of(key)
        if other is None:
            return None
        base, read = open_other(other)
        theirs = _encoding_of(base)
        if (base.key, base.facts.run_id, theirs.base) != (other, self._manifest.facts.run_id, None):
            raise FormatError(f"{key} refers to {other}, which cannot be its base")
        if theirs.plain_bytes != self.encoding.plain_bytes:
            raise FormatError(f"{key} refers to {other}, which has blocks of other lengths")
        try:
            return Decoder(base, read, open_other)
        except CorruptShardError as error:
            raise self._refers_to(error) from error

    def _refers_to(self, error: Exception) -> CorruptShardError:
        base = self.encoding.base_of(self._manifest.key)
        return CorruptShardError(f"{self._manifest.key} refers to {base}: {error}")

    def block(self, index: int) -> Buffer:
        """One block of the image. Raises as the constructor does."""
        if self._base is not None and not self.encoding.stored_bytes[index]:
            if self._base._digest(index) != self._digest(index):
                raise CorruptShardError(f"block {index} of {self._base._manifest.key} was replaced")
            block = self._of_base(self._base, index)
        else:
            block = self._block(index)
        nbytes = self.encoding.plain_bytes[index]
        if len(block) != nbytes:
            raise CorruptShardError(
                f"block {index} of {self._manifest.key} has {len(block)} bytes, not {nbytes}"
            )
        size = self.encoding.differences.get(index)
        if self._base is not None and size is not None:
            from .difference import undone

            block = undone(block, self._of_base(self._base, index), size)
        return block

    def _of_base(self, base: Decoder, index: int) -> Buffer:
        try:
            return base.block(index)
        except CorruptShardError as error:
            raise self._refers_to(error) from error

    def blocks(self) -> Iterator[Buffer]:
        """All blocks of the image, in order."""
        return (self.block(index) for index in range(len(self.encoding.plain_bytes)))

    def bring(self, low: int, high: int, into: memoryview) -> None:
        """Put bytes `[low, high)` of the image, and the rest of their blocks, into `into`, which
        has the size of the image."""
        begins = self.encoding.plain_offsets
        for index in range(bisect_right(begins, low) - 1, len(begins) - 1):
            if begins[index] >= high:
                break
            into[begins[index] : begins[index + 1]] = self.block(index)

    def _block(self, index: int) -> Buffer:
        """A block stored in this shard; the one after the image's blocks is the sealed manifest."""
        stored = stored_block(self._manifest, self.encoding, self._read, index)
        return self._pipeline.decode(stored, where(self._manifest, index))

    def _digest(self, index: int) -> bytes:
        return digest_at(self._manifest.digests, index)


def check_stored(manifest: Manifest, read: Read) -> int:
    """Compare the stored bytes of an encoded shard with their digests; returns their number. This
    needs neither codecs nor keys, and does not prove that decoding would succeed.

    Raises the errors of `read`; CorruptShardError and FormatError.
    """
    encoding = _encoding_of(manifest)
    for index, nbytes in enumerate(encoding.stored_bytes):
        if nbytes:  # else it is stored in another version, which has its own digests
            stored_block(manifest, encoding, read, index)
    return manifest.image_bytes


def stored_block(manifest: Manifest, encoding: Encoding, read: Read, index: int) -> bytes:
    """One block as it is stored. Raises as `check_stored`."""
    begin, nbytes = encoding.offsets[index], encoding.stored_bytes[index]
    stored = read(begin, nbytes)
    if len(stored) != nbytes:
        raise CorruptShardError(f"{manifest.key} is truncated: no bytes at {begin + len(stored)}")
    if digest(stored) != digest_at(manifest.digests, index):
        raise CorruptShardError(
            f"stored bytes {begin} to {begin + nbytes} of {manifest.key} differ from their checksum"
        )
    return stored


def _encoding_of(manifest: Manifest) -> Encoding:
    if manifest.encoding is None:
        raise FormatError(f"{manifest.key} is not encoded")
    count = len(manifest.encoding.stored_bytes)
    if len(manifest.digests) != count * DIGEST_BYTES:
        raise FormatError(f"{manifest.key} has {len(manifest.digests)} bytes of digests")
    return manifest.encoding
