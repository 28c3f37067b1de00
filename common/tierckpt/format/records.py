"""Records: what is known of a version and of a run, as JSON with a checksum.

Pure. A record is a line of JSON and a line with its xxh3_128. Manifests of shards, of parity and
of versions are such records, as are the persistent level's records of its files. The same input
gives the same bytes, so two writers that finish a group at once write the same.

The facts of a version are all that a run knows before a byte is written, the same on every level.
They are taken at the boundary, travel with the snapshot, and are stored in the manifest of every
shard, in the manifest of parity, and in the version's record on the persistent level.

A run of a job has two records: the first is written when the run starts, the second when it ends;
a killed run has no second one. Nothing needs them to restore: they explain the history to people.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash
from msgspec import Struct, field
from msgspec.structs import asdict

from tierckpt._text import error_text
from tierckpt.errors import CorruptShardError, FormatError

from .ids import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    Lineage,
    ShardKey,
    VersionId,
    VersionName,
    check_version,
)

__all__ = ["ITERATION_COUNTS", "TRAINING_END", "RunEnd", "RunRecord", "VersionFacts"]


def head_of(kind: str) -> dict[str, str]:
    """Return the fields that every record starts with."""
    return {"format": f"tierckpt-{kind}", "format_version": f"{FORMAT_MAJOR}.{FORMAT_MINOR}"}


def check_head(values: Mapping[str, Any], kind: str, what: str) -> None:
    """Raise ValueError or KeyError for a record of another kind, FormatError for one too new."""
    if values["format"] != f"tierckpt-{kind}":
        raise ValueError(f"format is {values['format']!r}")
    check_version(values["format_version"], what)


def misfit(values: object, what: str, error: Exception) -> FormatError:
    """The error for intact bytes that cannot be read as `what`, because of `error`: `values`, if
    they are a record at all, lack a field or have another one, perhaps since their format has
    another version."""
    written = values.get("format_version") if isinstance(values, Mapping) else None
    ours = f"{FORMAT_MAJOR}.{FORMAT_MINOR}"
    why = f"it has no {error}" if isinstance(error, KeyError) else error_text(error)
    if written in (None, ours):
        return FormatError(f"not a {what}: {why}")
    return FormatError(
        f"this {what} has format version {written}, and {why}, so this tierckpt, which reads "
        f"{ours}, cannot use it. Export it with the tierckpt that wrote it (`tierckpt export "
        "PATH out.pt`), and import that here (`tierckpt import out.pt NEW_PATH`)"
    )


def with_check(text: bytes) -> bytes:
    """Return the record of a line of JSON."""
    return text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode() + b"\n"


def checked(data: bytes, what: str) -> bytes:
    """Read a record that `with_check` made. Raises CorruptShardError when the checksum differs."""
    text, _, check = data.partition(b"\n")
    if not check or with_check(text) != data:
        raise CorruptShardError(f"the {what} is truncated or damaged (checksum differs)")
    return text


ITERATION_COUNTS = ("calls", "steps")


class VersionFacts(Struct, frozen=True):
    """The facts of one version; equal on all ranks, except `metric`."""

    job: str
    run_id: str
    """Random name of the job's run, the same on all ranks: generations alone can meet again when
    runs did not see each other's nodes."""
    id: VersionId
    """The run's generation, and the number of completed optimizer steps."""
    shards: int
    """Number of the job's ranks."""
    lineage: Lineage
    """This generation and its ancestors, and the versions they started from."""
    iteration: int
    """The number that `restore()` returns; `iteration_counts` is its unit."""
    iteration_counts: str
    """`calls` of `step()` by the user's loop, or optimizer `steps`, where the loop calls no
    boundaries."""
    metric: float | None = None
    """The user's measure at the boundary, a finite number; known to rank 0 alone, and to all when
    the version is complete."""
    complete: VersionId | None = None
    """The newest version that was known to be on all ranks' disks when this one was taken."""
    suspect: str = ""
    """The difference between replicas, as text, that was known when this version was taken."""

    @property
    def name(self) -> VersionName:
        """The version's name on the persistent level."""
        return VersionName(self.id, self.shards, self.run_id)

    def key(self, shard: int) -> ShardKey:
        """The name of one of the version's shards."""
        return ShardKey(self.id, shard, self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a record, with the names of FORMAT.md."""
        values: dict[str, Any] = {
            "job": self.job,
            "run_id": self.run_id,
            "version": self.id.version,
            "generation": self.id.generation,
            "shards": self.shards,
            "lineage": self.lineage,
            "iteration": self.iteration,
            "iteration_counts": self.iteration_counts,
        }
        if self.metric is not None and math.isfinite(self.metric):
            values["metric"] = self.metric
        if self.complete is not None:
            values["complete"] = (self.complete.generation, self.complete.version)
        if self.suspect:
            values["suspect"] = self.suspect
        return values

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> VersionFacts:
        """Read the fields that `to_json` made; ignore others. Raises KeyError, ValueError or
        TypeError if they are not a record of a version."""
        metric, complete = values.get("metric"), values.get("complete")
        if values["iteration_counts"] not in ITERATION_COUNTS:
            raise ValueError(f"iteration_counts is {values['iteration_counts']!r}")
        return VersionFacts(
            job=str(values["job"]),
            run_id=str(values["run_id"]),
            id=VersionId(int(values["generation"]), int(values["version"])),
            shards=int(values["shards"]),
            lineage=tuple((int(g), int(v)) for g, v in values["lineage"]),
            iteration=int(values["iteration"]),
            iteration_counts=values["iteration_counts"],
            metric=None if metric is None else float(metric),
            complete=None if complete is None else VersionId(*map(int, complete)),
            suspect=str(values.get("suspect", "")),
        )


def seal(kind: str, values: Mapping[str, Any]) -> bytes:
    """Return `values` as a record of `kind` with its checksum."""
    whole = {**head_of(kind), **values}
    return with_check(json.dumps(whole, separators=(",", ":"), sort_keys=True).encode())


def unseal(kind: str, data: bytes) -> dict[str, Any]:
    """Read a record that `seal` made; the bytes after it must be zeros.

    Raises CorruptShardError when the checksum does not match, FormatError when the bytes are intact
    but of another kind or of a newer major version.
    """
    text = checked(data.rstrip(b"\0"), f"{kind} record")
    values: dict[str, Any] = {}
    try:
        values = json.loads(text)
        check_head(values, kind, f"{kind} record")
    except (ValueError, KeyError, TypeError) as error:
        raise misfit(values, f"{kind} record", error) from error
    return values


def fingerprint(data: bytes) -> str:
    """Return the checksum of a small record, as text."""
    return xxhash.xxh3_128_hexdigest(data)


class ShardRecord(Struct, frozen=True):
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
        raise misfit(values, f"{kind} record", error) from error
    return {r.shard: r for r in found}


class VersionManifest(Struct, frozen=True):
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
    """Unix time of the seal of shard 0; None if unknown."""

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
            raise misfit(values, "version record", error) from error


def _name(stem: str) -> VersionName:
    found = VersionName.parse(stem)
    if found is None:
        raise ValueError(f"{stem!r} names no version")
    return found


FACTS = (
    "host",
    "user",
    "launcher",
    "command",
    "git",
    "best",
    "events",
    "traces",
    "persistent",
)
"""Facts that are one text each."""
TRAINING_END = "the training's end"
"""The reason of an end without a request: the training has made its last step."""


class RunRecord(Struct, frozen=True):
    """One run. Unknown facts are empty."""

    run_id: str
    generation: int
    started_from: VersionId | None = None
    """The version of this job that it restored; None: it started without one."""
    fork: str = ""
    """The version of another job that it started from, `PATH@v40`; empty: none."""
    started_seconds: float = 0.0
    """Unix time, by the clock of the node that wrote the record."""
    ranks: int = 1
    nodes: int = 1
    host: str = ""
    user: str = ""
    launcher: str = ""
    """The launcher's name, perhaps with its own name for the launch."""
    command: str = ""
    """SHA-256 of the script's path and arguments, each with a zero byte at its end."""
    git: str = ""
    """The commit of the repository that contains the script."""
    best: str = ""
    """Whether the lowest or the highest metric is the best, as the settings say which to keep."""
    events: str = ""
    """The setting `events_dir`, absolute, for commands that read events."""
    traces: str = ""
    """The setting `trace_dir`, absolute."""
    persistent: str = ""
    """Directory or URL of the job's persistent level; empty: it has none."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Versions by name: of Python, tierckpt, torch, and frameworks in use."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the record, with the names of FORMAT.md."""
        start = self.started_from
        values: dict[str, Any] = {
            "run_id": self.run_id,
            "generation": self.generation,
            "began": start and (start.generation, start.version),
            "fork": self.fork,
            "started_seconds": self.started_seconds,
            "ranks": self.ranks,
            "nodes": self.nodes,
        }
        values |= {name: getattr(self, name) for name in FACTS}
        return {**values, "software": dict(self.software)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RunRecord:
        """Read the fields that `to_json` made; ignore others. Raises KeyError, ValueError or
        TypeError if they are not a record of a run."""
        started_from = values["began"]
        return RunRecord(
            run_id=str(values["run_id"]),
            generation=int(values["generation"]),
            started_from=None if started_from is None else VersionId(*map(int, started_from)),
            fork=str(values.get("fork", "")),
            started_seconds=float(values["started_seconds"]),
            ranks=int(values["ranks"]),
            nodes=int(values["nodes"]),
            **{name: str(values.get(name, "")) for name in FACTS},
            software={str(k): str(v) for k, v in dict(values.get("software", {})).items()},
        )


class RunEnd(Struct, frozen=True):
    """The end of a run, as one of its ranks noted it."""

    run_id: str
    ended_seconds: float
    """Unix time, by the clock of the rank's node."""
    reason: str
    """Why the training ended, as text: `the training's end`, a signal, or an error's type."""
    rank: int = 0
    failed: bool = False
    """An error ended the training on this rank."""
    version: int = 0
    """The last version that this rank took, or started with."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the record, with the names of FORMAT.md."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RunEnd:
        """Read the fields that `to_json` made; ignore others. Raises KeyError, ValueError or
        TypeError if they are not a record of an end."""
        return RunEnd(
            run_id=str(values["run_id"]),
            ended_seconds=float(values["ended_seconds"]),
            reason=str(values["reason"]),
            rank=int(values.get("rank", 0)),
            failed=bool(values.get("failed", False)),
            version=int(values.get("version", 0)),
        )
