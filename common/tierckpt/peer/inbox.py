"""What one exchange receives from the other members, put straight where it belongs.

The exchange's thread offers memory for the messages that its plan has it receive, and waits for
them. Each incoming connection has a thread of its own, which reads a message when, and only when,
there is memory for it: a member that is ahead waits in its own `send`, and nothing piles up here.
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
    """Member whose segment it is, 1 if of its parity, index, where the window begins in it."""


class Inbox:
    """All methods may be called by any thread; none but `wait` and `deliver` takes long.

    Once it has failed, for whatever reason, it stays so, and every call that waits raises that.
    """

    def __init__(
        self, names: Mapping[int, str], stall_seconds: float, excuse: Callable[[int, float], bool]
    ) -> None:
        """`names` says how errors call the members that messages come from. `excuse` is asked about
        a member that is silent, and for how many seconds: True lets it have as long again."""
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

    # --- who speaks ----------------------------------------------------------------------------

    def know(self, source: int, attempt: str) -> None:
        """Note the member's try at this exchange, a random name, whoever told us.

        A member that was killed and came back tries anew: nothing of its first try can be finished,
        so that fails here, too. Raises PeerError then.
        """
        with self._changed:
            if self._attempts.setdefault(source, attempt) != attempt:
                self._fail(PeerError(f"{self.names[source]} began anew; so must we", source))
            self._check()

    def attach(self, source: int, link: Link) -> None:
        """The member's messages come through `link` from now on; an older link of it ends."""
        with self._changed:
            self._check()
            older = self._links.get(source)
            self._links[source] = link
        if older is not None:
            older.shut()

    def detach(self, source: int, link: Link) -> None:
        """The inverse of `attach`, unless there is a newer link."""
        with self._changed:
            if self._links.get(source) is link:
                del self._links[source]

    # --- the connections' threads --------------------------------------------------------------

    def deliver(self, source: int, head: dict[str, Any], link: Link) -> None:
        """Receive the message that `head` announces, as soon as there is memory for it.

        Raises PeerError when the exchange is over, or when it is not what was expected or is
        damaged: TCP's checksum of 16 bits misses some of what real networks break (Stone and
        Partridge, 2000), and parity of wrong bytes would be found out only when it is needed.
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
        """The member has sent everything, and its shard was sealed until then."""
        with self._changed:
            self._ended.add(source)
            self._links.pop(source, None)  # its connection goes on to serve the next exchange
            self._changed.notify_all()

    def fail(self, error: PeerError) -> None:
        """Wake everybody with `error`, unless there is an older one."""
        with self._changed:
            self._fail(error)

    # --- the exchange's thread -----------------------------------------------------------------

    def offer(self, message: Message, view: memoryview) -> None:
        """Give memory for a message; it is the inbox's until `wait` returned it."""
        with self._changed:
            self._offered[message] = view
            self._changed.notify_all()

    def wait(self, wanted: Collection[Message]) -> None:
        """Return when all these messages are where they belong.

        Raises PeerError when one of their members makes no progress for `stall_seconds`.
        """
        self._wait_for(lambda: {m.source for m in wanted if m not in self._arrived})
        with self._changed:
            self._arrived.difference_update(wanted)

    def wait_ends(self, sources: Collection[int]) -> None:
        """Return when all these members have ended; raises like `wait`."""
        self._wait_for(lambda: set(sources) - self._ended)

    def pause(self, seconds: float) -> None:
        """Wait so long; raises at once when the exchange fails, or has failed."""
        with self._changed:
            self._check()
            if seconds:
                self._changed.wait(seconds)
            self._check()

    def failure(self) -> PeerError | None:
        """How the exchange failed first, if it did."""
        with self._changed:
            return self._failure

    def close(self, last_words: str) -> None:
        """The exchange is over: tell members that still send, and let their connections end."""
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
        """Wait until nobody is missing: None; or until somebody was silent for too long."""
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
