"""Small state link: one rank sends the small state of its records to the rank that copies its
journal.

The gradients of a copy need no message, as both ranks have them. The small state is a message a
record: a last frame, as it will be in the file. One connection, with the frames and the handshake
of the agents (`peer.wire`); the sender makes it at the first record after a version.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tierckpt.errors import PeerError
from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import digest
from tierckpt.journal.frames import SegmentName
from tierckpt.journal.writer import MOST_WAITING, Draft, FrameBytes, last_frame
from tierckpt.peer.address import Address
from tierckpt.peer.wire import MOST_TEXT, Link, greet, reach

from .listener import WardListener

PATIENCE_SECONDS = 30.0
"""Limit without a byte from the other rank, or of a connection to it."""
AGAIN_SECONDS = 3.0
"""The same limit for a rank that was silent before: with `when_busy="wait"` the training waits for
it after every version."""
FULL = "its messages are not taken fast enough"


class Keeper(NamedTuple):
    """Where the copy is made."""

    address: Address
    secret: bytes


class SmallStateSender:
    """Owns a thread. Any thread may call any method."""

    def __init__(self, rank: int, on_failed: Callable[[Keeper, Exception], None]) -> None:
        """`on_failed` is called on the thread; nothing more is sent until the next file begins."""
        self._rank, self._on_failed = rank, on_failed
        self._queue: queue.SimpleQueue[tuple[Keeper, SegmentName, Draft | str] | None]
        self._queue = queue.SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._lost: SegmentName | None = None
        """The file of which a record could not be sent."""
        self._full: SegmentName | None = None
        """The file of which too many records waited to be sent."""
        self._begun: SegmentName | None = None
        """The file of the last record sent."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierckpt-small-state", daemon=True)
        self._thread.start()

    def send(self, keeper: Keeper, draft: Draft) -> None:
        """Send the small state of a record, which nobody changes any more; or stop, if too many
        wait."""
        with self._lock:
            if draft.segment == self._full:
                return
            if self._waiting > MOST_WAITING:
                self._full = draft.segment
                self.stop(keeper, draft.segment, FULL)
                return
            self._waiting += 1
        self._queue.put((keeper, draft.segment, draft))

    def stop(self, keeper: Keeper, segment: SegmentName, why: str) -> None:
        """Inform the keeper that no further record of that file comes."""
        self._queue.put((keeper, segment, why))

    def close(self, timeout_seconds: float) -> None:
        """Send what waits, for at most that time, and end the thread."""
        self._queue.put(None)
        self._thread.join(max(timeout_seconds, 0.0))
        self._closed = True
        if (link := self._link) is not None:
            link.shut()

    def _run(self) -> None:
        while (order := self._queue.get()) is not None and not self._closed:
            keeper, segment, what = order
            try:
                if segment != self._lost:
                    self._deliver(keeper, segment, what)
            except Exception as error:  # no error of a copy ends a training
                self._lost = segment
                self._hang_up()
                self._on_failed(keeper, error)
            finally:
                if isinstance(what, Draft):
                    with self._lock:
                        self._waiting -= 1
        self._hang_up()

    def _deliver(self, keeper: Keeper, segment: SegmentName, what: Draft | str) -> None:
        if isinstance(what, str):
            if self._link is not None and segment == self._begun:
                head = {"op": "stopped", "why": what[:MOST_TEXT], "writer": segment.writer}
                self._link.send({**head, "base": segment.base.id})
            return
        if segment != self._begun and not (self._link is not None and self._link.idle()):
            self._connect(keeper)
        self._begun = segment
        if self._link is None:
            raise PeerError(f"{keeper.address}: the connection broke")
        frame = b"".join(last_frame(what))
        facts = what.facts
        head = {"op": "record", "run": facts.run_id, "after": what.after, "id": facts.id}
        head |= {"steps": len(what.steps), "digest": digest(frame).hex()}
        self._link.send(head, frame)

    def _connect(self, keeper: Keeper) -> None:
        self._hang_up()
        link = reach(keeper.address, PATIENCE_SECONDS)
        self._link = link
        greet(link, keeper.secret, PATIENCE_SECONDS)
        link.seconds = PATIENCE_SECONDS
        link.send({"op": "journal", "rank": self._rank})

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


class _Message(NamedTuple):
    head: dict[str, Any]
    frame: memoryview

    @property
    def id(self) -> VersionId:
        return VersionId(*self.head["id"])


class SmallStateReceiver:
    """The keeper's end. One thread calls `take`; any thread may call `close`."""

    def __init__(self, host: str, ward: int, secret: Callable[[], bytes]) -> None:
        """Listen at `host` for the rank `ward`, which knows the `secret`. Raises OSError."""
        self._listener = WardListener(host, ward, secret)
        self.address = self._listener.address
        self._ward = ward
        self._link: Link | None = None
        self._held: _Message | None = None
        """A message that came in place of another one."""
        self._begun: SegmentName | None = None
        self._silent = self._closed = False

    def take(self, draft: Draft) -> FrameBytes:
        """Return the last frame of the record that `draft` is a copy of. Raises PeerError if it
        does not come in time, or other records come."""
        deadline = time.monotonic() + (AGAIN_SECONDS if self._silent else PATIENCE_SECONDS)
        try:
            return self._take(draft, deadline)
        finally:
            self._silent = time.monotonic() >= deadline

    def _take(self, draft: Draft, deadline: float) -> FrameBytes:
        again = draft.segment != self._begun
        self._begun = draft.segment
        while True:
            message, self._held = self._held or self._next(deadline, again), None
            head = message.head
            if head["op"] == "stopped":
                of = VersionId(*head["base"]), head["writer"]
                if of == (draft.segment.base.id, draft.segment.writer):
                    raise PeerError(f"rank {self._ward} sends no more: {head['why']}")
                continue
            facts = draft.facts
            if head["run"] != facts.run_id or message.id < facts.id:
                continue
            found = VersionId(*head["after"]), message.id, head["steps"]
            if found == (draft.after, facts.id, len(draft.steps)):
                return message.frame, message.frame[:0]
            self._held = message
            raise PeerError(f"rank {self._ward} sent the state of {message.id}, not {facts.id}")

    def close(self) -> None:
        """Wake a `take`, which raises PeerError, and listen no more."""
        self._closed = True
        self._listener.close()
        if (link := self._link) is not None:
            link.shut()

    def release(self) -> None:
        """Free all descriptors, when no `take` is under way."""
        self.close()
        self._hang_up()

    def _next(self, deadline: float, again: bool) -> _Message:
        """The next message. With `again` a new connection may take the place of a broken one."""
        while True:
            link = self._link or self._connected(deadline)
            try:
                head = link.receive(max(deadline - time.monotonic(), 0.0))
                frame = memoryview(mmap.mmap(-1, max(head.get("nbytes", 0), 1)))  # begins a page
                frame = frame[: head.get("nbytes", 0)]
                link.receive_into(frame)
            except PeerError:
                self._hang_up()
                if not again or time.monotonic() >= deadline:
                    raise
                again = False
                continue
            if len(frame) and digest(frame).hex() != head.get("digest"):
                self._hang_up()
                raise PeerError(f"rank {self._ward} sent bytes that arrived damaged")
            return _Message(head, frame)

    def _connected(self, deadline: float) -> Link:
        """Wait for the ward's connection."""
        self._link = link = self._listener.take(deadline)
        link.seconds = PATIENCE_SECONDS
        if self._closed:  # `close` may have seen no connection
            link.shut()
        return link

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


__all__ = ["Keeper", "SmallStateReceiver", "SmallStateSender"]
