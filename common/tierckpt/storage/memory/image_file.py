"""The slot is the file: an image that lies in the local level's directory, ready to be committed.

Where that directory is memory already (tmpfs, or a DAX file system on persistent memory), a shard
need not be copied there: the slot's image is a file of its own, exactly the shard's bytes, and a
commit gives this file a second name, the shard's. Files of persistent memory that are mapped, and
durable after a flush, are the NVM Programming Model of SNIA (2013).

    <shm_dir>/tierckpt-<uid>/<job>/r<rank>.<k>          the slot: its seal area, and nothing else
    <shm_dir>/tierckpt-<uid>/<job>/r<rank>.<k>.image    a symbolic link to the image
    <path>/.slot.<of the job's folder>.r<rank>.<k>      the image

How many names the file has says whose it is. One: the slot's alone, which may be filled again.
More: a committed shard's too, or a copy that somebody made with hard links; the slot then gives up
its name and takes another file, and the bytes stay where they are. None: somebody removed it.

At every instant at which the machine is up, an image has a link that leads to it: the link is made
first and removed last. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from tierckpt.config import Config
from tierckpt.storage.local.store import LocalStore

LINK_SUFFIX = ".image"
_PREFIX = ".slot."
MOST_KEPT = 8
"""Mappings; more than go round unless retention keeps more than a few versions."""
_MAP_SHARED_VALIDATE, _MAP_SYNC = 0x03, 0x80000
"""Of <linux/mman.h>; Python has no names for them."""


class _Mapped:
    """A file's memory, and a descriptor to ask after the file."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and EOFError when the file is empty."""
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
        """True when it is the file at `path`, all of it."""
        ours, theirs = os.fstat(self._fd), path.stat()
        return os.path.samestat(ours, theirs) and len(self.map) == ours.st_size

    def is_removed(self) -> bool:
        """True when the file has no name any more: the mapping alone keeps its memory."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Unmap."""
        with contextlib.suppress(BufferError):  # a view is still about: freed with it
            self.map.close()
        os.close(self._fd)


class Mappings:
    """Mappings of files that slots gave up, for when one comes back; not thread-safe.

    A few files go round between slots, committed versions and retention. Mapping one and unmapping
    it costs page tables: nearly as much time as copying it (docs/figures.md), and of the trainer's.
    """

    def __init__(self) -> None:
        self._kept: deque[_Mapped] = deque(maxlen=MOST_KEPT)

    def take(self, path: Path) -> _Mapped:
        """The mapping of the file at `path`, kept or made now."""
        for mapped in self._kept:
            if mapped.is_whole(path):
                self._kept.remove(mapped)
                return mapped
        return _Mapped(path)

    def keep(self, mapped: _Mapped) -> None:
        """Have it back."""
        if len(self._kept) == MOST_KEPT:
            self._kept.popleft().close()
        self._kept.append(mapped)

    def forget_removed(self) -> None:
        """Give back the memory of files that are no more."""
        for mapped in [m for m in self._kept if m.is_removed()]:
            self._kept.remove(mapped)
            mapped.close()

    def close(self) -> None:
        """Unmap all."""
        while self._kept:
            self._kept.pop().close()


class ImageFile:
    """One slot's image. Mapped when it is first asked for; not thread-safe."""

    def __init__(self, link: Path, path: Path) -> None:
        """The image at `path`, to which `link` leads."""
        self.link = link
        self.path = path
        self.mappings: Mappings | None = None
        """Where its mapping comes from and goes to, if it shall be kept."""
        self._mapped: _Mapped | None = None

    @classmethod
    def make(cls, segment: Path, store: LocalStore, shard: int, nbytes: int) -> ImageFile:
        """An image of `nbytes` for the slot at `segment`, all its memory reserved now.

        A file that retention gave back is taken before a new one is made. Raises OSError, and
        leaves nothing then.
        """
        remove_image(segment)
        store.create()
        image = cls(_link_of(segment), _path_in(store.directory, segment))
        os.symlink(image.path, image.link)
        try:
            store.take_spare(shard, image.path)
            if not image.is_ours_alone():  # whatever is there: never write over what others have
                image.path.unlink(missing_ok=True)
            _reserve(image.path, nbytes)
        except OSError:
            remove_image(segment)
            raise
        return image

    @classmethod
    def of(cls, segment: Path) -> ImageFile | None:
        """The image of the slot at `segment`; None where that has its image in itself.

        Raises FileNotFoundError when there is a link, and the image is gone.
        """
        link = _link_of(segment)
        if not os.path.lexists(link):
            return None
        path = link.resolve()  # itself, where somebody copied a job's memory and followed links
        path.stat()
        return cls(link, path)

    @property
    def nbytes(self) -> int:
        """Its length now; 0 when somebody removed it."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def can_be(self, store: LocalStore, nbytes: int) -> bool:
        """True when it can be a shard's file in `store`: it is there, and exactly so long."""
        return self.path.parent == store.directory.resolve() and self.nbytes == nbytes

    def is_ours_alone(self) -> bool:
        """True when nothing else has these bytes, so that they may change."""
        try:
            return self.path.stat().st_nlink == 1
        except FileNotFoundError:
            return False

    def view(self) -> memoryview:
        """The bytes, writable. Raises OSError, and EOFError when somebody emptied the file."""
        if self._mapped is None:
            take = _Mapped if self.mappings is None else self.mappings.take
            self._mapped = take(self.path)
        return memoryview(self._mapped.map)

    def close(self) -> None:
        """Unmap, or hand the mapping on; the file stays."""
        if self._mapped is not None:
            if self.mappings is None:
                self._mapped.close()
            else:
                self.mappings.keep(self._mapped)
            self._mapped = None


