"""The shard of one rank's files: an entry for each file, and a small state with their modes.

An entry `file/<name>` is a tensor of bytes that each rank stores for itself (FORMAT.md, "Shard").
So levels, redundancy, flushes and commands treat a version of files as any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tierckpt.errors import TierckptError
from tierckpt.format.layout import Layout, TensorSpec, plan_layout
from tierckpt.format.manifest import digest
from tierckpt.format.shard_file import ShardHeader, encode_header, rank_state_blocks
from tierckpt.storage.routed.folders import checked_name
from tierckpt.storage.routed.source_file import PREFIX, SourceFile


@dataclass(frozen=True)
class FilesShard:
    """One rank's shard before it is copied: pure bookkeeping."""

    files: tuple[SourceFile, ...]
    layout: Layout
    header: bytes
    data_bytes: int
    tree: bytes

    @staticmethod
    def of(files: Sequence[SourceFile], rank: int, ranks: int, about: dict[str, Any]) -> FilesShard:
        """Plan the shard. `about` is stored with it; values of JSON only."""
        specs = [TensorSpec(PREFIX + f.name, "uint8", (f.nbytes,), None, 1) for f in files]
        layout = plan_layout([], specs, rank, ranks)
        modes = {f.name: f.mode for f in files}
        tree = encode_state({**about, "modes": modes})
        header, data_bytes = encode_header(layout, len(tree), {})
        return FilesShard(tuple(files), layout, header, data_bytes, tree)

    @property
    def image_bytes(self) -> int:
        """Size of the shard."""
        return len(self.header) + self.data_bytes

    @property
    def blocks(self) -> int:
        """Number of blocks with a checksum, without the header."""
        return len(self.layout.blocks) + len(self._state_blocks)

    @property
    def _state_blocks(self) -> list[int]:
        return rank_state_blocks(self.data_bytes - self.layout.nbytes)

    def fill(self, image: memoryview, remove: bool = True) -> bytes:
        """Copy the files into `image`; returns the digests of the header and all blocks. Each block
        is hashed while it is in the core's cache. With `remove`, each file is removed as soon as it
        is copied. Raises TierckptError if a file changes meanwhile, and OSError."""
        base = len(self.header)
        image[:base] = self.header
        digests = [digest(image[:base])]
        with _OpenFiles(self.files, self.layout, remove) as opened:
            for block in self.layout.blocks:
                for index, start, stop in block.parts:
                    low = base + self.layout.pieces[index].offset
                    opened.read(index, start, image[low + start : low + stop])
                low = base + block.offset
                digests.append(digest(image[low : low + block.nbytes]))
        low, high = base + self.layout.nbytes, self.image_bytes
        image[low:high] = self.tree.ljust(high - low, b"\0")
        for nbytes in self._state_blocks:
            digests.append(digest(image[low : low + nbytes]))
            low += nbytes
        return b"".join(digests)


class _OpenFiles:
    """The files in the order of a layout's pieces, one open at a time."""

    def __init__(self, files: Sequence[SourceFile], layout: Layout, remove: bool) -> None:
        by_name = {PREFIX + f.name: f for f in files}
        self._files = [by_name[piece.spec.name] for piece in layout.pieces]
        self._remove = remove
        self._index, self._fd = -1, -1

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def read(self, index: int, offset: int, into: memoryview) -> None:
        if index != self._index:
            self._close()
            self._fd, self._index = os.open(self._files[index].path, os.O_RDONLY), index
        while into:
            count = os.preadv(self._fd, [into], offset)
            if not count:
                raise self._changed(self._files[index])
            into, offset = into[count:], offset + count

    def _close(self) -> None:
        if self._fd < 0:
            return
        file, size = self._files[self._index], os.fstat(self._fd).st_size
        os.close(self._fd)
        self._fd = -1
        if size != file.nbytes:
            raise self._changed(file)
        if self._remove:
            os.unlink(file.path)

    def _changed(self, file: SourceFile) -> TierckptError:
        return TierckptError(
            f"{file.name!r} changed while it was stored: close each file before the version ends"
        )


def encode_state(files: dict[str, Any]) -> bytes:
    """An encoded tree (FORMAT.md, "Encoded tree") with this object as `files`, and nothing else."""
    empty: dict[str, Any] = {"groups": {}, "odd": {}, "extra": {}, "extra_per_rank": {}}
    text = json.dumps({"tree": {**empty, "files": files}, "tensors": []}, separators=(",", ":"))
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


def decode_state(data: bytes) -> dict[str, Any] | None:
    """The object `files` of an encoded tree; None if the version has no files of its own."""
    length = int.from_bytes(data[:8], "little")
    found: dict[str, Any] | None = json.loads(data[8 : 8 + length])["tree"].get("files")
    return found


def entries_of(header: ShardHeader) -> Iterator[tuple[str, int, int]]:
    """Yield name, begin and end of each file in the shard with this header. Raises TierckptError
    for a name that would leave the folder."""
    for piece in header.pieces:
        if piece.spec.name.startswith(PREFIX):
            low = header.header_bytes + piece.offset
            yield checked_name(piece.spec.name.removeprefix(PREFIX)), low, low + piece.nbytes


__all__ = [
    "FilesShard",
    "decode_state",
    "encode_state",
    "entries_of",
]
