"""The windows of an exchange or a rebuild: receive, gather, multiply, scatter, keep.

`Inbox` holds the messages that one exchange receives from the other members, written straight to
their memory. The exchange's thread offers memory for the messages in its plan, and waits for them.
Each incoming connection has its own thread, which reads a message only when there is memory for
it: a member ahead blocks in its own `send`, and nothing accumulates here.

`WindowLoop` is one member's loop over the windows of an exchange. Members cannot deadlock. In step
i a member has offered memory for all messages of the windows i to i + AHEAD before it waits for
anything, and it sends only messages of its own step or of the windows that it has opened. So the
slowest members always find memory for everything that they send, and wait only for messages that
the other members have sent or are sending.

`rebuild` computes lost shards from the surviving members of a group. It knows no transport and no
files: the restart path decides how ranges of surviving shards and parities are read: from a slot,
from a mapped file, through another node's agent, or from a broadcast.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from tierckpt.erasure import kernels
from tierckpt.erasure.codes import Code, MemberPlan, Round, Segment, Stripes, Task, plan_rebuild
from tierckpt.erasure.kernels import Product
from tierckpt.erasure.parity_manifest import ParityManifest
from tierckpt.errors import CorruptShardError, FormatError, PeerError
from tierckpt.format.ids import PAGE_BYTES, round_up
from tierckpt.format.manifest import digest, verify_shard
from tierckpt.net.limits import MAX_TEXT
from tierckpt.net.link import Link

from .parity_file import Read


class Message(Struct, frozen=True):
    """A window of a segment, on its way from member `source`; `at` names it on the wire."""

    source: int
    at: tuple[int, int, int, int]
    """Owner of the segment, 1 if the segment is parity, its index, offset of the window in it."""


class Inbox:
    """Receives the messages of one exchange. Any thread may call any method; only `wait`,
    `wait_ends` and `deliver` take long.

    A failure is final: after the first one, every call that waits raises it.
    """

    def __init__(
        self, names: Mapping[int, str], stall_seconds: float, excuse: Callable[[int, float], bool]
    ) -> None:
        """`names` are the members' names in errors. `excuse(member, silent_seconds)` is asked about
        a silent member; True gives it `stall_seconds` more."""
        self.names = names
        self._excuse = excuse
        self.stall_seconds = stall_seconds
        self.waiting_for: frozenset[int] = frozenset()
        """Members that `wait` is waiting for now."""
        self._changed = threading.Condition()
        self._failure: PeerError | None = None
        self._offered: dict[Message, memoryview] = {}
        self._arrived: set[Message] = set()
        self._ended: set[int] = set()
        self._progress: dict[int, float] = {}
        self._attempts: dict[int, str] = {}
        self._links: dict[int, Link] = {}

    # --- senders -------------------------------------------------------------------------------

    def know(self, source: int, attempt: str) -> None:
        """Record the random name of the member's attempt at this exchange, from either connection.

        A member that was killed and restarted makes a new attempt. The first one can never be
        finished, so this member's exchange fails as well. Raises PeerError then.
        """
        with self._changed:
            if self._attempts.setdefault(source, attempt) != attempt:
                self._fail(
                    PeerError(f"{self.names[source]} was restarted during the exchange", source)
                )
            self._check()

    def attach(self, source: int, link: Link) -> None:
        """Take the member's messages from `link` from now on; shut its older link."""
        with self._changed:
            self._check()
            older = self._links.get(source)
            self._links[source] = link
        if older is not None:
            older.shut()

    def detach(self, source: int, link: Link) -> None:
        """Undo `attach`, unless the member has a newer link."""
        with self._changed:
            if self._links.get(source) is link:
                del self._links[source]

    # --- the connections' threads --------------------------------------------------------------

    def deliver(self, source: int, head: dict[str, Any], link: Link) -> None:
        """Receive the message that `head` announces, as soon as there is memory for it.

        Raises PeerError when the exchange is over, or when the message is damaged or not in the
        plan. TCP's checksum of 16 bits misses some errors of real networks (Stone and Partridge,
        2000), and wrong parity would be noticed only when it is needed.
        """
        message = Message(source, tuple(head["at"]))
        with self._changed:
            while message not in self._offered:
                self._check()
                self._changed.wait()
            self._check()
            view = self._offered.pop(message)
        if head.get("nbytes", 0) != len(view):
            raise PeerError(
                f"{self.names[source]} sent {head.get('nbytes', 0)} bytes where the plan has "
                f"{len(view)}; install the same tierckpt on all nodes",
                source,
            )
        link.receive_into(view, lambda: self._progress.update({source: time.monotonic()}))
        if digest(view).hex() != head.get("digest"):
            raise PeerError(f"{self.names[source]} sent bytes that arrived damaged", source)
        with self._changed:
            self._arrived.add(message)
            self._changed.notify_all()

    def end(self, source: int) -> None:
        """The member has sent everything, and its shard stayed sealed until then."""
        with self._changed:
            self._ended.add(source)
            self._links.pop(source, None)  # its connection serves the next exchange
            self._changed.notify_all()

    def fail(self, error: PeerError) -> None:
        """Wake every waiting thread with `error`, unless the exchange has already failed."""
        with self._changed:
            self._fail(error)

    # --- the exchange's thread -----------------------------------------------------------------

    def offer(self, message: Message, view: memoryview) -> None:
        """Give memory for a message; the inbox owns it until `wait` has returned it."""
        with self._changed:
            self._offered[message] = view
            self._changed.notify_all()

    def wait(self, wanted: Collection[Message]) -> None:
        """Return when all these messages are in their memory.

        Raises PeerError when one of their members makes no progress for `stall_seconds`.
        """
        self._wait_for(lambda: {m.source for m in wanted if m not in self._arrived})
        with self._changed:
            self._arrived.difference_update(wanted)

    def wait_ends(self, sources: Collection[int]) -> None:
        """Return when all these members have ended; raises like `wait`."""
        self._wait_for(lambda: set(sources) - self._ended)

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`; raises at once when the exchange fails or has failed."""
        with self._changed:
            self._check()
            if seconds:
                self._changed.wait(seconds)
            self._check()

    def failure(self) -> PeerError | None:
        """First failure of the exchange; None if it has not failed."""
        with self._changed:
            return self._failure

    def close(self, last_words: str) -> None:
        """End the exchange: send `last_words` to members that still send, and shut their links."""
        with self._changed:
            self._fail(PeerError(last_words))
            for link in self._links.values():
                link.send_now({"op": "failed", "why": last_words[:MAX_TEXT]})
                link.shut()

    # --- with the condition held ---------------------------------------------------------------

    def _wait_for(self, missing: Callable[[], set[int]]) -> None:
        start = time.monotonic()
        excused: dict[int, float] = {}
        while (silent := self._silent(missing, start, excused)) is not None:
            seconds = time.monotonic() - max(start, self._progress.get(silent, start))
            if not self._excuse(silent, seconds):
                text = f"{self.names[silent]} sent nothing for {seconds:.3g} s"
                raise PeerError(text, silent)
            excused[silent] = time.monotonic()

    def _silent(
        self, missing: Callable[[], set[int]], start: float, excused: Mapping[int, float]
    ) -> int | None:
        """Wait for the missing members. Returns None when all are there, or a member that was
        silent for too long."""
        with self._changed:
            while sources := missing():
                self._check()
                self.waiting_for = frozenset(sources)
                since = {
                    s: max(start, self._progress.get(s, start), excused.get(s, start))
                    for s in sources
                }
                slowest = min(sources, key=lambda s: (since[s], s))
                left = since[slowest] + self.stall_seconds - time.monotonic()
                if left <= 0:
                    return slowest
                self._changed.wait(left)
            self._check()
            self.waiting_for = frozenset()
            return None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: PeerError) -> None:
        self._failure = self._failure or error
        self._changed.notify_all()


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
        library = kernels.find_isal()
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


def rebuild(
    record: ParityManifest,
    shards: Mapping[int, Read],
    parities: Mapping[int, Read],
    into: Mapping[int, memoryview],
) -> None:
    """Compute the lost shards of a group in `into`, and verify them.

    Members are numbered on the ring, as `record.group` lists them. `record` is the manifest of any
    surviving parity. `shards` and `parities` read the survivors, which their holders have checked
    before (`check_parity` for parity): a damaged one counts as lost. `into` has writable memory of
    exactly the lost shard's length for members that are not in `shards`. Lost shards that are not
    in `into` are computed by other processes, which read the same ranges in the same order as this
    one. Buffers k windows.

    Raises RestoreError, with the arithmetic, when too much is lost, before anything is read. Raises
    CorruptShardError when a result is not the lost shard, because some source was damaged: no
    memory in `into` may be used then. Errors of a reader pass through.
    """
    Rebuilding(record, shards.keys(), parities.keys(), into).run(shards, parities)


class Rebuilding:
    """A rebuild in two steps, see `rebuild`: allocation, which may lack memory, and reading."""

    def __init__(
        self,
        record: ParityManifest,
        shards: Collection[int],
        parities: Collection[int],
        into: Mapping[int, memoryview],
    ) -> None:
        """Plan, and allocate memory; `shards` and `parities` are the members that `run` will have
        readers for."""
        code = record.stripes.code
        lost = set(range(code.n)) - set(shards)
        lengths = {member: len(view) for member, view in into.items()}
        if lengths != {m: record.manifests[m].image_bytes for m in lost & lengths.keys()}:
            raise ValueError(f"room for {lengths}, where members {sorted(lost)} are lost")
        gone = set(range(code.n)) - set(parities)
        self._record, self._into = record, into
        self._tasks = plan_rebuild(code, lost, gone, restore_parities=False)
        self._window_bytes = window_bytes_of(code)
        self._buffers = [memoryview(bytearray(self._window_bytes)) for _ in range(code.k)]
        self._rows = [
            [row for row, out in enumerate(task.outputs) if out.member in into]
            for task in self._tasks
        ]
        """For each task: the outputs that are computed here."""
        library = kernels.find_isal()
        self._products = [
            Product(tuple(task.matrix[row] for row in rows), library) if rows else None
            for task, rows in zip(self._tasks, self._rows, strict=True)
        ]

    def run(self, shards: Mapping[int, Read], parities: Mapping[int, Read]) -> None:
        """Read, compute and verify.

        Reads all ranges even after a failure here: where several processes read ranges together,
        the others wait for this one.
        """
        trouble: Exception | None = None
        for window in self._record.stripes.windows(self._window_bytes):
            for task, rows, product in zip(self._tasks, self._rows, self._products, strict=True):
                sources = []
                for segment, buffer in zip(task.sources, self._buffers, strict=True):
                    low, high = self._record.stripes.range_of(segment, window)
                    part = buffer[: high - low]
                    if part:
                        (parities if segment.parity else shards)[segment.member](low, part)
                    sources.append(part)
                if product is not None and trouble is None:
                    try:
                        product.run(sources, self._outputs(task, rows, window))
                    except Exception as error:
                        trouble = error
        if trouble is not None:
            raise trouble
        self._prove()

    def _outputs(self, task: Task, rows: list[int], window: tuple[int, int]) -> list[memoryview]:
        """Memory for the products of the rows."""
        outputs = [task.outputs[row] for row in rows]
        ranges = [(out.member, self._record.stripes.range_of(out, window)) for out in outputs]
        return [self._into[member][low:high] for member, (low, high) in ranges]

    def _prove(self) -> None:
        """Raise CorruptShardError unless every computed shard is the lost one."""
        for member, view in sorted(self._into.items()):
            manifest = self._record.manifests[member]
            try:
                verify_shard(manifest, view, f"{manifest.key}, as it was rebuilt,")
            except (CorruptShardError, FormatError) as error:
                advice = "some source was damaged; use another level, or an older version"
                raise CorruptShardError(f"{error}; {advice}") from error
