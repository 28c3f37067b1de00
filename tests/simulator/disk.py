"""What a crash of a node leaves on its disk: what was synchronised, and by chance some of the rest.

POSIX promises no more: the bytes of a file that was synchronised, and the names of a folder that
was. Of all that came later each change may be there or not, in any order, and of a file that was
not synchronised any part. (ext4 keeps more; a program may not count on it.)
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from pathlib import Path

File = tuple[int, int]
"""Device and inode."""


class Disk:
    """One file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bytes: dict[File, bytes] = {}
        """The bytes of each file when it was synchronised last."""
        self._names: dict[str, dict[str, File]] = {str(root): {}}
        """The names in each folder when it was synchronised last."""
        self._folders: set[File] = set()

    def synchronised(self, path: str, fd: int) -> None:
        """`fsync` of a file or a folder on this disk has returned."""
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            self._names[path] = self._now(Path(path))
        elif stat.S_ISREG(found.st_mode):
            self._bytes[found.st_dev, found.st_ino] = _read(f"/proc/self/fd/{fd}")

    def _now(self, folder: Path) -> dict[str, File]:
        names = {}
        for each in folder.iterdir():
            found = each.lstat()
            names[each.name] = found.st_dev, found.st_ino
            if stat.S_ISDIR(found.st_mode):
                self._folders.add(names[each.name])
        return names

    def replace(self, path: Path, content: bytes) -> None:
        """The bytes of a file have become others, and stay so."""
        found = path.stat()
        path.write_bytes(content)
        self._bytes[found.st_dev, found.st_ino] = content

    def crash(self, chance: random.Random) -> list[str]:
        """Lose what was not synchronised, or a part of it; returns what has changed."""
        changed: list[str] = []
        self._crash(self.root, chance, changed)
        return changed

    def _crash(self, folder: Path, chance: random.Random, changed: list[str]) -> None:
        before, now = self._names.get(str(folder), {}), self._now(folder)
        for name in sorted({*before, *now}):
            path = folder / name
            if before.get(name) == now.get(name):
                continue
            if chance.random() < 0.5:
                continue  # the change has reached the disk
            changed.append(f"{path.relative_to(self.root)}")
            if name in now:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            old = before.get(name)
            if old is not None and old not in self._folders:
                path.write_bytes(self._bytes.get(old, b""))
                found = path.lstat()
                self._bytes[found.st_dev, found.st_ino] = self._bytes.get(old, b"")
        for path in sorted(folder.iterdir()):
            if path.is_symlink():
                continue
            if path.is_dir():
                self._crash(path, chance, changed)
            elif path.is_file():
                self._tear(path, chance, changed)
        self._names[str(folder)] = self._now(folder)

    def _tear(self, path: Path, chance: random.Random, changed: list[str]) -> None:
        found = path.lstat()
        file = found.st_dev, found.st_ino
        content, safe = _read(str(path)), self._bytes.get(file)
        if content != safe:
            kinds = [content, safe or b"", content[: chance.randint(0, len(content))]]
            left = chance.choice(kinds)
            if left != content:
                changed.append(
                    f"{path.relative_to(self.root)}: {len(left)} of {len(content)} bytes"
                )
                mode = stat.S_IMODE(found.st_mode)
                path.chmod(0o600)
                path.write_bytes(left)
                path.chmod(mode)
            content = left
        self._bytes[file] = content


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
