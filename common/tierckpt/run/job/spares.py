"""Spares of a job: shims on other nodes that have imported everything and wait for a rank."""

from __future__ import annotations

from .channel import Connection, Message


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


__all__ = ["Spares"]
