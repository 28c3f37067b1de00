"""Rank 0's shim as the centre of the job: it receives what all ranks report, and gives orders."""

from __future__ import annotations

import dataclasses
import secrets
import selectors
import sys
import time
from collections.abc import Callable
from typing import Any

from .attempts import Rendezvous, needs_own
from .channel import Connection, Message
from .coordinator import Coordinator, End, Finish, Leave, Order, Start
from .meeting import Listener, key_file, knows, proof
from .spares import Spares


def say(text: str) -> None:
    """Print a line for the user."""
    print(f"tierckpt run: {text}", file=sys.stderr, flush=True)


class Hub:
    """Owns the connections of the other ranks. Main thread of rank 0's shim."""

    def __init__(
        self,
        own: Message,
        max_restarts: int,
        selector: selectors.BaseSelector,
        listener: Listener | None,
        rendezvous: Rendezvous,
        obey: Callable[[Message], None],
    ) -> None:
        """`own`: rank 0's own hello; `obey` takes the orders for rank 0 itself."""
        size: int = own["size"]
        self._size, self._selector, self._listener = size, selector, listener
        self._rendezvous, self._obey = rendezvous, obey
        self._max_restarts = max_restarts
        self._coordinator = Coordinator(size, max_restarts)
        self._members: dict[int, Connection] = {}
        self._strangers: dict[Connection, str] = {}
        """Connections that have not yet proved that they belong to the job, with the challenge."""
        self._refused: set[str] = set()
        """Addresses whose refusal was reported."""
        self._spares, self._program = Spares(), own["program"]
        self._slots, self._nodes = {0: own["slot"]}, {0: own["node"]}
        self._new: set[int] = set()
        """Ranks that spares have taken, and do not know yet."""
        if listener is not None:
            selector.register(listener.socket, selectors.EVENT_READ, self._accept)

    def begin_if_complete(self) -> None:
        """Start the first attempt once all ranks are there."""
        if len(self._members) + 1 == self._size and self._coordinator.attempt == 0:
            if self._listener is not None and not self._listener.is_lasting:
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
        for rank, connection in list(self._members.items()):
            place = {"place": self._slots[rank]} if rank in self._new else {}
            connection.send({**message, **place})
        self._new.clear()
        if isinstance(order, Finish):
            self._spares.send(message)
        if isinstance(order, Leave | Finish):
            self.close()
        self._obey(message)
        if isinstance(order, Start) and self._size > 1 and order.attempt <= self._max_restarts:
            self._rendezvous.prepare(self._slots)

    def close(self) -> None:
        """Close all connections."""
        self._stop_listening()
        for connection in [*self._members.values(), *self._strangers, *self._spares.all()]:
            self._drop(connection)
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
            self._strangers[connection] = challenge = secrets.token_hex(16)
            connection.send({"challenge": challenge})
            self._selector.register(
                connection, selectors.EVENT_READ, lambda: self._greet(connection)
            )

    def _greet(self, connection: Connection) -> None:
        """The first messages of a connection, or its end."""
        descriptor = connection.fileno()
        messages = connection.receive()
        if not messages and connection.is_open:
            return
        challenge = self._strangers.pop(connection, "")
        if messages and connection.is_open and not self._admit(connection, challenge, messages[0]):
            return
        if messages and connection.is_open and messages[0].get("standby"):
            self._welcome(messages[0], connection)
            return
        rank = self._rank_of(messages[0]) if messages and connection.is_open else None
        if rank is None:
            self._selector.unregister(descriptor)
            connection.close()
            return
        self._slots[rank] = messages[0].get("slot", {})
        self._join(rank, str(messages[0].get("node", "")), connection)
        for message in messages[1:]:
            self.handle(rank, message)
        self.begin_if_complete()

    def _admit(self, connection: Connection, challenge: str, hello: Message) -> bool:
        """Whether the caller knows the secret of this job; if not, it is refused, and named."""
        secret = self._listener.secret if self._listener is not None else ""
        if knows(secret, challenge, hello):
            answer = proof(secret, "hub", hello.get("challenge"), challenge)
            connection.send({"proof": answer})
            return True
        why = "it does not know the key of this job"
        lasting = self._listener is not None and self._listener.is_lasting
        cure = f"copy {key_file()} of rank 0's machine to it" if lasting else "is it another job's?"
        connection.send({"refused": f"{why}; {cure}"})
        peer = connection.peer
        if peer not in self._refused:
            self._refused.add(peer)
            say(f"a process at {peer} was refused: {why}. If it is one of yours: {cure}")
        self._drop(connection)
        return False

    def _rank_of(self, hello: dict[str, Any]) -> int | None:
        """The rank of a new connection; None if it is not of this job."""
        if self._listener is None or self._coordinator.attempt > 0:  # all were there
            return None
        rank, size = hello.get("rank"), hello.get("size")
        if size != self._size or rank in self._members:
            return None
        return rank if isinstance(rank, int) and 0 < rank < self._size else None

    def _receive(self, rank: int, connection: Connection) -> None:
        descriptor = connection.fileno()
        for message in connection.receive():
            self.handle(rank, message)
        if not connection.is_open and self._members.get(rank) is connection:
            self._selector.unregister(descriptor)
            self._lose(rank)

    def _drop(self, connection: Connection) -> None:
        if connection.is_open:
            self._selector.unregister(connection)
            connection.close()

    # --- lost nodes, and spares -------------------------------------------------------------------

    def _welcome(self, hello: Message, connection: Connection) -> None:
        """A spare has come."""
        if hello.get("program") != self._program or self._listener is None:
            connection.send({"order": "refused"})
            self._drop(connection)
            return
        self._spares.add(str(hello.get("node", "")), connection)
        connection.send({"order": "wait"})
        self._selector.modify(connection, selectors.EVENT_READ, lambda: self._wait(connection))

    def _wait(self, connection: Connection) -> None:
        """A spare says nothing, so this is its end."""
        descriptor = connection.fileno()
        connection.receive()
        if not connection.is_open:
            self._spares.discard(connection)
            self._selector.unregister(descriptor)

    def _lose(self, rank: int) -> None:
        """A shim has ended. Its node counts as lost; a spare node takes its ranks."""
        node = self._nodes[rank]
        ranks = sorted(each for each, name in self._nodes.items() if name == node)
        del self._members[rank]
        taken = (
            self._spares.take(len(ranks)) if self._coordinator.attempt and 0 not in ranks else None
        )
        if taken is None:
            self._give(self._coordinator.leave(f"the shim of rank {rank} has ended"), None)
            return
        spare, connections = taken
        for each, connection in zip(ranks, connections, strict=True):
            if former := self._members.pop(each, None):
                former.send({"order": "dismissed"})
                self._drop(former)
            self._join(each, spare, connection)
        self._new |= set(ranks)
        self._give(self._coordinator.lost(node, spare, ranks), time.time())

    def _join(self, rank: int, node: str, connection: Connection) -> None:
        self._members[rank], self._nodes[rank] = connection, node
        self._selector.modify(
            connection, selectors.EVENT_READ, lambda: self._receive(rank, connection)
        )


def ended_message(attempt: int, end: End) -> Message:
    """The message that a rank's script has ended."""
    return {"ended": dataclasses.asdict(end), "attempt": attempt, "at": time.time()}


__all__ = ["Hub", "ended_message", "say"]
