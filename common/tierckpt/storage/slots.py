"""Slots: reusable shared-memory buffers, each holding one shard in file layout. Standard library
and the format only.

A slot is a seal area (one or more pages) and the shard's image. The seal area holds the length of
the manifest, zero while the slot is not sealed, and the manifest. Sealing writes the manifest
first and its length last, and a manifest carries its own checksum. So a process killed at any
instruction leaves either a sealed slot or an unsealed one. `job_directory` has the paths of slots.

The image may be a separate file in the local level's directory, ready to be committed. If that
directory is memory itself (tmpfs, or a DAX file system on persistent memory), a shard need not be
copied there: the image has exactly the shard's bytes, and a commit gives this file a second name,
the shard's. Mapped files in persistent memory that a flush makes durable are the NVM Programming
Model of SNIA (2013).

    <shm_dir>/tierckpt-<uid>/<job>/r<rank>.<k>          the slot: only its seal area
    <shm_dir>/tierckpt-<uid>/<job>/r<rank>.<k>.image    a symbolic link to the image
    <path>/.slot.<of the job's folder>.r<rank>.<k>      the image

The image's number of names shows its owners. One: only the slot, which may be filled again. More:
a committed shard too, or a copy that a user made with hard links. The slot then drops its name and
takes another file, and the bytes stay where they are. None: the file was removed.

While the machine runs, every image has a link to it at every instant: the link is made first and
removed last.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import math
import mmap
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from tierckpt.config import Config
from tierckpt.errors import CorruptShardError, FormatError, TierckptError
from tierckpt.format.ids import PAGE_BYTES, round_up
from tierckpt.format.manifest import DIGEST_BYTES, Manifest
from tierckpt.storage import durable, file_lock
from tierckpt.storage.durable import mount_of, open_plain, plain, populate
from tierckpt.storage.local import LocalStore

LINK_SUFFIX = ".image"
_PREFIX = ".slot."
MAX_KEPT = 8
"""Limit of kept mappings: enough for a cycle, unless retention keeps more than a few versions."""
_MAP_SHARED_VALIDATE, _MAP_SYNC = 0x03, 0x80000
"""From <linux/mman.h>; Python has no names for them."""


class _Mapped:
    """A file's memory, and a descriptor for checks of the file."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises OSError, and EOFError when it is empty."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not os.fstat(self._fd).st_size:
                raise EOFError(f"{path} is empty")
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self.map = mmap.mmap(self._fd, 0, flags=flags)
        except BaseException:
            os.close(self._fd)
            raise

    def is_whole(self, path: Path) -> bool:
        """True when this is the file at `path`, in full length."""
        ours, theirs = os.fstat(self._fd), path.stat()
        return os.path.samestat(ours, theirs) and len(self.map) == ours.st_size

    def is_removed(self) -> bool:
        """True when the file has no name any more: only the mapping keeps its memory."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Unmap."""
        with contextlib.suppress(BufferError):  # a view still exists, and frees it later
            self.map.close()
        os.close(self._fd)


class Mappings:
    """Mappings of files that slots gave up, kept for their reuse; not thread-safe.

    A few files rotate between slots, committed versions and retention. To map and unmap one changes
    page tables, which takes nearly as long as a copy, in the trainer.
    """

    def __init__(self) -> None:
        self.kept: deque[_Mapped] = deque(maxlen=MAX_KEPT)
        """Those that are kept now."""

    def take(self, path: Path) -> _Mapped:
        """The mapping of the file at `path`, a kept one or a new one."""
        for mapped in self.kept:
            if mapped.is_whole(path):
                self.kept.remove(mapped)
                return mapped
        return _Mapped(path)

    def keep(self, mapped: _Mapped) -> None:
        """Keep a mapping for later."""
        if len(self.kept) == MAX_KEPT:
            self.kept.popleft().close()
        self.kept.append(mapped)

    def forget_removed(self) -> None:
        """Free the memory of files that were removed."""
        for mapped in tuple(self.kept):
            if mapped.is_removed():
                self.kept.remove(mapped)
                mapped.close()

    def close(self) -> None:
        """Unmap all."""
        while self.kept:
            self.kept.pop().close()


