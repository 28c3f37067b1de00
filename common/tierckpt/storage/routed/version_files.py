"""The files of one version while a program writes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tierckpt.errors import TierckptError

from .folders import checked_name
from .source_file import SourceFile


class VersionFiles:
    """The files of the version in progress, see `Files.version`. One thread."""

    complete: bool | None = None
    """True once the version is complete in the memory of all ranks, False if it is lost; None while
    it is in progress."""

    def __init__(self, folder: Path, number: int, name: str) -> None:
        self._folder = folder
        self.number = number
        """Number of the version."""
        self.name = name
        """Name of the version; its number as text if none was given."""
        self._routed: dict[str, Path] = {}

    def route(self, name: str | os.PathLike[str]) -> str:
        """Add a file to the version; returns the path at which to write it.

        The path is in a folder of this rank alone, with the folders of `name` in it. The file must
        be closed when the version ends. Not collective: a rank may route any number of files, and
        two ranks may use the same name. After a restart each rank finds its own.

        Raises TierckptError if the version has ended, or for a name that is not relative.
        """
        if self.complete is not None:
            raise TierckptError(f"route({os.fspath(name)!r}): version {self.name} has ended")
        key = checked_name(name)
        path = self._folder / key
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._routed[key] = path
        return str(path)

    @property
    def routed(self) -> dict[str, str]:
        """The paths of all files, by name."""
        return {name: str(path) for name, path in self._routed.items()}

    def sources(self, say: Callable[[str], None]) -> list[SourceFile]:
        """All files, complete. Files beside them get a notice by `say`: they are not stored. Raises
        TierckptError if one is missing, or see `SourceFile.at`."""
        found = [SourceFile.at(name, self._folder) for name in sorted(self._routed)]
        known = set(self._routed.values())
        there = (Path(top) / file for top, _, files in os.walk(self._folder) for file in files)
        if strays := sorted(str(p.relative_to(self._folder)) for p in there if p not in known):
            say(
                f"{', '.join(strays[:4])}: written without route(), so version {self.name} does "
                "not contain it. Call route() with the name of each file"
            )
        return found


__all__ = ["VersionFiles"]
