"""Targets of `tierckpt export`: a file or a folder that appears as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tierckpt import _faults
from tierckpt.errors import ConfigError, TierckptError
from tierckpt.storage.files import durable


class Target:
    """A file or folder to write. It is made under a temporary name beside it, and renamed."""

    def __init__(self, out: Path, force: bool, recognizes: Callable[[Path], bool]) -> None:
        """`force`: replace what is there; a folder only if it is empty, or if `recognizes` says
        that it is a checkpoint. Raises ConfigError if something is there that stays, or if its
        folder does not exist."""
        if os.path.lexists(out) and not force:
            raise ConfigError(f"{out} exists; --force replaces it")
        if out.is_dir() and any(out.iterdir()) and not recognizes(out):
            raise ConfigError(
                f"{out} is a folder with other things than a checkpoint of this format, and is not "
                "replaced; give another name"
            )
        if not out.parent.is_dir():
            text = f"{out} cannot be written: the directory {out.parent} does not exist"
            raise ConfigError(text)
        self._out = out = out if out.name else out.absolute()  # "."
        self._temp = out.with_name(f".{out.name}.{os.getpid()}{out.suffix}")

    def fill(self, write: Callable[[Path], list[str]], keep_rights: bool = False) -> list[str]:
        """Have `write` make the file or folder, and give it the name. Returns the result of
        `write`. `keep_rights`: the access rights are those that `write` gave. Raises ConfigError if
        it cannot be written; nothing is left then."""
        out, temp = self._out, self._temp
        try:
            remarks = write(temp)
            _make_durable(temp, keep_rights)
            _faults.point("target", op="rename")
            self._replace()
        except TierckptError:
            raise
        except Exception as error:  # torch and safetensors raise their own errors for a full disk
            raise ConfigError(f"{out} cannot be written: {error}") from error
        finally:
            _remove(temp)
        return remarks

    def _replace(self) -> None:
        """Give the new one its name. A folder cannot replace another one in one step: the old one
        is moved away first."""
        out, temp = self._out, self._temp
        old = out.with_name(f".{out.name}.{os.getpid()}.old")
        if os.path.lexists(out) and (out.is_dir() or temp.is_dir()):
            out.rename(old)
        try:
            temp.replace(out)
        except OSError:
            if os.path.lexists(old):
                old.rename(out)
            raise
        durable.sync(out.parent)
        _remove(old)

    @property
    def nbytes(self) -> int:
        """Size of the file, or of all files in the folder."""
        return sum(file.stat().st_size for file in _files_in(self._out))


def _files_in(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]


def _make_durable(path: Path, keep_rights: bool) -> None:
    """Sync all files, and give them the access rights of any new file here, unless they keep their
    own: safetensors makes private ones."""
    probe = path.with_name(f"{path.name}.rights")
    probe.touch()
    rights = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in _files_in(path):
        with file.open("rb") as opened:
            if not keep_rights:
                os.fchmod(opened.fileno(), rights)
            os.fsync(opened.fileno())


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


__all__ = ["Target"]