class ImageFile:
    """One slot's image. Mapped on first use; not thread-safe."""

    def __init__(self, link: Path, path: Path) -> None:
        """The image at `path`, the target of `link`."""
        self.link = link
        self.path = path
        self.mappings: Mappings | None = None
        """Source of its mapping, which is returned there; None: the mapping is not kept."""
        self._mapped: _Mapped | None = None

    @classmethod
    def make(cls, segment: Path, store: LocalStore, shard: int, nbytes: int) -> ImageFile:
        """An image of `nbytes` for the slot at `segment`, with all its memory reserved now.

        Reuses a file that retention gave back, if there is one. Raises OSError, and leaves no file
        then.
        """
        remove_image(segment)
        store.create()
        image = cls(_link_of(segment), _path_in(store.directory, segment))
        os.symlink(image.path, image.link)
        try:
            store.take_spare(shard, image.path)
            if not image.is_ours_alone():  # never write into a file that has another owner
                image.path.unlink(missing_ok=True)
            _reserve(image.path, nbytes)
        except OSError:
            remove_image(segment)
            raise
        return image

    @classmethod
    def of(cls, segment: Path) -> ImageFile | None:
        """The image of the slot at `segment`; None if the slot contains its image itself.

        Raises FileNotFoundError when there is a link, but its image was removed.
        """
        link = _link_of(segment)
        if not os.path.lexists(link):
            return None
        path = link.resolve()  # the link itself, if a copy of the folder followed links
        path.stat()
        return cls(link, path)

    @property
    def nbytes(self) -> int:
        """Current length; 0 when the file was removed."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def can_be(self, store: LocalStore, nbytes: int) -> bool:
        """True when it can become a shard's file in `store`: it exists with exactly `nbytes`."""
        return self.path.parent == store.directory.resolve() and self.nbytes == nbytes

    def is_ours_alone(self) -> bool:
        """True when the file has no other owner, so its bytes may change."""
        try:
            return self.path.stat().st_nlink == 1
        except FileNotFoundError:
            return False

    def view(self) -> memoryview:
        """The bytes, writable. Raises OSError, and EOFError when the file is empty now."""
        if self._mapped is None:
            take = _Mapped if self.mappings is None else self.mappings.take
            self._mapped = take(self.path)
        return memoryview(self._mapped.map)

    def close(self) -> None:
        """Unmap, or return the mapping to `mappings`; the file stays."""
        if self._mapped is not None:
            if self.mappings is None:
                self._mapped.close()
            else:
                self.mappings.keep(self._mapped)
            self._mapped = None


def _reserve(path: Path, nbytes: int) -> None:
    """Set the file's length, and reserve memory for all of it.

    Without room this raises an error; a later access would be SIGBUS. A file that has all its
    memory is left as it is: to visit its pages again would take as long as filling it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(fd).st_size != nbytes:
            os.ftruncate(fd, nbytes)
        if os.fstat(fd).st_blocks * 512 < nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def _link_of(segment: Path) -> Path:
    return segment.with_name(segment.name + LINK_SUFFIX)


def _path_in(directory: Path, segment: Path) -> Path:
    """Path of the image; nodes on one machine may share the directory, with equal slot names."""
    return directory.resolve() / f"{_prefix_of(segment.parent)}{segment.name}"


def _prefix_of(folder: Path) -> str:
    return f"{_PREFIX}{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}."


def remove_image(segment: Path) -> None:
    """Remove the image of the slot at `segment` and the link to it, if they exist."""
    remove_link(_link_of(segment))


def remove_link(link: Path) -> None:
    """Remove an image by its link, and the link."""
    image = link.resolve()
    # An image that cannot be removed (a read-only file system) is a stray from now on.
    with contextlib.suppress(OSError):
        if image.name.startswith(_PREFIX):
            image.unlink()
    link.unlink(missing_ok=True)


def images_of(directory: Path, folder: Path) -> list[tuple[Path, str]]:
    """Every image in `directory` of slots in `folder`, with the slot's name."""
    prefix = _prefix_of(folder)
    return [(p, p.name.removeprefix(prefix)) for p in directory.resolve().glob(f"{prefix}*")]


def memory_kind(directory: Path) -> str:
    """`tmpfs` or `dax` if files in `directory` are memory that can be mapped; else empty. The
    directory must exist."""
    if filesystem_of(directory.resolve()) == "tmpfs":
        return "tmpfs"
    return "dax" if _is_dax(directory) else ""


def filesystem_of(path: Path) -> str:
    """The type of an absolute path's file system. Does not touch it: it may hang."""
    return mount_of(path).kind


def _is_dax(directory: Path) -> bool:
    """True if a file there is the device's own memory: the kernel grants MAP_SYNC for no other.

    This tests a file itself, because a file can be set to DAX regardless of the mount.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.truncate(mmap.PAGESIZE)
            map_in_sync(file.fileno())
    except OSError:
        return False
    return True


def map_in_sync(fd: int) -> None:
    """Map a page with a flag that the kernel grants only for persistent memory, and unmap it.

    Raises OSError: EOPNOTSUPP for any other file, tmpfs included; EINVAL before Linux 4.15.
    """
    mmap.mmap(fd, mmap.PAGESIZE, flags=_MAP_SHARED_VALIDATE | _MAP_SYNC).close()


def place_for_slots(config: Config) -> LocalStore | None:
    """The local level's store if slots can be files in it, else None; creates its directory."""
    if not _wanted(config):
        return None
    store = LocalStore(config.directory)
    try:
        store.create()
        return store if memory_kind(store.directory) else None
    except OSError:
        return None  # the first commit will report the cause


