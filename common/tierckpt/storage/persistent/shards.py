"""A version's shards in a store: shared files, or files per writer and group, or objects in parts;
and ranged reads of one shard.

In every layout a shard has a record, durable only after the shard. So valid records of a
whole group prove that the group is durable, whoever wrote it.

Parts: one shard is many objects of an object store, which are sent at the same time. A multipart
upload would make one object of them. But a killed writer leaves an upload that no listing of
objects shows, billed until somebody finds it. Parts that are objects lie in the version's folder
and go with it, each is repeated alone after an error, and every store has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

import xxhash
from msgspec import Struct

from tierckpt.errors import CorruptShardError, FlushCancelledError, FormatError, PersistentError
from tierckpt.format.ids import (
    PART_BYTES,
    PARTS,
    SHARDS,
    Groups,
    SharedPlaces,
    VersionName,
    parse_run,
    part_name,
    parts_name,
    run_name,
)
from tierckpt.format.records import ShardRecord, decode_shards, encode_shards

from .backend import WINDOW_BYTES, Backend, Content

__all__ = ["is_in_parts", "read_parts", "read_parts_into", "stored_bytes", "write_parts"]


PARTS_AT_ONCE = 8
"""Parts that are under way at once, over a connection each. More than these and the next one are
never in memory."""


def write_parts(backend: Backend, path: str, windows: Iterator[memoryview]) -> None:
    """Make the bytes of `windows` durable as parts of `path`. Raises the first error of a part, or
    of `windows`; no part is under way then any more."""
    with ThreadPoolExecutor(PARTS_AT_ONCE, "tierckpt-parts") as pool:
        under_way: set[Future[None]] = set()
        try:
            for number, part in enumerate(_cut_in_parts(windows)):
                if len(under_way) == PARTS_AT_ONCE:
                    under_way = _after_one(under_way)
                name = f"{path}/{part_name(number)}"
                under_way.add(pool.submit(_put_part, backend, name, part))
            while under_way:
                under_way = _after_one(under_way)
        except BaseException:
            for future in under_way:
                future.cancel()
            raise


def _put_part(backend: Backend, name: str, part: list[memoryview]) -> None:
    backend.put(name, lambda: map(memoryview, part), sum(map(len, part)))


def _after_one(under_way: set[Future[None]]) -> set[Future[None]]:
    """Wait until a part is durable; returns the others. Raises its error."""
    done, left = wait(under_way, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return left


def _cut_in_parts(windows: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Gather windows to parts, each of PART_BYTES, except the last."""
    part: list[memoryview] = []
    room = PART_BYTES
    for window in windows:
        while len(window) >= room:
            yield [*part, window[:room]]
            window, part, room = window[room:], [], PART_BYTES
        if len(window):
            part.append(window)
            room -= len(window)
    if part:
        yield part


def is_in_parts(path: str) -> bool:
    """True for the path of a shard in parts."""
    return path.endswith(PARTS)


def stored_bytes(backend: Backend, path: str) -> int:
    """Length of the file, or of the parts that exist without a gap. FileNotFoundError without the
    file; zero without parts."""
    if not is_in_parts(path):
        return backend.size(path)
    found, number, nbytes = backend.sizes(path), 0, 0
    while (length := found.get(part_name(number))) is not None:
        number, nbytes = number + 1, nbytes + length
        if length != PART_BYTES:
            break
    return nbytes


def read_parts(backend: Backend, path: str, offset: int, nbytes: int) -> bytes:
    """A range of a file or of a shard in parts; shorter where that ends."""
    if not is_in_parts(path):
        return backend.read(path, offset, nbytes)
    into = bytearray(nbytes)
    with memoryview(into) as view:
        done = read_parts_into(backend, path, offset, view)
    return bytes(into[:done])


def read_parts_into(backend: Backend, path: str, offset: int, into: memoryview) -> int:
    """Read a range into `into`; returns the number of bytes read."""
    if not is_in_parts(path):
        return backend.read_into(path, offset, into)
    done = 0
    while done < len(into):
        number, start = divmod(offset + done, PART_BYTES)
        end = min(len(into), done + PART_BYTES - start)
        got = backend.read_into(f"{path}/{part_name(number)}", start, into[done:end])
        done += got
        if done < end:
            break
    return done


FOOTER_BYTES = 1 << 16
"""Bytes of a file's end that are read first; usually they contain all records."""

_TAIL = b"TCKPPART"


