"""Version records: the persistent level's records of shards, of groups and of versions. Pure.

Every record is a line of JSON and a line with its xxh3_128, like the shards' own manifests. The
same input gives the same bytes, so two writers that finish a group at once write the same.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from . import checksummed_json
from .facts import VersionFacts
from .version_names import VersionName


def seal(kind: str, values: Mapping[str, Any]) -> bytes:
    """Return `values` as a record of `kind` with its checksum."""
    whole = {**checksummed_json.head_of(kind), **values}
    return checksummed_json.with_check(
        json.dumps(whole, separators=(",", ":"), sort_keys=True).encode()
    )


def unseal(kind: str, data: bytes) -> dict[str, Any]:
    """Read a record that `seal` made; the bytes after it must be zeros.

    Raises CorruptShardError when the checksum does not match, FormatError when the bytes are intact
    but of another kind or of a newer major version.
    """
    text = checksummed_json.checked(data.rstrip(b"\0"), f"{kind} record")
    values: dict[str, Any] = {}
    try:
        values = json.loads(text)
        checksummed_json.check_head(values, kind, f"{kind} record")
    except (ValueError, KeyError, TypeError) as error:
        raise checksummed_json.misfit(values, f"{kind} record", error) from error
    return values


def fingerprint(data: bytes) -> str:
    """Return the checksum of a small record, as text."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class ShardRecord:
    """The place of one shard's bytes, and the checksum of the stored bytes."""

    shard: int
    file: str
    """Name in the version's folder."""
    offset: int
    nbytes: int
    digest: str
    """xxh3_128 of the stored bytes, in hexadecimal digits."""
    manifest: bytes
    """The shard's own manifest; the store does not read it."""
    base: str = ""
    """Stem of the version that the shard refers to; empty: none."""

    def as_row(self) -> list[Any]:
        """Return the row for a record."""
        text = base64.b64encode(self.manifest).decode()
        row: list[Any] = [self.shard, self.file, self.offset, self.nbytes, self.digest, text]
        return [*row, self.base] if self.base else row

    @staticmethod
    def from_row(row: list[Any]) -> ShardRecord:
        """Read a row that `as_row` made. Raises ValueError or TypeError."""
        shard, file, offset, nbytes, digest, text, *rest = row
        (base,) = rest or [""]
        manifest = base64.b64decode(text)
        where = (int(shard), str(file), int(offset), int(nbytes), str(digest))
        return ShardRecord(*where, manifest, str(base))


def encode_shards(kind: str, records: Iterable[ShardRecord]) -> bytes:
    """Return a record of several shards, in the order of their numbers."""
    rows = [r.as_row() for r in sorted(records, key=lambda r: r.shard)]
    return seal(kind, {"shards": rows})


def decode_shards(kind: str, data: bytes) -> dict[int, ShardRecord]:
    """Read a record that `encode_shards` made, by shard number. Raises as `unseal`."""
    values = unseal(kind, data)
    try:
        found = [ShardRecord.from_row(row) for row in values["shards"]]
    except (KeyError, ValueError, TypeError) as error:
        raise checksummed_json.misfit(values, f"{kind} record", error) from error
    return {r.shard: r for r in found}


@dataclass(frozen=True)
class VersionManifest:
    """The record, written last, that makes a version exist."""

    facts: VersionFacts
    largest_bytes: int
    """Length of the version's longest shard. The ranks agree on it (a maximum over all ranks)."""
    per_group: int
    groups: tuple[tuple[str, str], ...]
    """File name of every group's record and its fingerprint, by number."""
    nbytes: int
    """Size of all shards together."""
    bases: tuple[VersionName, ...] = ()
    """Versions that a shard refers to, in order."""
    created_seconds: float | None = None
    """Unix time of the seal of shard 0; None if that is unknown."""

    @property
    def name(self) -> VersionName:
        """The version's name."""
        return self.facts.name

    def encode(self) -> bytes:
        """Return the file's content."""
        values = {
            **self.facts.to_json(),
            "largest_bytes": self.largest_bytes,
            "shards_per_group": self.per_group,
            "groups": self.groups,
            "total_bytes": self.nbytes,
        }
        if self.created_seconds is not None:
            values["created_seconds"] = self.created_seconds
        if self.bases:
            values["bases"] = [name.stem for name in self.bases]
        return seal("version", values)

    @staticmethod
    def decode(data: bytes) -> VersionManifest:
        """Read the content that `encode` made. Raises as `unseal`."""
        values = unseal("version", data)
        try:
            created = values.get("created_seconds")
            return VersionManifest(
                facts=VersionFacts.from_json(values),
                largest_bytes=int(values["largest_bytes"]),
                per_group=int(values["shards_per_group"]),
                groups=tuple((str(n), str(f)) for n, f in values["groups"]),
                nbytes=int(values["total_bytes"]),
                bases=tuple(_name(stem) for stem in values.get("bases", ())),
                created_seconds=None if created is None else float(created),
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise checksummed_json.misfit(values, "version record", error) from error


def _name(stem: str) -> VersionName:
    found = VersionName.parse(stem)
    if found is None:
        raise ValueError(f"{stem!r} names no version")
    return found