def expected(config: Config) -> bool:
    """Guess `place_for_slots` without touching the directory, which may hang; recognises no DAX."""
    return _wanted(config) and filesystem_of(Path(config.directory)) == "tmpfs"


def most_files(config: Config, slots: int) -> int:
    """Limit of a rank's images: in slots, committed, and given back for reuse.

    A committed image is often still in a slot; both are then one file. Versions that are kept
    beside the newest need more files.
    """
    return slots + config.local.retention.keep_last + 1


def describe(config: Config, slots: int, shard_bytes: int) -> str:
    """Notice about slots that are files, with their need of memory in bytes."""
    return (
        f"{config.directory} is memory ({memory_kind(Path(config.directory))}): slots are files "
        "there, and versions are committed without a copy. A rank takes up to "
        f"{most_files(config, slots)} x {shard_bytes} bytes of it, and more for versions that are "
        "kept beside the newest"
    )


def _wanted(config: Config) -> bool:
    # With codecs, a stored shard has other bytes than the slot.
    return config.uses("local") and not config.local.codecs


_MAGIC = b"TCKPSLOT"
_SEAL_HEAD_BYTES = 24
"""Magic, length of the seal area, length of the manifest."""


@functools.lru_cache
def seal_area_bytes(blocks: int, runs: int = 1) -> int:
    """Room for a manifest with the digests of the header and `blocks` blocks (base64), and a
    lineage of `runs` runs."""
    digests = (blocks + 1) * DIGEST_BYTES * 4 // 3
    return round_up(_SEAL_HEAD_BYTES + 2048 + 48 * runs + digests, PAGE_BYTES)


class Slot:
    """One mapped segment. Owned by the process that maps it; not thread-safe."""

    def __init__(
        self, fd: int, name: str, path: Path | None, file: ImageFile | None = None
    ) -> None:
        """Take over `fd`. `path` is None for a segment that no other process can find, `file` is
        None for one that contains its image."""
        self.fd = fd
        self.name = name
        self.path = path
        self.file = file
        self._segment_bytes = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self._segment_bytes)
        self.is_populated = False
        """True once all pages are mapped."""
        self.seal_bytes = int.from_bytes(self._map[8:16], "little")
        self.registered_address = 0
        """Address of the image while it is page-locked for a GPU."""
        self.seen_seconds = -math.inf
        """When its user last saw that its file was not removed (monotonic)."""
        self.bound: Any = None
        """Kept here by who fills the slot, until the slot is closed. It keeps the image mapped."""

    @classmethod
    def create(
        cls,
        path: Path | None,
        name: str,
        seal_bytes: int,
        image_bytes: int,
        file: ImageFile | None = None,
    ) -> Slot:
        """Make a segment with all its memory reserved now. Raises OSError (ENOSPC) without room.

        `image_bytes` is the size of the image in the segment: 0 if the image is `file`.

        The reservation matters: an access to a page that a full file system lacks is SIGBUS.
        """
        if path is None:
            fd = _anonymous(name)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, seal_bytes + image_bytes)
            os.pwrite(fd, _MAGIC + seal_bytes.to_bytes(8, "little") + bytes(8), 0)
            return cls(fd, name, path, file)
        except OSError:
            os.close(fd)
            if path is not None:
                remove_segment(path)
            raise

    @classmethod
    def open(cls, path: Path) -> Slot | None:
        """Map an existing segment; None when it or its image was removed, or when it is no slot.

        Raises OSError if the path is no plain file.
        """
        try:
            file = ImageFile.of(path)
            fd = plain(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)
        except FileNotFoundError:
            return None
        head = os.pread(fd, 16, 0)
        sound = head[:8] == _MAGIC and int.from_bytes(head[8:], "little") >= PAGE_BYTES
        if not sound or int.from_bytes(head[8:], "little") > os.fstat(fd).st_size:
            os.close(fd)
            return None
        return cls(fd, path.name, path, file)

    @property
    def image_bytes(self) -> int:
        """Size of the image: room for the shard."""
        return self._segment_bytes - self.seal_bytes if self.file is None else self.file.nbytes

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.seal_bytes + self.image_bytes

    def image(self) -> memoryview:
        """The shard's bytes, writable; release it before `close`. Raises as `ImageFile.view`."""
        if self.file is not None:
            return self.file.view()
        return memoryview(self._map)[self.seal_bytes :]

    def populate(self) -> None:
        """Map all pages at once, for a thread about to fill the slot; other threads run
        meanwhile. Until then pages are mapped as they are touched: a restart opens all slots before
        its first step, and fills none."""
        if not self.is_populated:
            self.is_populated = True
            first = ctypes.c_char.from_buffer(self._map)  # keeps it mapped
            populate(ctypes.addressof(first), self._segment_bytes)

    @property
    def is_removed(self) -> bool:
        """True when its file was removed: no other process can find it any more."""
        return self.path is not None and os.fstat(self.fd).st_nlink == 0

    def fits(self, seal_bytes: int, image_bytes: int, store: LocalStore | None) -> bool:
        """True when it can take a shard of these sizes without a new segment.

        An image in `store` becomes the shard's file there: it must have exactly the length, and no
        other owner. Without a store, the image may be a little longer, for a state that grows.
        """
        if self.seal_bytes < seal_bytes:
            return False
        if self.file is None:
            room = self._segment_bytes - self.seal_bytes
            return store is None and image_bytes <= room <= image_bytes * 5 // 4
        if store is None:
            return False
        return self.file.can_be(store, image_bytes) and self.file.is_ours_alone()

    def seal(self, manifest: bytes) -> None:
        """Declare the image complete: nothing in it changes until `unseal`."""
        room = self.seal_bytes - _SEAL_HEAD_BYTES
        if len(manifest) > room:
            raise TierckptError(f"manifest of {len(manifest)} bytes, the seal area has {room}")
        self._map[_SEAL_HEAD_BYTES : _SEAL_HEAD_BYTES + len(manifest)] = manifest
        self._map[16:24] = len(manifest).to_bytes(8, "little")

    def unseal(self) -> None:
        """Declare the image void, before its first byte changes."""
        self._map[16:24] = bytes(8)

    def manifest_bytes(self) -> bytes | None:
        """The manifest as it was sealed, unchecked; None when not sealed."""
        length = int.from_bytes(self._map[16:24], "little")
        if not 0 < length <= self.seal_bytes - _SEAL_HEAD_BYTES:
            return None
        return self._map[_SEAL_HEAD_BYTES : _SEAL_HEAD_BYTES + length]

    def manifest(self) -> Manifest | None:
        """The manifest; None when the slot is not sealed or the manifest is damaged."""
        data = self.manifest_bytes()
        if data is None:
            return None
        try:
            return Manifest.decode(data)
        except (CorruptShardError, FormatError):
            return None

    def in_use_elsewhere(self) -> bool:
        """True while another process (an agent that writes it out) holds the segment."""
        return not file_lock.lockable(self.fd)

    def close(self) -> None:
        """Unmap and close; the segment stays."""
        self.bound = None
        with contextlib.suppress(BufferError):  # a view still exists, and frees it later
            self._map.close()
        file_lock.close(self.fd)
        if self.file is not None:
            self.file.close()

    def remove(self) -> None:
        """Unmap, close and delete; committed files stay."""
        self.close()
        if self.path is not None:
            remove_segment(self.path)


