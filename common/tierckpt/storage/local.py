"""The `local` level's store: shard and parity files in one directory of a node-local file system,
plain or encoded.

`<stem>.safetensors` is a shard, `<stem>.encoded` one that codecs have changed, `<stem>.parity`
parity; `<stem>.manifest` makes any of them exist. Every method with a key takes a ShardKey or a
ParityKey, and treats both the same. These statements hold at every instant, also after the process
is killed or the machine loses power:

- a manifest exists only if its shard is complete and on the device;
- names with a dot first are work in progress and are never data.

Files retired by retention are kept for reuse (one of each kind), since overwriting an allocated
file is measurably faster than growing a new one. Neither torch nor numpy, so that the agent stays
small. One writer per shard index and kind, any number of readers, all in any thread or process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from tierckpt import _faults
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.ids import PAGE_BYTES, Key, ParityKey, ShardKey, round_up
from tierckpt.format.manifest import Buffer, Manifest
from tierckpt.storage import durable, file_lock
from tierckpt.storage.durable import DirectFile, open_plain

if TYPE_CHECKING:
    from tierckpt.codecs.codec import Pipeline
    from tierckpt.codecs.shard_coding import Chain, Decoder, Read

KINDS: tuple[type[ShardKey], ...] = (ShardKey, ParityKey)
MANIFEST_SUFFIX = ".manifest"
ENCODED_SUFFIX = ".encoded"
"""Suffix instead of ShardKey's if codecs have changed the shard."""
_NAMED = re.compile(rf"\.[{''.join(kind.LETTER for kind in KINDS)}](\d{{5,}})of")


class CommitTimes(Struct, frozen=True):
    """Durations of a commit."""

    write_seconds: float
    """Opening, writing and fsync of the shard."""
    commit_seconds: float
    """Renames and the manifest."""
    direct: bool
    """True if the page cache was bypassed."""


