"""The manifest of a parity file."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from functools import cached_property

from msgspec import Struct
from msgspec.structs import asdict

from tierckpt.format.ids import ParityKey
from tierckpt.format.manifest import DIGEST_BYTES, Manifest, parity_blocks
from tierckpt.format.records import VersionFacts, misfit, seal, unseal

from .codes import Code, Stripes


class ParityManifest(Struct, frozen=True, dict=True):
    """Facts about one parity file."""

    facts: VersionFacts
    """Those in the manifest of the shard that it lies beside."""
    shard: int
    """Number of the shard of the member that stores the parity."""
    k: int
    m: int
    group: tuple[int, ...]
    """The members' shard numbers, in the order of the ring."""
    segment_bytes: int
    image_bytes: int
    digests: bytes
    """xxh3_64 of every block of BLOCK_BYTES; the last block may be shorter."""
    members: tuple[str, ...]
    """The encoded manifest of each member's shard, in the order of the ring."""
    created_seconds: float

    @staticmethod
    def of(shards: Sequence[Manifest], code: Code, member: int, digests: bytes) -> ParityManifest:
        """Manifest of the parity that `member` stores; `shards` are the members', on the ring."""
        own = shards[member]
        stripes = Stripes(code, tuple(shard.image_bytes for shard in shards))
        return ParityManifest(
            own.facts,
            own.shard,
            code.k,
            code.m,
            tuple(shard.shard for shard in shards),
            stripes.segment_bytes,
            stripes.parity_bytes,
            digests,
            tuple(shard.encode().decode() for shard in shards),
            time.time(),
        )

    @property
    def key(self) -> ParityKey:
        """Name of the parity."""
        return ParityKey(self.facts.id, self.shard, self.facts.shards)

    @property
    def member(self) -> int:
        """The member, on the ring, that stores the parity."""
        return self.group.index(self.shard)

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        """Manifests of the members' shards, on the ring."""
        return tuple(Manifest.decode(text.encode()) for text in self.members)

    @cached_property
    def stripes(self) -> Stripes:
        """The code, over the members' shards."""
        code = Code(len(self.group), self.k, self.m)
        return Stripes(code, tuple(shard.image_bytes for shard in self.manifests))

    def encode(self) -> bytes:
        """Encode as a line of JSON, and a line with its xxh3_128."""
        own = asdict(self)
        del own["facts"]
        digests = base64.b64encode(self.digests).decode()
        return seal("parity", {**self.facts.to_json(), **own, "digests": digests})

    @staticmethod
    def decode(data: bytes) -> ParityManifest:
        """The inverse of `encode`.

        Raises CorruptShardError when the bytes do not match their own checksum, FormatError when
        they are intact but no parity manifest, of a newer major version, or contradictory.
        """
        values = unseal("parity", data)
        try:
            values["digests"] = base64.b64decode(values["digests"])
            values["facts"] = VersionFacts.from_json(values)
            values["group"], values["members"] = tuple(values["group"]), tuple(values["members"])
            made = ParityManifest(
                **{name: values[name] for name in ParityManifest.__struct_fields__}
            )
            made._check()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise misfit(values, "parity manifest", error) from error
        return made

    def _check(self) -> None:
        for number, shard in zip(self.group, self.manifests, strict=True):
            if (shard.shard, shard.facts.name) != (number, self.facts.name):
                run_id = shard.facts.run_id
                raise ValueError(f"{shard.key} of run {run_id} is no member of {self.key}")
        found = (self.segment_bytes, self.image_bytes, len(self.digests))
        length = self.stripes.parity_bytes
        blocks = DIGEST_BYTES * len(parity_blocks(length))
        if self.shard not in self.group or found != (self.stripes.segment_bytes, length, blocks):
            raise ValueError(f"lengths {found} do not follow from the members' shards")


__all__ = ["ParityManifest"]