def remove_segment(path: Path) -> None:
    """Delete the slot at `path`, whether or not a process has it mapped."""
    durable.remove(path)  # first: there must be no seal without its image
    remove_image(path)


def _anonymous(name: str) -> int:
    try:
        return os.memfd_create(f"tierckpt-{name}")
    except AttributeError as error:  # Python was built for an old C library
        text = "this Python has no memfd_create, which slots need where shm_dir has no room"
        raise OSError(errno.ENOSYS, text) from error


def read_seal(path: Path) -> Manifest | None:
    """The manifest of the slot at `path` without mapping its image; None when not sealed."""
    try:
        return seal_of(path)
    except (OSError, CorruptShardError, FormatError):
        return None


def seal_of(path: Path) -> Manifest | None:
    """The same, but raises OSError, CorruptShardError or FormatError when it cannot be read."""
    data = sealed_at(path)
    return None if data is None else Manifest.decode(data)


def sealed_at(path: Path) -> bytes | None:
    """The manifest of the slot at `path`, unchecked; None when not sealed. Raises OSError."""
    with open_plain(path) as file:
        head = file.read(_SEAL_HEAD_BYTES)
        if head[:8] != _MAGIC:
            return None
        length = int.from_bytes(head[16:24], "little")
        area = int.from_bytes(head[8:16], "little")
        if not 0 < length <= area - _SEAL_HEAD_BYTES:
            return None
        return file.read(length)


def read_image(path: Path, offset: int, nbytes: int) -> bytes:
    """Read a range of the image of the slot at `path`, sealed or not, without mapping it; shorter
    where the image ends. Raises OSError."""
    if image := ImageFile.of(path):
        with open_plain(image.path, buffering=0) as file:
            return os.pread(file.fileno(), nbytes, offset)
    with open_plain(path, buffering=0) as file:
        area = int.from_bytes(file.read(16)[8:], "little")
        return os.pread(file.fileno(), nbytes, area + offset)