class LocalStore:
    """Store of one directory. Every method may raise OSError; committed shards are not lost
    then."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._created = False

    def create(self) -> None:
        """Create the directory and its parents, durably. Does nothing if this object created or
        found it before and it still exists."""
        if not self._created or not self.directory.is_dir():
            durable.make(self.directory)
            self._created = True

    # --- writing -------------------------------------------------------------------------------

    def commit(
        self,
        key: ShardKey,
        image: memoryview,
        manifest: bytes,
        still_sealed: Callable[[], bool] = lambda: True,
    ) -> CommitTimes:
        """Commit the shard, durably. After an OSError it does not exist, and older ones still do.

        `image` must not change during the call; its length is a multiple of PAGE_BYTES.
        `still_sealed` is called after the last byte was read: False means that `image` did change,
        and raises OSError.
        """
        start = time.perf_counter()
        with self.draft(key, len(image)) as draft:
            draft.write(image, 0)
            return draft.finish(manifest, still_sealed, start)

    def commit_file(
        self,
        key: ShardKey,
        image: Path,
        manifest: bytes,
        still_sealed: Callable[[], bool] = lambda: True,
    ) -> CommitTimes:
        """As `commit`, for bytes that are a file in this directory already: the file gets the
        shard's name as a second name, and nothing is copied.

        fsync makes durable the writes of other processes to mappings of the file: on tmpfs it has
        nothing to do; on DAX the kernel writes back the lines of the CPU's cache, however the file
        was mapped. Flushing from user space, as libpmem does, would require that the writer mapped
        it with MAP_SYNC, and would save this process one system call.
        """
        start = time.perf_counter()
        with self.draft(key, image.stat().st_size, file=image) as draft:
            return draft.finish(manifest, still_sealed, start)

    def draft(
        self, key: ShardKey, nbytes: int = 0, encoded: bool = False, file: Path | None = None
    ) -> Draft:
        """Start a commit in steps: a file of `nbytes`, written piece by piece.

        An earlier file with this key stops existing now: it could only be an earlier attempt of
        this node. If a living process is writing it (an agent that was passed over, with a hanging
        disk), it is left alone and OSError is raised: two writers would take each other's files.
        `encoded`: codecs have changed the bytes, and `Draft.sync` receives their number. `file`
        already has the bytes, and must not be written to.
        """
        return Draft(self, key, nbytes, encoded, file)

    def retire(self, key: ShardKey, reuse: bool = True) -> None:
        """Remove the shard; with `reuse`, its file is kept for reuse unless one is kept already."""
        self._unlink(self._manifest(key))
        self.sync_directory()  # before the data changes its name: never a manifest without data
        spare, data = self._spare(key), self._data(key)
        if data.exists():  # otherwise the file is in use by a hard link, or another user's
            found = data.stat()
            reuse = reuse and found.st_nlink == 1 and found.st_uid == os.geteuid()
            reuse = reuse and unlocked(data)  # a hanging run may still have it open
        if not reuse or spare.exists():
            self._unlink(data)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._rename(data, spare)

    def drop_spare(self, shard: int) -> None:
        """Remove the files that were kept for reuse."""
        for kind in KINDS:
            self._spare_of(kind, shard).unlink(missing_ok=True)

    def clean(self, shard: int) -> list[str]:
        """Remove unfinished files that killed writers of `shard` and its parity have left.

        Returns their names. Files that a living writer still has open (the agent of a trainer that
        was just killed) are locked, and left alone.
        """
        return [name for kind in KINDS for name in self._clean(kind, shard)]

    def _clean(self, kind: type[ShardKey], shard: int) -> list[str]:
        removed = []
        pattern = f"*.{kind.LETTER}{shard:05d}of*"
        for path in self.directory.glob(f".{pattern}"):
            stem = path.name.removeprefix(".").removesuffix(".manifest.tmp")
            if _has_writer(self._files(stem, kind)):
                continue  # the writer is about to rename this manifest
            if path != self._spare_of(kind, shard) and unlocked(path):
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    path.unlink()
                    removed.append(path.name)
        found = [p for suffix in _suffixes(kind) for p in self.directory.glob(f"{pattern}{suffix}")]
        for path in found:
            key = kind.parse(path.stem)
            # In this order: a writer makes its manifest before it releases the lock.
            if key and unlocked(path) and not os.path.lexists(self._manifest(key)):
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    path.unlink()
                    removed.append(path.name)
        return removed

    # --- reading -------------------------------------------------------------------------------

    def keys(self) -> list[ShardKey]:
        """Every shard that exists here; an empty list if the directory does not exist."""
        return self._keys(ShardKey)

    def parities(self) -> list[ParityKey]:
        """Every parity that exists here; an empty list if the directory does not exist."""
        return self._keys(ParityKey)

    def _keys(self, kind: type[Key]) -> list[Key]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        keys = [
            kind.parse(n.removesuffix(MANIFEST_SUFFIX))
            for n in names
            if n.endswith(MANIFEST_SUFFIX)
        ]
        return sorted(k for k in keys if k is not None)

    def read_manifest(self, key: ShardKey) -> bytes:
        """The manifest's bytes, unchecked."""
        with open_plain(self._manifest(key)) as file:
            return file.read()

    def open_image(self, key: ShardKey) -> mmap.mmap:
        """The bytes, mapped, unchecked; writes to the map stay private. The caller closes it.

        Raises CorruptShardError for an empty file, which cannot be mapped.
        """
        with open_plain(self._data(key)) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise CorruptShardError(f"truncated: {self._data(key)} is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def shards_named(self) -> set[int]:
        """Numbers of all shards that any file here belongs to, unfinished and spare files
        included."""
        try:
            found = map(_NAMED.search, os.listdir(self.directory))
        except FileNotFoundError:
            return set()
        return {int(match[1]) for match in found if match is not None}

    def has(self, key: ShardKey) -> bool:
        """True if the shard exists here."""
        return self._manifest(key).exists()

    def committed_seconds(self, key: ShardKey) -> float:
        """Unix time of the commit, by the file system's clock. Raises OSError."""
        return self._manifest(key).stat().st_mtime

    def is_bare(self, key: ShardKey) -> bool:
        """True if the manifest exists without the bytes: no operation of the store leaves that."""
        return not self._data(key).exists() and self.has(key)

    def read(self, key: ShardKey, offset: int, nbytes: int) -> bytes:
        """A range of the bytes, unchecked; shorter where the file ends."""
        with open_plain(self._data(key), buffering=0) as file:
            return os.pread(file.fileno(), nbytes, offset)

    # --- file operations, each with its fault point --------------------------------------------

    def _data(self, key: ShardKey) -> Path:
        """File of the bytes: the existing one, or the one that would be created."""
        plain, *others = self._files(key.stem, type(key))
        return next((path for path in others if path.exists()), plain)

    def _files(self, stem: str, kind: type[ShardKey]) -> list[Path]:
        """Possible files of the bytes, `kind`'s own name first."""
        return [self.directory / f"{stem}{suffix}" for suffix in _suffixes(kind)]

    def _manifest(self, key: ShardKey) -> Path:
        return self.directory / f"{key.stem}{MANIFEST_SUFFIX}"

    def _spare(self, key: ShardKey) -> Path:
        return self._spare_of(type(key), key.shard)

    def _spare_of(self, kind: type[ShardKey], shard: int) -> Path:
        return self.directory / f".spare.{kind.LETTER}{shard:05d}of"

    def take_spare(self, shard: int, path: Path, kind: type[ShardKey] = ShardKey) -> None:
        """Rename the spare file, if there is one, to `path`, which is in this directory. A spare
        file of another user, from a former run of the job, is removed if possible: this user may
        not write to it."""
        _faults.point("file", op="take_spare")
        spare = self._spare_of(kind, shard)
        with contextlib.suppress(FileNotFoundError):
            if spare.lstat().st_uid == os.geteuid():
                os.rename(spare, path)
            else:
                with contextlib.suppress(PermissionError):
                    spare.unlink()

    def _write_manifest(self, temp: Path, final: Path, content: bytes) -> None:
        """Atomically and durably create `final`, after all earlier name changes.

        A journal that makes the manifest's bytes durable makes those names durable too, so the
        folder's first sync has nothing to do. The other order would need one more journal commit.
        """
        try:
            _faults.point("file", op="open_manifest")
            with temp.open("wb") as file:
                durable.share(file.fileno(), self.directory)
                _faults.point("file", op="write_manifest")
                file.write(content)
                file.flush()
                _faults.point("file", op="fsync_manifest")
                os.fsync(file.fileno())
            self.sync_directory()
            self._rename(temp, final)
        except OSError:
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)
            raise
        self.sync_directory()

    def _rename(self, source: Path, target: Path) -> None:
        _faults.point("file", op="rename", target=target.name)
        os.rename(source, target)

    def _unlink(self, path: Path) -> None:
        _faults.point("file", op="unlink", target=path.name)
        path.unlink(missing_ok=True)

    def sync_directory(self) -> None:
        """Make names in the folder durable. Raises OSError."""
        _faults.point("file", op="fsync_directory")
        durable.sync(self.directory)


