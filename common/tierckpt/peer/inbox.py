"""Messages that one exchange receives from the other members, written straight to their memory.

The exchange's thread offers memory for the messages in its plan, and waits for them. Each incoming
connection has its own thread, which reads a message only when there is memory for it: a member that
is ahead blocks in its own `send`, and nothing accumulates here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tierckpt.errors import PeerError
from tierckpt.format.manifest import digest

from .wire import MOST_TEXT, Link


@dataclass(frozen=True)
class Message:
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
        """Members whose messages `wait` is waiting for now."""
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
            self._links.pop(source, None)  # its connection goes on to serve the next exchange
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
                link.send_now({"op": "failed", "why": last_words[:MOST_TEXT]})
                link.shut()

    # --- with the condition held ---------------------------------------------------------------

    def _wait_for(self, missing: Callable[[], set[int]]) -> None:
        begin = time.monotonic()
        excused: dict[int, float] = {}
        while (silent := self._silent(missing, begin, excused)) is not None:
            seconds = time.monotonic() - max(begin, self._progress.get(silent, begin))
            if not self._excuse(silent, seconds):
                text = f"{self.names[silent]} sent nothing for {seconds:.3g} s"
                raise PeerError(text, silent)
            excused[silent] = time.monotonic()

    def _silent(
        self, missing: Callable[[], set[int]], begin: float, excused: Mapping[int, float]
    ) -> int | None:
        """Wait for the missing members. Returns None when all are there, or a member that was
        silent for too long."""
        with self._changed:
            while sources := missing():
                self._check()
                self.waiting_for = frozenset(sources)
                since = {
                    s: max(begin, self._progress.get(s, begin), excused.get(s, begin))
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
