"""Slots: reusable shared-memory buffers, each holding one shard in file layout.

A slot is a seal area (one or more pages) and the shard's image, which may also be a separate file
in the local level's directory (see `image_file`). The seal area holds the length of the manifest,
zero while the slot is not sealed, and the manifest. Sealing writes the manifest first and its
length last, and a manifest carries its own checksum. So a process killed at any instruction leaves
either a sealed slot or an unsealed one. `job_directory` has the paths of slots.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

from tierckpt.errors import CorruptShardError, FormatError, TierckptError
from tierckpt.format.ids import PAGE_BYTES, round_up
from tierckpt.format.manifest import DIGEST_BYTES, Manifest
from tierckpt.storage.files import durable, file_lock
from tierckpt.storage.files.durable import open_plain, plain
from tierckpt.storage.files.mapped_file import populate
from tierckpt.storage.local.store import LocalStore

from .image_file import ImageFile, remove_image

_MAGIC = b"TCKPSLOT"
_SEAL_HEAD_BYTES = 24
"""Magic, length of the seal area, length of the manifest."""


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
        """Map all pages at once, for a thread that is about to fill the slot; other threads run
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
        if self.file is None or store is None:
            room = self.image_bytes
            return (
                self.file is None and store is None and image_bytes <= room <= image_bytes * 5 // 4
            )
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