class Draft:
    """A shard or parity being written; it exists once `commit` has returned.

    Use it in a `with` statement: leaving that without a successful commit leaves no files. For one
    thread at a time. Every method may raise OSError.
    """

    def __init__(
        self, store: LocalStore, key: ShardKey, nbytes: int, encoded: bool, file: Path | None
    ) -> None:
        """See `LocalStore.draft`."""
        self._store, self._key, self._nbytes = store, key, nbytes
        suffix = ENCODED_SUFFIX if encoded else key.SUFFIX
        self._data, self._record = store.directory / f"{key.stem}{suffix}", store._manifest(key)
        self._temp = store.directory / f".{key.stem}.tmp"
        self._durable = self._exists = False
        if _has_writer([self._temp, *store._files(key.stem, type(key))]):
            raise BlockingIOError(f"another process is still writing {key}")
        if self._record.exists():
            store._unlink(self._record)
            store.sync_directory()
        if (other := store._data(key)) != self._data and other.exists():
            store._unlink(other)  # a manifest must not find two files
        try:
            if file is None:
                store.take_spare(key.shard, self._temp, type(key))
            else:
                # Renaming one name of a file to another name of it would do nothing.
                self._data.unlink(missing_ok=True)
                self._temp.unlink(missing_ok=True)
                os.link(file, self._temp)
            _faults.point("file", op="open")
            self._file = DirectFile(self._temp)
        except OSError:
            self._remove()
            raise

    @property
    def direct(self) -> bool:
        """True while the page cache is bypassed."""
        return self._file.direct

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self._exists:
                self._remove()
        finally:
            self._file.close()

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` at `offset`. Bypasses the page cache if both, and the memory, are
        aligned."""
        self._file.write(data, offset)

    def sync(self, nbytes: int | None = None) -> None:
        """Make the written bytes durable: exactly `nbytes` (default: the size given at the start),
        however long a reused file was."""
        self._file.sync(self._nbytes if nbytes is None else nbytes)
        self._durable = True

    def commit(self, manifest: bytes) -> None:
        """Make the shard exist, durably."""
        if not self._durable:
            self.sync()
        store = self._store
        store._rename(self._temp, self._data)
        temp = store.directory / f".{self._key.stem}.manifest.tmp"
        store._write_manifest(temp, self._record, manifest)
        self._exists = True

    def finish(
        self, manifest: bytes, still_sealed: Callable[[], bool], start: float
    ) -> CommitTimes:
        """Sync and commit the written bytes; `start`: when writing started. See
        `LocalStore.commit`."""
        self.sync()
        written = time.perf_counter()
        if not still_sealed():
            raise FileNotFoundError(f"the slot of {self._key} was refilled while it was written")
        self.commit(manifest)
        return CommitTimes(written - start, time.perf_counter() - written, self.direct)

    def _remove(self) -> None:
        # The manifest goes first (it exists if the last fsync failed). The space is freed at once:
        # the device may be full.
        for path in (self._record, self._temp, self._data):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def unlocked(path: Path) -> bool:
    """True if no process, this one included, is known to be writing the file; False if unknown."""
    with contextlib.suppress(OSError):
        return file_lock.unlocked(path)
    return False


def _has_writer(files: Iterable[Path]) -> bool:
    """Whether a living process is writing one of the files."""
    return any(file.exists() and not unlocked(file) for file in files)


def _suffixes(kind: type[ShardKey]) -> tuple[str, ...]:
    """Possible extensions of the bytes' file."""
    return (kind.SUFFIX, ENCODED_SUFFIX) if kind is ShardKey else (kind.SUFFIX,)


BUFFER_BYTES = 8 * 1024 * 1024
"""Size of one write."""


def commit_encoded(
    store: LocalStore,
    key: ShardKey,
    image: memoryview,
    sealed: bytes,
    pipeline: Pipeline,
    chain: Chain,
    still_sealed: Callable[[], bool] = lambda: True,
) -> tuple[CommitTimes, int]:
    """As `LocalStore.commit`, through the codecs; also returns the number of bytes written.

    `chain` names the version that the shard may refer to, and records the new one. Buffers
    BUFFER_BYTES and a block. Raises OSError or CodecError, after which the shard does not exist.
    """
    from tierckpt.codecs.shard_coding import Encoder, cut

    start = time.perf_counter()
    base = chain.base_for_next(pipeline.full_every)
    if base is not None and not store.has(base.manifest.key):
        base = None
    encoder = Encoder(pipeline, sealed, base)
    header_bytes = Manifest.decode(sealed).header_bytes
    with store.draft(key, encoded=True) as draft:
        nbytes = _write_all(draft, encoder.stored(cut(image, header_bytes)))
        draft.sync(nbytes)
        written = time.perf_counter()
        if not still_sealed():
            raise FileNotFoundError(f"the slot of {key} was refilled while it was written")
        draft.commit(encoder.manifest.encode())
    made = encoder.made
    if made is None and base is not None and not store.has(base.manifest.key):
        store.retire(key)  # another agent, which did not know of this one, was working here
        raise FileNotFoundError(f"{base.manifest.key} was retired while {key} still referred to it")
    chain.wrote(made)
    return CommitTimes(written - start, time.perf_counter() - written, draft.direct), nbytes


def _write_all(draft: Draft, stored: Iterable[Buffer]) -> int:
    """Write blocks of any length to the file with large, aligned writes; returns their length.

    The last write is padded to a page, so that it can bypass the page cache too.
    """
    offset = used = 0
    with contextlib.closing(mmap.mmap(-1, BUFFER_BYTES)) as memory, memoryview(memory) as room:
        for block in stored:
            rest = memoryview(block)
            while rest:
                part = rest[: BUFFER_BYTES - used]
                room[used : used + len(part)] = part
                used, rest = used + len(part), rest[len(part) :]
                if used == BUFFER_BYTES:
                    draft.write(room, offset)
                    offset, used = offset + BUFFER_BYTES, 0
        if used:
            padded = round_up(used, PAGE_BYTES)
            room[used:padded] = bytes(padded - used)
            with room[:padded] as last:
                draft.write(last, offset)
    return offset + used


def open_encoded(store: LocalStore, manifest: Manifest) -> Decoder:
    """An encoded shard. Raises the errors of `Decoder`, and OSError."""
    from tierckpt.codecs.shard_coding import Decoder

    def other(key: ShardKey) -> tuple[Manifest, Read]:
        found = Manifest.decode(store.read_manifest(key))
        return found, partial(store.read, key)

    return Decoder(manifest, partial(store.read, manifest.key), other)


@contextlib.contextmanager
def unfolded(store: LocalStore, decoder: Decoder) -> Iterator[memoryview]:
    """The whole image, in a file without a name beside the others, so that memory use is bounded.

    Raises CodecError for an encrypted shard: the device would have it in plain text.
    """
    if decoder.hides:
        from tierckpt.codecs.codec import CodecError

        raise CodecError(f"{decoder.sealed.key} is encrypted, and must not be decoded to a disk")
    with tempfile.TemporaryFile(dir=store.directory) as file:
        for block in decoder.blocks():
            file.write(block)
        file.flush()
        with (
            contextlib.closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as mapped,
            memoryview(mapped) as image,
        ):
            yield image


class References:
    """The shards of a store that other shards refer to. One thread."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._known: dict[ShardKey, ShardKey | None] = {}

    def of(self, keys: Iterable[ShardKey]) -> set[ShardKey]:
        """The shards that `keys` refer to. Unreadable ones refer to nothing, as they cannot be
        restored."""
        keys = set(keys)
        self._known = {key: base for key, base in self._known.items() if key in keys}
        for key in keys - self._known.keys():
            self._known[key] = self._look(key)
        return {base for base in self._known.values() if base is not None}

    def _look(self, key: ShardKey) -> ShardKey | None:
        try:
            encoding = Manifest.decode(self._store.read_manifest(key)).encoding
        except (OSError, CorruptShardError, FormatError):
            return None
        return None if encoding is None else encoding.base_of(key)