class Source(Protocol):
    """One shard to be stored, window by window."""

    @property
    def shard(self) -> int:
        """Number of the shard."""
        ...

    @property
    def most_bytes(self) -> int:
        """Upper bound of its length."""
        ...

    def windows(self) -> Iterator[memoryview]:
        """The windows of the shard, from the first at every call; each is at most WINDOW_BYTES
        long, and its bytes do not change."""
        ...

    @property
    def still_sealed(self) -> Callable[[], bool]:
        """Called after the last window; False means that the bytes changed while they were read."""
        ...

    @property
    def manifest(self) -> bytes:
        """The manifest stored with the shard; valid after the last window."""
        ...

    @property
    def base(self) -> VersionName | None:
        """The version that the shard refers to, which must not be removed before it; valid after
        the last window."""
        ...

    def is_stored_as(self, record: ShardRecord) -> bool:
        """True if the record of an earlier attempt describes the same shard."""
        ...


class ShardSource(Struct, frozen=True):
    """A shard in memory. The caller owns the memory, which must not change during a flush."""

    shard: int
    image: memoryview
    manifest: bytes
    still_sealed: Callable[[], bool] = lambda: True
    """See `Source.still_sealed`."""
    base: VersionName | None = None
    """None: the shard refers to no other version."""

    @property
    def most_bytes(self) -> int:
        """Length of the shard."""
        return len(self.image)

    def windows(self) -> Iterator[memoryview]:
        """See `Source.windows`."""
        for offset in range(0, len(self.image), WINDOW_BYTES):
            yield self.image[offset : offset + WINDOW_BYTES]

    def is_stored_as(self, record: ShardRecord) -> bool:
        """See `Source.is_stored_as`."""
        return (record.manifest, record.nbytes) == (self.manifest, len(self.image))


class GroupFiles(Protocol):
    """Files of a version's shards, while it is being made."""

    def runs(self, shards: Sequence[int]) -> Iterator[range]:
        """Divide a writer's shards into the portions of `write`."""
        ...

    def write(self, sources: Sequence[Source], pacer: Callable[[int], None]) -> int:
        """Make one run's shards durable, then their records; returns the shards' bytes."""
        ...

    def stored(self, run: range) -> dict[int, ShardRecord]:
        """Records of a run's durable shards, by shard, left by an earlier attempt of its writer."""
        ...

    def whole(self, group: int) -> dict[int, ShardRecord] | None:
        """Records of all shards of the group, if the files are as long as the records say; None if
        any is missing."""
        ...


def parts_of(backend: Backend, name: VersionName, groups: Groups, largest_bytes: int) -> GroupFiles:
    """Shared files if the backend supports them, else one part per writer and group."""
    if backend.shared_writes:
        return SharedGroupFile(backend, name, groups, largest_bytes)
    return WriterGroupFiles(backend, name, groups)


class Stream:
    """One pass over a shard's bytes, with rate limit and hashing."""

    def __init__(self, source: Source, pacer: Callable[[int], None]) -> None:
        self.source, self._pacer = source, pacer
        self.nbytes, self.digest = 0, ""
        """Digest of all windows, after the last one was requested."""

    def windows(self) -> Iterator[memoryview]:
        """The windows of the shard; from the first at every call."""
        found, nbytes = xxhash.xxh3_128(), 0
        for window in self.source.windows():
            self._pacer(len(window))
            found.update(window)
            nbytes += len(window)
            if nbytes > self.source.most_bytes:  # the next range belongs to another writer
                raise RuntimeError(f"shard {self.source.shard} is longer than announced")
            yield window
        if not self.source.still_sealed():
            raise FlushCancelledError(
                f"the slot of shard {self.source.shard} was refilled while it was written"
            )
        self.nbytes, self.digest = nbytes, found.hexdigest()

    def record(self, file: str, offset: int) -> ShardRecord:
        """Record of the complete stream."""
        s = self.source
        base = s.base.stem if s.base else ""
        return ShardRecord(s.shard, file, offset, self.nbytes, self.digest, s.manifest, base)


def _check_stored(backend: Backend, path: str, offset: int, nbytes: int, digest: str) -> None:
    """Read stored bytes back. Raises CorruptShardError if they do not match `digest`."""
    found, end = xxhash.xxh3_128(), offset + nbytes
    for start in range(offset, end, WINDOW_BYTES):
        found.update(read_parts(backend, path, start, min(WINDOW_BYTES, end - start)))
    if found.hexdigest() != digest:
        raise CorruptShardError(
            f"{backend.url}/{path}: bytes {offset} to {end} differ from their checksum"
        )


