"""One member's loop over the windows of an exchange: gather, multiply, scatter, keep.

Members cannot deadlock. In step i a member has offered memory for all messages of the windows i to
i + AHEAD before it waits for anything, and it sends only messages of its own step or of the windows
that it has opened. So the slowest members always find memory for everything that they send, and
wait only for messages that the other members have sent or are sending.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator

from tierckpt.erasure import isal
from tierckpt.erasure.codes import Code, Segment, Stripes
from tierckpt.erasure.exchange_plan import MemberPlan, Round
from tierckpt.erasure.kernels import Product
from tierckpt.format.ids import PAGE_BYTES, round_up

from .inbox import Inbox, Message

WINDOW_BYTES = 1 << 20
"""Small enough for the core's cache, large enough for the socket and the device."""
AHEAD = 1
"""Number of windows in transfer while one is processed. Two gained nothing on a slow link."""
BUFFERED_BYTES = 64 << 20
"""Limit of a member's buffers. When a row has many segments, the windows become smaller."""

Window = tuple[int, int]


def window_bytes_of(code: Code) -> int:
    """Length of the windows: the same for all members, since it depends on the code alone."""
    most = BUFFERED_BYTES // ((AHEAD + 1) * (code.k + code.m))
    return max(PAGE_BYTES, min(WINDOW_BYTES, most // PAGE_BYTES * PAGE_BYTES))


class WindowLoop:
    """Executes `plan` for member `member`, window by window. For one thread; run it once."""

    def __init__(
        self,
        member: int,
        plan: MemberPlan,
        stripes: Stripes,
        image: memoryview,
        inbox: Inbox,
        send: Callable[[int, tuple[int, int, int, int], memoryview], None],
        keep: Callable[[int, memoryview], None],
    ) -> None:
        """`image` is the member's shard. `send(to, at, bytes)` may block. `keep(offset, bytes)`
        gets every byte of the member's parity file once; memory and length are multiples of a
        page."""
        self._member, self._plan, self._stripes = member, plan, stripes
        self._image, self._inbox, self._send, self._keep = image, inbox, send, keep
        self._window_bytes = window_bytes_of(stripes.code)
        library = isal.find()
        self._products = [Product(task.matrix, library) for task in plan.tasks]
        gathered = [s for part in plan.gather for s in part.receives]
        self._kept = [s for part in plan.scatter for s in part.receives]
        made = [s for task in plan.tasks for s in task.outputs]
        # A received segment needs room for the current window and for those in transfer.
        received = [*gathered, *self._kept]
        self._buffers = self._allocate(received, AHEAD + 1) | self._allocate(made, 1)

    def run(self) -> None:
        """Process all windows. Raises the errors of the inbox and of the two callables."""
        windows = list(self._stripes.windows(self._window_bytes))
        for step, window in enumerate(windows[:AHEAD]):
            self._open(window, step)
        for step, window in enumerate(windows):
            if step + AHEAD < len(windows):
                self._open(windows[step + AHEAD], step + AHEAD)
            self._inbox.wait([m for m, _ in self._messages(self._plan.gather, window)])
            self._multiply(window, step)
            self._send_all(self._plan.scatter, window, step)
            self._inbox.wait([m for m, _ in self._messages(self._plan.scatter, window)])
            self._keep_window(window, step)

    def _open(self, window: Window, step: int) -> None:
        """Offer memory for all messages of the window, and send the segments that others gather."""
        for rounds in (self._plan.gather, self._plan.scatter):
            for message, segment in self._messages(rounds, window):
                self._inbox.offer(message, self._view(segment, window, step))
        self._send_all(self._plan.gather, window, step)

    def _multiply(self, window: Window, step: int) -> None:
        for task, product in zip(self._plan.tasks, self._products, strict=True):
            sources = [self._view(s, window, step) for s in task.sources]
            product.run(sources, [self._view(s, window, step) for s in task.outputs])

    def _send_all(self, rounds: Iterable[Round], window: Window, step: int) -> None:
        for part in rounds:
            for segment in part.sends:
                if len(view := self._view(segment, window, step)):
                    self._send(part.to, _at(segment, window), view)

    def _keep_window(self, window: Window, step: int) -> None:
        """Pad the received part of each segment with zeros to full pages, and keep it."""
        low = window[0]
        length = min(self._window_bytes, self._stripes.segment_bytes - low)
        for segment in self._kept:
            buffer = self._buffers[segment, step % (AHEAD + 1)]
            first, last = self._stripes.range_of(segment, window)
            if last - first < length:
                buffer[last - first : length] = bytes(length - (last - first))
            self._keep(self._stripes.offset(segment) + low, buffer[:length])

    def _messages(
        self, rounds: Iterable[Round], window: Window
    ) -> Iterator[tuple[Message, Segment]]:
        """Messages to receive for a window. Empty segments are not sent, so they are left out."""
        for part in rounds:
            for segment in part.receives:
                low, high = self._stripes.range_of(segment, window)
                if high > low:
                    yield Message(part.source, _at(segment, window)), segment

    def _view(self, segment: Segment, window: Window, step: int) -> memoryview:
        """Bytes of the window: a view of the shard itself, or a buffer."""
        low, high = self._stripes.range_of(segment, window)
        if segment.member == self._member and not segment.parity:
            return self._image[low:high]
        received = (segment, 1) in self._buffers
        return self._buffers[segment, step % (AHEAD + 1) if received else 0][: high - low]

    def _allocate(
        self, segments: list[Segment], sets: int
    ) -> dict[tuple[Segment, int], memoryview]:
        """A window of page-aligned memory for each segment and set. Freed with the last view."""
        nbytes = min(self._window_bytes, round_up(self._stripes.segment_bytes, PAGE_BYTES))
        keys = [(segment, number) for segment in segments for number in range(sets)]
        if not keys or not nbytes:
            return {key: memoryview(b"") for key in keys}
        memory = memoryview(mmap.mmap(-1, nbytes * len(keys)))
        return {key: memory[i * nbytes : (i + 1) * nbytes] for i, key in enumerate(keys)}


def _at(segment: Segment, window: Window) -> tuple[int, int, int, int]:
    return segment.member, int(segment.parity), segment.index, window[0]
