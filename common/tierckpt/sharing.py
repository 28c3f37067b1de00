"""What one rank read, shown to all: mapped where all see it, else broadcast window by window."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .group import Group
from .images import Image
from .inventory import Source
from .outline import Outline
from .restored import Volume

BROADCAST_BYTES = 64 * 1024 * 1024
"""A window: all that a rank holds of what others read."""

Visit = Callable[[int, int, memoryview], None]
"""`visit(shard, offset, window)`."""


class Courier:
    """The group's broadcasts, counted. Training thread; all ranks call it alike."""

    def __init__(self, group: Group, volume: Volume) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._volume = group, volume
        self._buffer: torch.Tensor | None = None

    def broadcast(self, window: memoryview, source: int) -> None:
        """Make `window` on every rank what it is on rank `source`."""
        self._group.broadcast(torch.frombuffer(window, dtype=torch.uint8), source)
        if source != self.rank:
            self._volume.received(len(window))

    def show(self, source: Source, outline: Outline, image: Image | None, visit: Visit) -> None:
        """Let all ranks visit a shard; `image` is there where `source.direct`, and at its reader.

        The whole header is in the first window. One that came from another rank is gone after the
        visit.
        """
        nbytes = outline.nbytes
        if source.direct:
            assert image is not None
            visit(source.shard, 0, image.view[:nbytes])
            return
        low = 0
        while low < nbytes:
            high = min(max(low + BROADCAST_BYTES, outline.header_bytes), nbytes)
            window = self._room(high - low) if image is None else image.view[low:high]
            self.broadcast(window, source.reader)
            visit(source.shard, low, window)
            low = high

    def _room(self, nbytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer.numpy().data[:nbytes]
