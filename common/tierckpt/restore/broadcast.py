"""Shard data for all ranks: mapped where every rank sees the file, else broadcast by windows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tierckpt._text import in_words
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.core.restore_plan import Source
from tierckpt.errors import FormatError
from tierckpt.format.shard_summary import ShardSummary
from tierckpt.group import Group
from tierckpt.restored import TransferStats

from .shard_image import ShardImage

BROADCAST_BYTES = 64 * 1024 * 1024
"""Size of a broadcast window: the most that a rank holds of shards that other ranks read."""
MAPPED_BYTES = 8 * 1024 * 1024
"""Size of a window of a mapped shard. A rank skips the windows it does not need."""


def clear(window: memoryview) -> None:
    """Fill the window with zeros; takes no memory."""
    np.frombuffer(window, dtype=np.uint8).fill(0)


def _as_buffer(window: memoryview) -> Any:
    """The window as a buffer of `Group.broadcast`: a tensor, or a numpy array without torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return np.frombuffer(window, dtype=np.uint8)
    return torch.frombuffer(window, dtype=torch.uint8)


Visit = Callable[[int, int, memoryview], None]
"""`visit(shard, offset, window)`."""
Wants = Callable[[int, int, int], bool]
"""`wants(shard, low, high)`: whether a visit needs these bytes."""


def all_of_it(shard: int, low: int, high: int) -> bool:
    """The default `wants`: every byte is needed."""
    return True


class ShardBroadcaster:
    """The group's broadcasts, with byte counts. Training thread; all ranks make the same calls."""

    def __init__(self, group: Group | ErrorBarrier, volume: TransferStats) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._volume = group, volume
        self.trouble = ""
        """Why verified bytes can no longer be shown, as text for messages; empty if they can."""
        self.broken = False
        """True after a broadcast failed: this rank can no longer exchange anything with the
        others."""
        self._buffer: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def broadcast(self, window: memoryview, source: int) -> None:
        """Copy `window` from rank `source` to all ranks."""
        data = _as_buffer(window)
        self.broken = True
        self._group.broadcast(data, source)
        self.broken = False
        if source != self.rank:
            self._volume.received(len(window))

    def trouble_of_any(self) -> str:
        """The `trouble` of all ranks, joined: bytes sent by such a rank are unusable.
        Collective."""
        reasons = dict.fromkeys(why for why in self._group.all_gather_object(self.trouble) if why)
        return "; ".join(list(reasons)[:4])

    def make_room(self, outlines: Iterable[ShardSummary]) -> None:
        """Allocate the broadcast buffer early, when an error does not leave other ranks waiting."""
        longest = (min(o.nbytes, max(BROADCAST_BYTES, o.header_bytes)) for o in outlines)
        self._buffer = np.empty(max(longest, default=0), dtype=np.uint8)

    def fail(self, shard: int, error: Exception) -> None:
        """Record in `trouble` that this rank failed; it continues to send and receive."""
        why = f"shard {shard} (rank {self.rank}): {in_words(error)}"
        self.trouble = self.trouble or why

    def show(
        self,
        source: Source,
        outline: ShardSummary,
        image: ShardImage | None,
        visit: Visit,
        wants: Wants = all_of_it,
    ) -> None:
        """Let all ranks visit a shard. `image` is given on all ranks if `source.direct`, else only
        on the reader.

        The first window contains the whole header. A window from another rank is valid only during
        the visit. Mapped bytes after the header that `wants` refuses (asked in order) are skipped:
        touching them takes half as long as copying them.

        Mapped bytes may have left memory since they were verified. If they cannot be read again,
        the visits end, `trouble` says why, and the other ranks receive zeros. The same holds if a
        visit raises: the visits of this rank end, the other ranks continue.
        """
        nbytes, high = outline.nbytes, 0
        window_bytes = MAPPED_BYTES if source.direct else BROADCAST_BYTES
        while (low := high) < nbytes:
            high = min(max(low + window_bytes, outline.header_bytes), nbytes)
            if source.direct and low and not self._wants(wants, source.shard, low, high):
                continue
            window = self._window(image, low, high)
            if not source.direct:
                self.broadcast(window, source.reader)
            if not self.trouble:
                self._visit(visit, source.shard, low, window)

    def _wants(self, wants: Wants, shard: int, low: int, high: int) -> bool:
        try:
            return not self.trouble and wants(shard, low, high)
        except Exception as error:
            self.fail(shard, error)
            return False

    def _visit(self, visit: Visit, shard: int, low: int, window: memoryview) -> None:
        try:
            visit(shard, low, window)
        except FormatError as error:  # zeros were sent instead of the header
            self.trouble = f"shard {shard} has no header: {error}"
        except Exception as error:
            self.fail(shard, error)

    def _window(self, image: ShardImage | None, low: int, high: int) -> memoryview:
        """Part of a shard, or a buffer for it."""
        if image is not None and not self.trouble:
            try:
                image.touch(low, high)
            except Exception as error:
                self.trouble = (
                    f"{image.manifest.key} was sound and can no longer be read (rank {self.rank}): "
                    f"{error}. The live state is partly loaded: restore again, or restart the job"
                )
            else:
                return image.view[low:high]
        window = self._room(high - low)
        if image is not None:
            clear(window)
        return window

    def _room(self, nbytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = np.empty(nbytes, dtype=np.uint8)
        return self._buffer.data[:nbytes]