def _reserve(path: Path, nbytes: int) -> None:
    """Make the file that long, with memory for all of it.

    What a full file system cannot give is an error here, and would be SIGBUS when it is touched. A
    file that was whole is not gone through again, which would take as long as filling it.
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
    """Nodes that share a machine may share a directory; their slots have the same names."""
    return directory.resolve() / f"{_prefix_of(segment.parent)}{segment.name}"


def _prefix_of(folder: Path) -> str:
    return f"{_PREFIX}{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}."


def remove_image(segment: Path) -> None:
    """Remove the image of the slot at `segment` and the link to it, if it has them."""
    remove_link(_link_of(segment))


def remove_link(link: Path) -> None:
    """The same, by the link."""
    image = link.resolve()
    # An image that cannot be removed (its file system is read-only now) is a stray from now on.
    with contextlib.suppress(OSError):
        if image.name.startswith(_PREFIX):
            image.unlink()
    link.unlink(missing_ok=True)


def images_of(directory: Path, folder: Path) -> list[tuple[Path, str]]:
    """Every image in `directory` of slots in `folder`, and the slot's name."""
    prefix = _prefix_of(folder)
    return [(p, p.name.removeprefix(prefix)) for p in directory.resolve().glob(f"{prefix}*")]


def memory_kind(directory: Path) -> str:
    """`tmpfs` or `dax` where files in `directory`, which exists, are memory that can be mapped;
    else empty."""
    if filesystem_of(directory.resolve()) == "tmpfs":
        return "tmpfs"
    return "dax" if _is_dax(directory) else ""


def filesystem_of(path: Path, mounts: Iterable[str] | None = None) -> str:
    """The type of the file system that an absolute path is on, by the kernel's list of mounts.

    Touches nothing but that list: a file system that hangs does not hang the caller.
    """
    if mounts is None:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").split("\n")[:-1]
    best, kind = Path("/"), ""
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        # Blanks, line feeds and backslashes are written in octal.
        point = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields.split(" ")[4]))
        # Of two at the same point the later one covers the earlier.
        if (point == path or point in path.parents) and len(point.parts) >= len(best.parts):
            best, kind = point, rest.split()[0]
    return kind


def _is_dax(directory: Path) -> bool:
    """Whether a file there is the device's own memory: the kernel grants MAP_SYNC for no other.

    This asks about the file itself, which may have been told to be DAX whatever the mount says.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.truncate(mmap.PAGESIZE)
            map_in_sync(file.fileno())
    except OSError:
        return False
    return True


def map_in_sync(fd: int) -> None:
    """Map a page in a way that the kernel grants for memory that lasts; and let it go.

    Raises OSError: EOPNOTSUPP for any other file, tmpfs included; EINVAL before Linux 4.15.
    """
    mmap.mmap(fd, mmap.PAGESIZE, flags=_MAP_SHARED_VALIDATE | _MAP_SYNC).close()


def place_for_slots(config: Config) -> LocalStore | None:
    """The local level's store, where slots are to be files of it; makes its directory."""
    if not _wanted(config):
        return None
    store = LocalStore(config.directory)
    try:
        store.create()
        return store if memory_kind(store.directory) else None
    except OSError:
        return None  # the first commit will say what is wrong there


def expected(config: Config) -> bool:
    """The same, without touching the directory, which may hang; a DAX one is not recognised."""
    return _wanted(config) and filesystem_of(Path(config.directory)) == "tmpfs"


def most_files(config: Config, slots: int) -> int:
    """How many images a rank has at most: in slots, committed, and given back for reuse.

    What is committed is often still in a slot, and is then one file. Versions that are kept beyond
    `local_keep_last` come on top.
    """
    return slots + config.local.keep_last + 1


def told(config: Config, slots: int, shard_bytes: int) -> str:
    """In words and bytes, what was decided."""
    return (
        f"{config.directory} is memory ({memory_kind(Path(config.directory))}): slots are files "
        "there, and versions are committed without a copy. A rank takes up to "
        f"{most_files(config, slots)} x {shard_bytes} bytes of it, and more for versions that are "
        "kept beyond local_keep_last"
    )


def _wanted(config: Config) -> bool:
    # What codecs make of a shard are other bytes than the slot's.
    return config.uses("local") and config.local.in_place and not config.local.codecs