class SharedGroupFile:
    """One file per group, filled by all its writers at once, each in the ranges of its own shards.

    (Ranges that follow from a rule, and fewer files than tasks, are ideas of SIONlib.)
    """

    def __init__(
        self,
        backend: Backend,
        name: VersionName,
        groups: Groups,
        largest_bytes: int,
    ) -> None:
        self._backend, self._name, self._groups = backend, name, groups
        self._largest_bytes = largest_bytes

    def runs(self, shards: Sequence[int]) -> Iterator[range]:
        """Shard by shard: each has a range and a record of its own."""
        return (range(s, s + 1) for s in sorted(set(shards)))

    def write(self, sources: Sequence[Source], pacer: Callable[[int], None]) -> int:
        """See `GroupFiles.write`."""
        return sum(self._write_one(source, pacer) for source in sources)

    def _write_one(self, source: Source, pacer: Callable[[int], None]) -> int:
        file, index, places = self._place(source.shard)
        path = f"{self._name.stem}/{file}"
        offset, url = places.image_offset(index), f"{self._backend.url}/{path}"
        if source.most_bytes > places.largest_bytes:
            raise _no_room(url, source, f"{source.most_bytes} bytes", places)
        stream = Stream(source, pacer)
        self._backend.write_at(path, offset, stream.windows)
        text = encode_shards("shard", [stream.record(file, offset)])
        if len(text) > places.record_bytes:
            raise _no_room(url, source, f"a record of {len(text)} bytes", places)
        text = text.ljust(places.record_bytes, b"\0")
        self._backend.write_at(path, places.record_offset(index), lambda: iter([memoryview(text)]))
        return stream.nbytes

    def stored(self, run: range) -> dict[int, ShardRecord]:
        """See `GroupFiles.stored`: one small read a shard."""
        found = {}
        for shard in run:
            file, index, places = self._place(shard)
            path = f"{self._name.stem}/{file}"
            try:
                area = self._backend.read(path, places.record_offset(index), places.record_bytes)
            except FileNotFoundError:
                continue
            record = _only(area)
            if record and record.shard == shard:
                found[shard] = record
        return found

    def whole(self, group: int) -> dict[int, ShardRecord] | None:
        """See `GroupFiles.whole`: one read of the table at the file's start."""
        members = self._groups.members(group)
        file, _, places = self._place(members[0])
        path = f"{self._name.stem}/{file}"
        try:
            table = self._backend.read(path, 0, places.record_offset(len(members)))
            size = self._backend.size(path)
        except FileNotFoundError:
            return None
        found = {}
        for index, shard in enumerate(members):
            start = places.record_offset(index)
            record = _only(table[start : start + places.record_bytes])
            if not record or record.shard != shard or record.offset + record.nbytes > size:
                return None
            found[shard] = record
        return found

    def _place(self, shard: int) -> tuple[str, int, SharedPlaces]:
        """File, index in it, and the file's layout."""
        group = self._groups.of(shard)
        members = self._groups.members(group)
        places = SharedPlaces(len(members), self._largest_bytes)
        return f"{self._groups.label(group)}{SHARDS}", members.index(shard), places


def _no_room(url: str, source: Source, size: str, places: SharedPlaces) -> PersistentError:
    return PersistentError(
        f"{url}: shard {source.shard} has {size}; its range was made for {places.largest_bytes}: "
        "largest_bytes must be the maximum over all ranks for this very version",
        url,
        transient=False,
    )


def _only(area: bytes) -> ShardRecord | None:
    """The record in its slot of the table; None if it was not, or not completely, written."""
    try:
        (record,) = decode_shards("shard", area).values()
    except (CorruptShardError, FormatError, ValueError):
        return None
    return record


