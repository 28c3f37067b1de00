"""A golden directory as an archive, and back.

What the product notes of the place where a job ran is replaced on the way: the folders and the
user in names, links and records. Records are checksummed JSON (FORMAT.md), so their checksums are
computed again when the folders are known.
"""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path

import xxhash

HERE = Path(__file__).parent
ARCHIVES = HERE / "archives"

TAKEN_SECONDS = 1_700_000_000
"""The time of all files in an archive."""
RECORDS = re.compile(r"(fork\.json|runs/.*\.json|.*\.hold|.*\.fork|rollback.*\.json|lease\..*)")
PLAIN = re.compile(r".*(\.lock|/\.claim\.[^/]*)")
CHECKSUM_DIGITS = 32


@dataclass(frozen=True)
class Places:
    """Where a golden directory is unpacked: `root` has disks, `shm` is in a memory file system."""

    root: Path
    shm: Path

    def words(self) -> dict[str, str]:
        """Texts of this place, and the words for them in archives and expectations."""
        return {str(self.shm): "@SHM@", str(self.root): "@ROOT@"}

    def general(self, text: str) -> str:
        for here, word in self.words().items():
            text = text.replace(here, word)
        return text

    def here(self, text: str) -> str:
        for here, word in self.words().items():
            text = text.replace(word, here)
        return text


def pack(places: Places, archive: Path) -> None:
    """Write all files under both folders."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9, format=tarfile.GNU_FORMAT) as tar:
        seen: dict[int, str] = {}
        for top, name in ((places.root, "root"), (places.shm, "shm")):
            for path in sorted(top.rglob("*")):
                inside = f"{name}/{path.relative_to(top)}".replace(_user(), "tierckpt-USER")
                _add(tar, path, inside, places, seen)
    archive.write_bytes(packed.getvalue())


def _add(tar: tarfile.TarFile, path: Path, name: str, places: Places, seen: dict[int, str]) -> None:
    info = tarfile.TarInfo(name)
    info.mtime = TAKEN_SECONDS
    status = path.lstat()
    if stat.S_ISSOCK(status.st_mode):
        return
    info.mode = 0o700 if path.is_dir() else 0o600
    if path.is_symlink():
        info.type, info.linkname = tarfile.SYMTYPE, places.general(os.readlink(path))
        tar.addfile(info)
    elif path.is_dir():
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    elif status.st_nlink > 1 and status.st_ino in seen:
        info.type, info.linkname = tarfile.LNKTYPE, seen[status.st_ino]
        tar.addfile(info)
    else:
        seen[status.st_ino] = name
        content = path.read_bytes()
        if RECORDS.fullmatch(_inside(name)) or PLAIN.fullmatch(name):
            content = _nameless(places.general(content.decode())).encode()
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))


def _nameless(text: str) -> str:
    """Without the names of machine and user, the commit, and the process of a lock."""
    text = re.sub(r'"(host|user|git)": "[^"]*"', r'"\1": "\1"', text)
    return re.sub(r"\A\d+$", "1", text, count=1, flags=re.MULTILINE)


def unpack(archive: Path, places: Places) -> None:
    """Make all files again, for these folders and this user."""
    with tarfile.open(archive, "r:xz") as tar:
        for info in tar:
            target = _target(info.name, places)
            target.parent.mkdir(parents=True, exist_ok=True)
            if info.isdir():
                target.mkdir(mode=info.mode, exist_ok=True)
            elif info.issym():
                target.symlink_to(places.here(info.linkname))
            elif info.islnk():
                target.hardlink_to(_target(info.linkname, places))
            else:
                reader = tar.extractfile(info)
                assert reader is not None
                content = reader.read()
                if RECORDS.fullmatch(_inside(info.name)):
                    content = _record(places.here(content.decode()))
                elif PLAIN.fullmatch(info.name):
                    content = places.here(content.decode()).encode()
                target.write_bytes(content)
                target.chmod(info.mode)


def _target(name: str, places: Places) -> Path:
    top, _, inside = name.replace("tierckpt-USER", _user()).partition("/")
    return {"root": places.root, "shm": places.shm}[top] / inside


def _inside(name: str) -> str:
    """The part of a name that FORMAT.md has: the folder `runs` or nothing, and the file."""
    parts = name.split("/")
    return "/".join(parts[-2:] if parts[-2] == "runs" else parts[-1:])


def _record(text: str) -> bytes:
    """A record with the checksum of its first line."""
    first, newline, rest = text.partition("\n")
    if len(rest.strip()) == CHECKSUM_DIGITS:
        rest = xxhash.xxh3_128_hexdigest(first.encode()) + rest.removeprefix(rest.strip())
    return (first + newline + rest).encode()


def _user() -> str:
    return f"tierckpt-{os.getuid()}"
