"""Rank 0's shim as the centre of the job: reports come in, orders go out.

The orders are: start the next attempt, leave the job to the launcher, or end. `Coordinator` is
pure: messages of the ranks go in, orders to all ranks come out. Spares are shims on other nodes
that have imported everything and wait for a rank.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from tierckpt import _milestones

from .meeting import Connection, Listener, Message, Rendezvous, key_file, knows, needs_own, proof

__all__ = [
    "OUTSIDE",
    "Coordinator",
    "End",
    "Finish",
    "Hub",
    "Leave",
    "Order",
    "Spares",
    "Start",
    "describe",
    "ended_message",
    "say",
]


OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the job from outside; a failure is none of these."""


class End(Struct, frozen=True):
    """The end of one rank's script in one attempt."""

    status: int
    """As from `os.waitpid`."""
    milestone: str = ""
    """The last milestone that its checkpointer reported."""
    passed_boundary: bool = False
    is_final: bool = False
    """The job ends on purpose: the ranks agreed to, or a signal asked this rank to."""
    uses_mpi: bool = False
    """MPI was initialized in the script's process."""

    @property
    def is_success(self) -> bool:
        """True for exit status 0."""
        return self.status == 0

    @property
    def text(self) -> str:
        """The end, as text."""
        return describe(self.status)


class Start(Struct, frozen=True):
    """Order: end the script if it runs, and start this attempt."""

    attempt: int
    text: str = ""


class Leave(Struct, frozen=True):
    """Order: the launcher decides from now on; the end of a script is the end of its shim."""

    text: str = ""


class Finish(Struct, frozen=True):
    """Order: all scripts have ended well; end."""


Order = Start | Leave | Finish


def describe(status: int) -> str:
    """The end of a process, as text; `status` as from `os.waitpid`."""
    if not os.WIFSIGNALED(status):
        return f"ended with status {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"was killed by signal {number}"


class Coordinator:
    """The state of the job, in rank 0's shim."""

    def __init__(self, size: int, max_restarts: int) -> None:
        self._size, self._max_restarts = size, max_restarts
        self.attempt = 0
        """The current attempt, from 1; 0 before the first."""
        self._finished: set[int] = set()
        self._last: tuple[int, int, str] | None = None
        """The last failure, if its script had passed no boundary."""
        self.is_over = False
        """No further attempt starts."""

    def start(self) -> Order:
        """All shims are there."""
        self.attempt = 1
        return Start(1)

    def ended(self, rank: int, attempt: int, end: End) -> Order | None:
        """The script of a rank has ended."""
        if self.is_over or attempt != self.attempt:
            return None  # a consequence of the failure that ended this attempt
        if end.is_success:
            self._finished.add(rank)
            if len(self._finished) < self._size:
                return None
            self.is_over = True
            return Finish()
        if end.is_final or (os.WIFSIGNALED(end.status) and os.WTERMSIG(end.status) in OUTSIDE):
            return self.leave()
        cause = f"rank {rank} {end.text}"
        if end.uses_mpi:
            return self.leave(
                f"{cause}: a process that uses MPI cannot be started again under one mpirun, which "
                "handles the failure. Gloo or NCCL in place of MPI can be restarted"
            )
        if end.milestone == _milestones.REFUSED:
            return self.leave(f"{cause}: it was refused at its start")
        place = (rank, end.status, end.milestone)
        same, self._last = place == self._last, None if end.passed_boundary else place
        if same and not end.passed_boundary:
            return self.leave(f"{cause} for the second time in a row before its first boundary")
        if attempt > self._max_restarts:
            return self.leave(f"{cause}; --max-restarts {self._max_restarts} leaves no attempt")
        self.attempt += 1
        self._finished.clear()
        most = self._max_restarts + 1
        return Start(self.attempt, f"{cause}; attempt {self.attempt} of {most} starts")

    def lost(self, node: str, spare: str, ranks: Sequence[int]) -> Order | None:
        """A node is lost, and a spare one can take its ranks."""
        if self.is_over:
            return None
        cause = f"node {node} is lost"
        if self.attempt > self._max_restarts:
            return self.leave(f"{cause}; --max-restarts {self._max_restarts} leaves no attempt")
        self.attempt += 1
        self._finished.clear()
        self._last = None
        word = "rank" if len(ranks) == 1 else "ranks"
        return Start(
            self.attempt,
            f"{cause}; spare {spare} takes {word} {', '.join(map(str, ranks))}; "
            f"attempt {self.attempt} of {self._max_restarts + 1} starts",
        )

    def leave(self, text: str = "") -> Order | None:
        """The launcher decides from now on: a shim is lost, or has received a signal."""
        if self.is_over:
            return None
        self.is_over = True
        return Leave(f"{text}. The launcher takes over" if text else "")


class Spares:
    """The connections of spares, by node. Main thread of rank 0's shim, which owns the sockets."""

    def __init__(self) -> None:
        self._nodes: dict[str, list[Connection]] = {}

    def add(self, node: str, connection: Connection) -> None:
        """A spare has come."""
        self._nodes.setdefault(node, []).append(connection)

    def discard(self, connection: Connection) -> None:
        """A spare has gone, or was refused."""
        for waiting in self._nodes.values():
            if connection in waiting:
                waiting.remove(connection)

    def take(self, count: int) -> tuple[str, list[Connection]] | None:
        """A node with as many spares as the lost node had ranks, and that many of them, which are
        spares no longer; None if there is none. All ranks of a node stay together."""
        for node, waiting in self._nodes.items():
            if len(waiting) >= count:
                taken, self._nodes[node] = waiting[:count], waiting[count:]
                return node, taken
        return None

    def all(self) -> list[Connection]:
        """All spares."""
        return [each for waiting in self._nodes.values() for each in waiting]

    def send(self, message: Message) -> None:
        """Send a message to all spares."""
        for each in self.all():
            each.send(message)


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
        self._unproved: dict[Connection, str] = {}
        """Connections that have not yet proved that they belong to the job, with the challenge."""
        self._refused: set[str] = set()
        """Addresses with a reported refusal."""
        self._spares, self._program = Spares(), own["program"]
        self._slots, self._nodes = {0: own["slot"]}, {0: own["node"]}
        self._new: set[int] = set()
        """Ranks that spares have taken, and do not know yet."""
        if listener is not None:
            selector.register(listener.socket, selectors.EVENT_READ, self._accept)

    def start_if_complete(self) -> None:
        """Start the first attempt once all ranks are there."""
        if len(self._members) + 1 == self._size and self._coordinator.attempt == 0:
            if self._listener is not None and not self._listener.is_lasting:
                self._stop_listening()
            self._give(self._coordinator.start(), None)

    def give_up(self) -> None:
        """Not all ranks have come: every rank continues without the others."""
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

    def prepare(self) -> None:
        """Prepare the next attempt, while this one trains."""
        if self._size > 1 and self._coordinator.attempt <= self._max_restarts:
            self._rendezvous.prepare(self._slots)

    def close(self) -> None:
        """Close all connections."""
        self._stop_listening()
        for connection in [*self._members.values(), *self._unproved, *self._spares.all()]:
            self._drop(connection)
        self._members.clear()
        self._unproved.clear()

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
            self._unproved[connection] = challenge = secrets.token_hex(16)
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
        challenge = self._unproved.pop(connection, "")
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
        self.start_if_complete()

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
    return {"ended": asdict(end), "attempt": attempt, "at": time.time()}