class WriterGroupFiles:
    """One file per writer and group: its shards one after the other, their records at the end.

    An existing file is complete, so it needs no other mark. On an object store, shards that do not
    fit into a window are in parts beside it, which are durable before the records are written.
    """

    def __init__(self, backend: Backend, name: VersionName, groups: Groups) -> None:
        self._backend, self._name, self._groups = backend, name, groups

    def runs(self, shards: Sequence[int]) -> Iterator[range]:
        """Consecutive shards of one group."""
        return self._groups.runs(shards)

    def write(self, sources: Sequence[Source], pacer: Callable[[int], None]) -> int:
        """See `GroupFiles.write`."""
        ordered = sorted(sources, key=lambda s: s.shard)
        file = self._file(range(ordered[0].shard, ordered[-1].shard + 1))
        about = sum(s.most_bytes + s.most_bytes // 8192 + 4096 for s in ordered)
        if self._backend.in_parts and about > WINDOW_BYTES:
            records = [self._write_parts(source, pacer) for source in ordered]
            self._put(file, lambda: iter([memoryview(_footer(records))]), about)
        else:
            records = []
            self._put(file, lambda: _in_one(ordered, file, pacer, records), about)
        return sum(r.nbytes for r in records)

    def _put(self, file: str, content: Content, about: int) -> None:
        path = f"{self._name.stem}/{file}"
        self._backend.discard(path)  # an own file that a kill left unfinished
        self._backend.put(path, content, about)

    def _write_parts(self, source: Source, pacer: Callable[[int], None]) -> ShardRecord:
        file = f"{self._groups.label(self._groups.of(source.shard))}/{parts_name(source.shard)}"
        path, stream = f"{self._name.stem}/{file}", Stream(source, pacer)
        write_parts(self._backend, path, stream.windows())
        return stream.record(file, 0)

    def stored(self, run: range) -> dict[int, ShardRecord]:
        """See `GroupFiles.stored`: the end of the run's file."""
        try:
            return self._records(self._file(run)) or {}
        except FileNotFoundError:
            return {}

    def whole(self, group: int) -> dict[int, ShardRecord] | None:
        """See `GroupFiles.whole`. The names in the group's folder show whether a file is missing;
        the files' ends are read only if none is."""
        label, members = self._groups.label(group), set(self._groups.members(group))
        runs = [parse_run(n) for n in self._backend.sizes(f"{self._name.stem}/{label}")]
        if not members <= {shard for run in runs if run for shard in run}:
            return None
        found: dict[int, ShardRecord] = {}
        for run in sorted((r for r in runs if r), key=lambda r: (r.start, r.stop)):
            found.update(self.stored(run))
        return found if set(found) == members else None

    def _file(self, run: range) -> str:
        return f"{self._groups.label(self._groups.of(run[0]))}/{run_name(run)}"

    def _records(self, file: str) -> dict[int, ShardRecord] | None:
        """Records at the end of a file; None if the end is not valid."""
        path = f"{self._name.stem}/{file}"
        size = self._backend.size(path)
        guess = min(size, FOOTER_BYTES)
        tail = self._backend.read(path, size - guess, guess)
        nbytes = int.from_bytes(tail[-16:-8], "little") + 16
        if tail[-8:] != _TAIL or nbytes > size:
            return None
        if nbytes > guess:
            tail = self._backend.read(path, size - nbytes, nbytes)
        try:
            found = decode_shards("shard", tail[-nbytes:-16])
        except (CorruptShardError, FormatError):
            return None
        return found if all(self._fits(r, size - nbytes) for r in found.values()) else None

    def _fits(self, record: ShardRecord, before_bytes: int) -> bool:
        """Whether the shard's bytes are as many as the record says; `before_bytes`: those before
        the records in their file."""
        path, end = f"{self._name.stem}/{record.file}", record.offset + record.nbytes
        if is_in_parts(path):
            return end <= stored_bytes(self._backend, path)
        return end <= before_bytes


def _in_one(
    sources: Sequence[Source],
    file: str,
    pacer: Callable[[int], None],
    records: list[ShardRecord],
) -> Iterator[memoryview]:
    """The content of a file with all shards and their records, which `records` receives."""
    records.clear()  # of an earlier attempt
    offset = 0
    for source in sources:
        stream = Stream(source, pacer)
        yield from stream.windows()
        records.append(stream.record(file, offset))
        offset += stream.nbytes
    yield memoryview(_footer(records))


def _footer(records: Sequence[ShardRecord]) -> bytes:
    text = encode_shards("shard", records)
    return text + len(text).to_bytes(8, "little") + _TAIL


class ShardReader:
    """Bytes of one stored shard. Threads may read at once.

    Reads are unchecked: the shard's own manifest has a checksum for every block, and the user of a
    range compares those. `verify` checks all stored bytes.
    """

    def __init__(self, backend: Backend, path: str, record: ShardRecord) -> None:
        self._backend, self._path, self._record = backend, path, record

    @property
    def manifest(self) -> bytes:
        """The shard's own manifest; its only check is that of the record that contains it."""
        return self._record.manifest

    @property
    def nbytes(self) -> int:
        """Length of the shard."""
        return self._record.nbytes

    @property
    def where(self) -> str:
        """Location, for messages."""
        first = self._record.offset
        return f"{self._backend.url}/{self._path}, bytes {first} to {first + self.nbytes}"

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Read a range of the shard. Raises EOFError if the file has become shorter."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        start = self._start_of(offset, nbytes)
        data = read_parts(self._backend, self._path, start, nbytes)
        self._see_that_all_came(len(data), nbytes)
        return data

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` of the shard; otherwise as `read`."""
        start = self._start_of(offset, len(into))
        came = read_parts_into(self._backend, self._path, start, into)
        self._see_that_all_came(came, len(into))

    def _start_of(self, offset: int, nbytes: int) -> int:
        """Offset in the file."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of {self.nbytes}")
        return self._record.offset + offset

    def _see_that_all_came(self, came_bytes: int, nbytes: int) -> None:
        if came_bytes != nbytes:
            raise EOFError(f"truncated: {self.where} has {came_bytes} of {nbytes} bytes")

    def verify(self) -> None:
        """Check every byte against the checksum that was taken when it was written.

        Raises CorruptShardError.
        """
        r = self._record
        _check_stored(self._backend, self._path, r.offset, r.nbytes, r.digest)
