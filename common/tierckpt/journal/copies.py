"""Copies: each rank's journal also on another node, so that it survives the loss of its node.

This rank keeps a copy of the journal of one rank on another node, its ward. After the reduction
all ranks have the same gradients, so this rank has its ward's stripe of them, too. The ward sends
its small state, and this rank's goes to the rank that keeps its copy. Ranks that protect each
other at the peer level make a ring: the next one is the keeper. A copy that cannot continue stops
until the next version on local, and nothing else does.

The small state is a message a record: a last frame, as it will be in the file. One connection,
which the sender makes at the first record after a version.

Partner copies on another node are those of SCR (Moody et al., 2010); here only what cannot be
computed on the other node travels there.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from tierckpt._text import error_text
from tierckpt.config import Config
from tierckpt.coordination.peers import Groups, PeerSetup
from tierckpt.coordination.versions import Reports
from tierckpt.errors import ConfigError, PeerError, TierckptError
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import digest
from tierckpt.journal.segments import SegmentName
from tierckpt.journal.steps import GradientImages, Image, Tree
from tierckpt.journal.writer import MAX_WAITING, Draft, FrameBytes, JournalWriter, last_frame
from tierckpt.net.addresses import Address, own_host
from tierckpt.net.handshake import Caller, Listener, greet
from tierckpt.net.limits import MAX_TEXT
from tierckpt.net.link import Link, reach

__all__ = [
    "JournalCopies",
    "Keeper",
    "SmallStateReceiver",
    "SmallStateSender",
    "WardListener",
    "neighbours",
]


PURPOSE = "journal"
"""Kind of listener that a keeper is (see `net.handshake`)."""


class WardListener:
    """Owns a listener, and the ward's newest connection. Any thread may call any method."""

    def __init__(self, host: str, ward: int, secret: Callable[[], bytes]) -> None:
        """Listen at `host` for the rank `ward`, which knows the `secret`. Raises OSError."""
        self._ward = ward
        self._changed = threading.Condition()
        self._newest: Link | None = None
        """The ward's newest connection, if not taken yet."""
        self._closed = False
        self._listener = Listener(Address(host, 0), PURPOSE, lambda: [secret()], self._met)
        self.address = self._listener.address

    def take(self, deadline: float) -> Link:
        """Return the ward's newest connection, which is the caller's then; waits for one. Raises
        PeerError after the `deadline`, or when the listener is closed."""
        with self._changed:
            while self._newest is None and not self._closed:
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            link, self._newest = self._newest, None
        if link is None:
            raise PeerError(f"rank {self._ward} did not connect in time")
        return link

    def close(self) -> None:
        """Listen no more, wake a `take`, and end all threads. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listener.close()
        if (link := self._newest) is not None:
            self._newest = None
            link.close()

    def _met(self, link: Link, caller: Caller) -> bool:
        """Put the ward's connection in the place of one not taken. The thread of the connection."""
        if caller.hello.get("rank") != self._ward:
            return False
        link.peer = f"rank {self._ward}"
        with self._changed:
            if self._closed:
                return False
            former, self._newest = self._newest, link
            self._changed.notify_all()
        if former is not None:
            former.close()
        return True


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
        """`on_failed` is called on the thread; nothing more is sent until the next file starts."""
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
        self._current: SegmentName | None = None
        """The file of the last record sent."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierckpt-small-state", daemon=True)
        self._thread.start()

    def send(self, keeper: Keeper, draft: Draft) -> None:
        """Send the small state of a record, which must not change any more; or stop, if too many
        wait."""
        with self._lock:
            if draft.segment == self._full:
                return
            if self._waiting > MAX_WAITING:
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
            if self._link is not None and segment == self._current:
                head = {"op": "stopped", "why": what[:MAX_TEXT], "writer": segment.writer}
                self._link.send({**head, "base": segment.base.id})
            return
        if segment != self._current and not (self._link is not None and self._link.idle()):
            self._connect(keeper)
        self._current = segment
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
        greet(link, PURPOSE, keeper.secret, {"rank": self._rank}, PATIENCE_SECONDS)
        link.seconds = PATIENCE_SECONDS

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
        self._current: SegmentName | None = None
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
        again = draft.segment != self._current
        self._current = draft.segment
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
                frame = memoryview(mmap.mmap(-1, max(head.get("nbytes", 0), 1)))  # starts a page
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


STOPPED = (
    "the copy of rank {ward}'s journal ends at v{last}: {why}. If that rank's node is lost, so are "
    "later steps, until the next version is on local; then the copy starts again"
)
BEHIND = (
    "{folder} does not keep up with the journal and the copy, or rank {ward} sends its small state "
    "too late. Use a faster disk or network"
)
DEAF = (
    "this rank cannot keep a copy of rank {ward}'s journal: {why}. The journal is lost with that "
    "rank's node"
)
UNSENT = "rank {keeper} at {address} does not receive what the copy of the journal needs: {why}"


def neighbours(groups: Groups, rank: int) -> tuple[int, int] | None:
    """Return the rank that keeps the copy of this rank's journal, and the rank with its copy on
    this rank; None without redundancy groups. Pure."""
    for ranks in (group.ranks for group in groups if rank in group.ranks):
        place = ranks.index(rank)
        return ranks[(place + 1) % len(ranks)], ranks[place - 1]
    return None


class JournalCopies:
    """One rank's part: its ward's copy, and what its keeper needs. Training thread; without
    neighbours it does nothing."""

    def __init__(
        self,
        config: Config,
        rank: int,
        ranks: int,
        peers: PeerSetup,
        folder: Path,
        reports: Reports,
    ) -> None:
        """Listen for the ward: `peers` gives all ranks the address. All arguments stay their
        owners'."""
        self._config, self._rank, self._ranks = config, rank, ranks
        self._peers, self._folder, self._reports = peers, folder, reports
        self._segment: SegmentName | None = None
        """The file of the copy; None while there is none."""
        self._last = VersionId(0, 0)
        """The last record, or the version before the first one."""
        self._own: SegmentName | None = None
        """The file of the small states that this rank sends; None while it sends none."""
        self._steps: list[Image] = []
        self._gradients: dict[str, GradientImages] = {}
        self._writer: JournalWriter | None = None
        self._closing = False
        found = neighbours(peers.groups, rank)
        if found is None or found[0] == rank:
            return
        self._keeper, self._ward = found
        try:
            host = own_host(config.peer.device, peers.towards)
            self._receiver = SmallStateReceiver(host, self._ward, self._secret)
        except (ConfigError, OSError) as error:
            reports.notice(DEAF.format(ward=self._ward, why=error), logging.WARNING)
            return
        peers.own_address = self._receiver.address
        self._sender = SmallStateSender(rank, self._unsent)
        self._writer = JournalWriter(folder, self._failed, self._last_frame)

    @property
    def on(self) -> bool:
        """True if this rank keeps a copy at times."""
        return self._writer is not None

    # --- the run --------------------------------------------------------------------------------

    def start_file(self, own: SegmentName, new_run: bool) -> None:
        """Start a new file, as this rank's journal does with the file `own`. `new_run`: the run is
        another one than before, and files of a run of its number do not count."""
        if self._writer is None:
            return
        self._segment = self._own = None
        self._steps = []
        if new_run:
            writer = own.writer
            self._writer.remove(lambda n: n.keeper == self._rank and n.writer >= writer)
        if not self._peers.ready:
            return
        self._own, self._last = own, own.base.id
        if self._peers.addresses[self._ward] is not None:
            key = ShardKey(own.base.id, self._ward, self._ranks)
            self._segment = SegmentName(key, own.writer, self._rank)

    def stop(self, why: str) -> None:
        """This rank's journal has stopped."""
        if self._own is not None and (keeper := self._where()) is not None:
            self._sender.stop(keeper, self._own, why)
        self._segment = self._own = None
        self._steps = []

    def drain(self, timeout_seconds: float) -> bool:
        """As `JournalWriter.drain`."""
        return self._writer is None or self._writer.drain(timeout_seconds)

    def close(self, remove: bool = False) -> None:
        """End all threads. They wait AGAIN_SECONDS for the other nodes, which may have vanished;
        with `remove` they do not wait, as the copies are useless."""
        if self._writer is None:
            return
        self._closing = True
        end = time.monotonic() + (0.0 if remove else AGAIN_SECONDS)
        self._sender.close(end - time.monotonic())
        self._writer.close(end - time.monotonic())
        self._receiver.close()
        self._writer.close()  # the thread may have waited for the ward
        self._receiver.release()
        self._writer = None

    # --- a step and a boundary ------------------------------------------------------------------

    def add(
        self,
        label: str,
        named: Sequence[tuple[str, torch.Tensor]],
        tree: Tree,
        may_wait: bool,
    ) -> None:
        """Copy the ward's stripes of an optimizer's gradients."""
        if self._writer is None or self._segment is None:
            return
        try:
            if not (self._steps or self._writer.keeps_up(may_wait)):
                raise PeerError(BEHIND.format(folder=self._folder, ward=self._ward))
            if label not in self._gradients:
                self._gradients[label] = GradientImages(self._ward, self._ranks)
            self._steps.append(self._gradients[label].make(named, tree, self._writer.room))
        except Exception as error:
            self._give_up(error)

    def record(self, draft: Draft) -> Keeper | None:
        """Write the copy of the ward's record at the boundary of this rank's `draft`. Returns the
        target of its small state."""
        self._record(draft)
        return self._where() if draft.segment == self._own else None

    def _record(self, draft: Draft) -> None:
        if self._writer is None or self._segment is None:
            return
        steps, self._steps = tuple(self._steps), []
        if self._writer.failed == self._segment:  # already reported
            self._segment = None
        else:
            self._writer.submit(replace(draft, segment=self._segment, steps=steps, small=None))
            self._last = draft.facts.id

    def send(self, keeper: Keeper, draft: Draft) -> None:
        """Send the small state of this rank's record. Any thread."""
        self._sender.send(keeper, draft)

    def _where(self) -> Keeper | None:
        """Where the copy of this rank's journal is made."""
        address = self._peers.addresses[self._keeper] if self._peers.ready else None
        return None if address is None else Keeper(address, self._secret())

    # --- what fails -----------------------------------------------------------------------------

    def _give_up(self, error: Exception) -> None:
        segment, self._segment, self._steps = self._segment, None, []
        if segment is not None and self._writer is not None:
            # After the records that wait: if one of them fails, the copy ends before it.
            self._writer.after_all(
                partial(self._end, segment, self._last, error_text(error, TierckptError))
            )

    def _end(self, segment: SegmentName, last: VersionId, why: str) -> None:
        """The writer's thread, after the last record of a copy."""
        if self._writer is not None and self._writer.failed != segment:
            self._warn(last, why)

    def _failed(self, last: VersionId, error: Exception) -> None:
        """The record after `last` could not be written; the writer's thread."""
        if not self._closing:
            known = isinstance(error, PeerError)
            self._warn(last, str(error) if known else f"{self._folder}: {error}")

    def _warn(self, last: VersionId, why: str) -> None:
        text = STOPPED.format(ward=self._ward, last=last.version, why=why)
        self._reports.notice_later(text, logging.WARNING)

    def _unsent(self, keeper: Keeper, error: Exception) -> None:
        """The sender's thread. The keeper warns, as its copy ends."""
        text = UNSENT.format(keeper=self._keeper, address=keeper.address, why=error)
        self._reports.notice_later(text, logging.INFO)

    def _last_frame(self, draft: Draft) -> FrameBytes:
        """The writer's thread."""
        return self._receiver.take(draft)

    def _secret(self) -> bytes:
        """The secret of the run; any thread."""
        return self._peers.secret.encode()
