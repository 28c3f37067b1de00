"""Rank 0's shim as the centre of the job: it receives what all ranks report, and gives orders."""

from __future__ import annotations

import dataclasses
import selectors
import sys
import time
from collections.abc import Callable
from typing import Any

from .attempts import Rendezvous, needs_own
from .channel import Connection, Message
from .coordinator import Coordinator, End, Finish, Leave, Order, Start
from .meeting import Listener


def say(text: str) -> None:
    """Print a line for the user."""
    print(f"tierckpt run: {text}", file=sys.stderr, flush=True)


class Hub:
    """Owns the connections of the other ranks. Main thread of rank 0's shim."""

    def __init__(
        self,
        size: int,
        max_restarts: int,
        selector: selectors.BaseSelector,
        listener: Listener | None,
        rendezvous: Rendezvous,
        obey: Callable[[Message], None],
        slot: dict[str, str],
    ) -> None:
        """`obey` takes the orders for rank 0 itself; `slot` is its place for Horovod."""
        self._size, self._selector, self._listener = size, selector, listener
        self._rendezvous, self._obey = rendezvous, obey
        self._max_restarts = max_restarts
        self._coordinator = Coordinator(size, max_restarts)
        self._members: dict[int, Connection] = {}
        self._strangers: set[Connection] = set()
        self._slots = {0: slot}
        if listener is not None:
            selector.register(listener.socket, selectors.EVENT_READ, self._accept)

    def begin_if_complete(self) -> None:
        """Start the first attempt once all ranks are there."""
        if len(self._members) + 1 == self._size and self._coordinator.attempt == 0:
            self._stop_listening()
            self._give(self._coordinator.begin(), None)

    def give_up(self) -> None:
        """Not all ranks have come: every rank goes on without the others."""
        self._stop_listening()
        missing = self._size - 1 - len(self._members)
        self._give(self._coordinator.leave(f"{missing} of {self._size} shims are missing"), None)

    def handle(self, rank: int, message: Message) -> None:
        """A message of a rank."""
        if "ended" in message:
            end = End(**message["ended"])
            failed = message["at"]
            self._give(self._coordinator.ended(rank, message["attempt"], end), failed)
        elif "leaving" in message:
            self._give(self._coordinator.leave(), None)

    def _give(self, order: Order | None, failed: float | None) -> None:
        """Send an order to all ranks, rank 0 last: its own shim may end with it."""
        if order is None:
            return
        message: Message = {"order": type(order).__name__.lower()}
        if isinstance(order, Start):
            if order.text:
                say(order.text)
            own = order.attempt > 1 or needs_own()
            changes = self._rendezvous.renew(self._slots) if own else {}
            message.update(attempt=order.attempt, environment=changes, failed=failed)
        elif isinstance(order, Leave) and order.text:
            say(order.text)
        for connection in list(self._members.values()):
            connection.send(message)
        if isinstance(order, Leave | Finish):
            self.close()
        self._obey(message)
        if isinstance(order, Start) and self._size > 1 and order.attempt <= self._max_restarts:
            self._rendezvous.prepare(self._slots)

    def close(self) -> None:
        """Close all connections."""
        self._stop_listening()
        for connection in [*self._members.values(), *self._strangers]:
            if connection.is_open:
                self._selector.unregister(connection)
                connection.close()
        self._members.clear()
        self._strangers.clear()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener.socket)
            self._listener.close()
            self._listener = None

    # --- connections ----------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        stream = self._listener.accept()
        if stream is not None:
            connection = Connection(stream)
            self._strangers.add(connection)
            self._selector.register(
                connection, selectors.EVENT_READ, lambda: self._greet(connection)
            )

    def _greet(self, connection: Connection) -> None:
        """The first messages of a connection, or its end."""
        descriptor = connection.fileno()
        messages = connection.receive()
        if not messages and connection.is_open:
            return
        self._strangers.discard(connection)
        rank = self._rank_of(messages[0]) if messages and connection.is_open else None
        if rank is None:
            self._selector.unregister(descriptor)
            connection.close()
            return
        self._members[rank] = connection
        self._slots[rank] = messages[0].get("slot", {})
        self._selector.modify(
            connection, selectors.EVENT_READ, lambda: self._receive(rank, connection)
        )
        for message in messages[1:]:
            self.handle(rank, message)
        self.begin_if_complete()

    def _rank_of(self, hello: dict[str, Any]) -> int | None:
        """The rank of a new connection; None if it is not of this job."""
        if self._listener is None:  # all were there
            return None
        rank, size, secret = (hello.get(name) for name in ("rank", "size", "secret"))
        if secret != self._listener.secret or size != self._size or rank in self._members:
            return None
        return rank if isinstance(rank, int) and 0 < rank < self._size else None

    def _receive(self, rank: int, connection: Connection) -> None:
        descriptor = connection.fileno()
        for message in connection.receive():
            self.handle(rank, message)
        if not connection.is_open and self._members.get(rank) is connection:
            del self._members[rank]
            self._selector.unregister(descriptor)
            lost = f"the shim of rank {rank} has ended"
            self._give(self._coordinator.leave(lost), None)


def ended_message(attempt: int, end: End) -> Message:
    """The message that a rank's script has ended."""
    return {"ended": dataclasses.asdict(end), "attempt": attempt, "at": time.time()}


__all__ = ["Hub", "ended_message", "say"]
