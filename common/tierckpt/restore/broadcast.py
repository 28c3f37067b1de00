"""What one rank read, shown to all: mapped where all see it, else broadcast window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.core.restore_plan import Source
from tierckpt.errors import FormatError
from tierckpt.format.shard_summary import ShardSummary
from tierckpt.group import Group
from tierckpt.restored import TransferStats

from .shard_image import ShardImage

BROADCAST_BYTES = 64 * 1024 * 1024
"""A window: all that a rank holds of what others read."""
MAPPED_BYTES = 8 * 1024 * 1024
"""A window of what a rank maps, which it passes over where it has no use for it."""


def clear(window: memoryview) -> None:
    """Make it zeros; takes no memory."""
    torch.frombuffer(window, dtype=torch.uint8).zero_()


Visit = Callable[[int, int, memoryview], None]
"""`visit(shard, offset, window)`."""
Wants = Callable[[int, int, int], bool]
"""`wants(shard, low, high)`: whether a visit of these bytes has any use for them."""


def all_of_it(shard: int, low: int, high: int) -> bool:
    """Who wants every byte."""
    return True


class ShardBroadcaster:
    """The group's broadcasts, counted. Training thread; all ranks call it alike."""

    def __init__(self, group: Group | ErrorBarrier, volume: TransferStats) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._volume = group, volume
        self.trouble = ""
        """Why what was verified cannot be shown any more, in words."""
        self.broken = False
        """A broadcast failed: there is nobody to go on with."""
        self._buffer: torch.Tensor | None = None

    def broadcast(self, window: memoryview, source: int) -> None:
        """Make `window` on every rank what it is on rank `source`."""
        data = torch.frombuffer(window, dtype=torch.uint8)
        self.broken = True
        self._group.broadcast(data, source)
        self.broken = False
        if source != self.rank:
            self._volume.received(len(window))

    def trouble_of_any(self) -> str:
        """Any rank's `trouble`: what it sent nobody can use. Collective."""
        told = dict.fromkeys(why for why in self._group.all_gather_object(self.trouble) if why)
        return "; ".join(list(told)[:4])

    def make_room(self, outlines: Iterable[ShardSummary]) -> None:
        """Take the memory that showing these takes, while an error leaves nobody waiting."""
        longest = (min(o.nbytes, max(BROADCAST_BYTES, o.header_bytes)) for o in outlines)
        self._buffer = torch.empty(max(longest, default=0), dtype=torch.uint8, device="cpu")

    def fail(self, shard: int, error: Exception) -> None:
        """This rank cannot go on; it goes on sending and receiving, and `trouble` says why."""
        why = f"shard {shard} (rank {self.rank}): {type(error).__name__}: {error}"
        self.trouble = self.trouble or why

    def show(
        self,
        source: Source,
        outline: ShardSummary,
        image: ShardImage | None,
        visit: Visit,
        wants: Wants = all_of_it,
    ) -> None:
        """Let all ranks visit a shard; `image` is there where `source.direct`, and at its reader.

        The whole header is in the first window. One that came from another rank is gone after the
        visit. What a rank maps and, asked in order, does not want is passed over behind the header:
        to touch it takes half as long as to copy it.

        What this rank maps may have left memory since it was verified: where it cannot be read
        again the visits end, `trouble` says why, and the others get zeros in its place. The visits
        end, and `trouble` says why, also where one raises: the others go on.
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
        except FormatError as error:  # zeros in its place
            self.trouble = f"shard {shard} has no header: {error}"
        except Exception as error:
            self.fail(shard, error)

    def _window(self, image: ShardImage | None, low: int, high: int) -> memoryview:
        """Part of a shard, or room for it."""
        if image is not None and not self.trouble:
            try:
                image.touch(low, high)
            except Exception as error:
                self.trouble = (
                    f"{image.manifest.key} was sound and cannot be read again (rank {self.rank}): "
                    f"{error}. What is live is neither old nor new: restore again, or start again"
                )
            else:
                return image.view[low:high]
        window = self._room(high - low)
        if image is not None:
            clear(window)
        return window

    def _room(self, nbytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._buffer.numpy().data[:nbytes]
