"""Files that a program keeps beside the state: each rank's own, in every version until replaced.

Each is a mapped file without a name, or a decoded tensor after a restore. A version refers to these
bytes, and the copier copies them: the training thread copies none.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierckpt.storage.routed.source_file import SourceFile

from . import tree_codec

FILES = "files"
"""Name of the files in a rank's tree."""


@dataclass(frozen=True)
class KeptFile:
    """A file's bytes, which never change, and its permissions."""

    content: torch.Tensor
    mode: int

    @staticmethod
    def of(source: SourceFile) -> KeptFile:
        """Take over a complete file: it is mapped, and its name is removed. Raises OSError."""
        content = torch.empty(0, dtype=torch.uint8)
        if source.nbytes:
            fd = os.open(source.path, os.O_RDONLY)
            try:
                # Private and writable: torch has no tensors that cannot be written.
                access = mmap.PROT_READ | mmap.PROT_WRITE
                mapped = mmap.mmap(fd, source.nbytes, mmap.MAP_PRIVATE, access)
            finally:
                os.close(fd)
            content = torch.frombuffer(mapped, dtype=torch.uint8)
        os.unlink(source.path)
        return KeptFile(content, source.mode)


class FileWindows:
    """Fills restored files from the windows of their shard, so that none is in memory twice."""

    def __init__(
        self, ranges: Mapping[str, tuple[int, int]], contents: Mapping[str, torch.Tensor]
    ) -> None:
        """`ranges`: of each file in the shard; those without a tensor are left out."""
        self._parts = [
            (low, high, contents[name].numpy())
            for name, (low, high) in ranges.items()
            if name in contents
        ]

    def wants(self, low: int, high: int) -> bool:
        """True if these bytes of the shard belong to a file."""
        return any(begin < high and low < end for begin, end, _ in self._parts)

    def take(self, offset: int, window: memoryview) -> None:
        """Copy the parts of files that this window has."""
        data = np.frombuffer(window, np.uint8)
        for begin, end, content in self._parts:
            low, high = max(begin, offset), min(end, offset + len(window))
            if low < high:
                content[low - begin : high - begin] = data[low - offset : high - offset]


class RoutedState:
    """One rank's files. Training thread."""

    def __init__(self) -> None:
        self.kept: dict[str, KeptFile] = {}
        """By name."""

    def replace(self, sources: Iterable[SourceFile]) -> None:
        """Take these files in place of all earlier ones. Raises OSError, with nothing replaced."""
        self.kept = {source.name: KeptFile.of(source) for source in sources}

    def pack(self, arena: tree_codec.Arena) -> dict[str, Any]:
        """A node for a rank's tree, with the bytes in `arena`; they are not copied."""
        contents = {}
        for name, file in self.kept.items():
            arena.tensors.append(file.content)
            contents[name] = {tree_codec.TAG: "tensor", "v": len(arena.tensors) - 1}
        return {"contents": contents, "modes": {n: f.mode for n, f in self.kept.items()}}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Take the files of a decoded tree; none if it has none."""
        contents = (saved or {}).get("contents", {})
        modes = (saved or {}).get("modes", {})
        self.kept = {name: KeptFile(c, int(modes[name])) for name, c in contents.items()}

    def write(self, folder: Path) -> dict[str, str]:
        """Write all files into a folder; returns their paths by name. Raises OSError."""
        paths = {}
        for name, file in self.kept.items():
            path = folder / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("wb") as out:
                out.write(file.content.numpy().data)
            path.chmod(file.mode)
            paths[name] = str(path)
        return paths


__all__ = ["FILES", "FileWindows", "KeptFile", "RoutedState"]
