"""The bytes of an imported version: one shard, made window by window from the source's tensors.

Nothing is held twice: a tensor of a mapped file is read when its window is made.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tierckpt.format.facts import VersionFacts
from tierckpt.format.layout import Block, plan_layout
from tierckpt.format.manifest import Manifest, digest
from tierckpt.format.shard_file import encode_header, rank_state_blocks
from tierckpt.format.version_records import ShardRecord
from tierckpt.state import tree_codec
from tierckpt.storage.persistent import VersionName

WINDOW_BYTES = 4 << 20


class VersionImage:
    """A source for the stores. The tensors must not change while it is in use. One thread."""

    def __init__(
        self,
        facts: VersionFacts,
        tensors: Mapping[str, torch.Tensor],
        tree: bytes,
        structure: Mapping[str, Any],
        tied: Mapping[str, str],
    ) -> None:
        """`tensors` by the names of their entries; `tree` is the encoded rank tree."""
        self._facts, self._tensors, self._tree = facts, tensors, tree
        specs = tree_codec.specs_of([*tensors.items()])
        self._layout = plan_layout(specs, [], 0, 1)
        self._header, self._data_bytes = encode_header(self._layout, len(tree), structure, tied)
        self._digests: list[bytes] = []
        self._flat: tuple[str, torch.Tensor] | None = None

    @property
    def shard(self) -> int:
        """See `Source`."""
        return 0

    @property
    def most_bytes(self) -> int:
        """Length of the shard."""
        return len(self._header) + self._data_bytes

    @property
    def base(self) -> VersionName | None:
        """See `Source`."""
        return None

    @property
    def still_sealed(self) -> Callable[[], bool]:
        """See `Source`."""
        return lambda: True

    def is_stored_as(self, record: ShardRecord) -> bool:
        """See `Source`."""
        return False

    @property
    def manifest(self) -> bytes:
        """See `Source`."""
        assert self._digests, "no window was read"
        return Manifest(
            facts=self._facts,
            shard=0,
            image_bytes=self.most_bytes,
            header_bytes=len(self._header),
            rank_state_bytes=len(self._tree),
            digests=b"".join(self._digests),
            created_seconds=time.time(),
        ).encode()

    def windows(self) -> Iterator[memoryview]:
        """See `Source`. A window is valid until the next one is requested."""
        self._digests = []
        # Freed with its last view: the error of a store may have some.
        window, filled = memoryview(mmap.mmap(-1, WINDOW_BYTES)), 0
        for part in self._parts():
            self._digests.append(digest(part))
            while part:
                count = min(len(part), WINDOW_BYTES - filled)
                window[filled : filled + count] = part[:count]
                filled, part = filled + count, part[count:]
                if filled == WINDOW_BYTES:
                    yield window
                    filled = 0
        if filled:
            yield window[:filled]

    def _parts(self) -> Iterator[memoryview]:
        """The header, and all blocks."""
        yield memoryview(self._header)
        for block in self._layout.blocks:
            yield self._block(block)
        room = bytearray(self._data_bytes - self._layout.nbytes)
        room[: len(self._tree)] = self._tree
        begin = 0
        for count in rank_state_blocks(len(room)):
            yield memoryview(room)[begin : begin + count]
            begin += count

    def _block(self, block: Block) -> memoryview:
        if len(block.parts) == 1:
            return self._part(*block.parts[0])
        return memoryview(b"".join(self._part(*part) for part in block.parts))

    def _part(self, piece: int, low: int, high: int) -> memoryview:
        name = self._layout.pieces[piece].spec.name
        if self._flat is None or self._flat[0] != name:
            self._flat = name, tree_codec.flat(self._tensors[name])
        found: memoryview = tree_codec.as_bytes(self._flat[1][low:high]).numpy().data
        return found


__all__ = ["VersionImage"]
