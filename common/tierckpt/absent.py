"""Nodes that the job was on and is not on any more, whose agents still live.

The job shrank, or a launcher left a node out because a process failed there; its agent lingers, and
has shards in memory and on disk that nobody else has. Agents that met for the peer level know where
all others are, and their successors in a restart ask those on whose nodes they are not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .agentclient import AgentClient
from .group import Group
from .inventory import Inventory
from .manifest import digest

if TYPE_CHECKING:
    from .peer.remote import RemoteNode
    from .together import Together

ROSTER_SECONDS = 5.0
"""So long this node's agent may take to bid welcome, which is to say whom it knows."""
CALLS = 16
"""Nodes that a rank asks at once."""
MOST_LISTS = 16
"""Different ones of what nodes know; more are not looked at."""

Mark = tuple[int, str]
"""A generation and a digest: tells one list of nodes from another, and the newer of two."""
UNKNOWN: Mark = (0, "")
"""Of no list."""


@dataclass(frozen=True)
class Known:
    """A node's agent."""

    host: str
    """The node, as `hostid.host_id` names it."""
    address: str
    port: int
    secret: str
    """Of the life in which it met others last."""

    @property
    def where(self) -> str:
        """How places there are called."""
        return f"agent of node {self.host.partition('/')[0]}, {self.address} port {self.port}"


@dataclass(frozen=True)
class Roster:
    """The agents of one life of the job, and those of lives before that it had to ask."""

    generation: int
    """Of the life."""
    agents: tuple[Known, ...]

    def as_message(self) -> dict[str, Any]:
        """For the socket."""
        return asdict(self)

    @staticmethod
    def of_message(values: dict[str, Any]) -> Roster:
        """The inverse of `as_message`."""
        return Roster(int(values["generation"]), tuple(Known(**each) for each in values["agents"]))

    def without(self, hosts: Iterable[str]) -> Roster:
        """Those of other nodes."""
        here = set(hosts)
        absent = tuple(each for each in self.agents if each.host not in here)
        return Roster(self.generation, absent)

    @property
    def mark(self) -> Mark:
        """The same wherever the same is known."""
        return self.generation, digest(repr(self.agents).encode()).hex()


class Absent:
    """One rank's way to them; `look` is collective. Training thread, but for `open`."""

    def __init__(self, agent: AgentClient, hosts: Sequence[str], asks: bool) -> None:
        """`hosts`: every rank's node. `asks`: this rank speaks with the node's agent, which has a
        peer level."""
        self._agent, self._hosts, self._asks = agent, hosts, asks
        self.alive: list[Known] = []
        """Those that answered when all looked last; alike on all ranks."""
        self._down: dict[str, threading.Event] = {}
        """Of these, by the name of their places: set where one has not answered since."""

    def roster(self) -> Roster | None:
        """What this node's agent knows of absent nodes; None where there are none, or it does not
        say."""
        if not self._asks:
            return None
        with contextlib.suppress(Exception):  # of whatever kind: the other ranks wait for this one
            if told := self._agent.roster(ROSTER_SECONDS):
                roster = Roster.of_message(told).without(self._hosts)
                return roster if roster.agents else None
        return None

    def look(
        self, group: Group | Together, roster: Roster | None, marks: Sequence[Mark]
    ) -> list[list[Inventory]]:
        """What those nodes have, by the rank that asked. `marks`: of every rank's roster. Of those
        that differ, as nodes come from different lives, one rank each tells it, and each rank asks
        its part of all that is known.

        A node that does not answer is down, as most are that were left out.
        """
        newest_first = sorted({*marks} - {UNKNOWN}, reverse=True)
        tellers = [marks.index(mark) for mark in newest_first[:MOST_LISTS]]
        told = group.all_gather_object(roster if group.rank in tellers else None)
        known = dict.fromkeys(each for teller in tellers for each in told[teller].agents)
        found = _ask_all(list(known)[group.rank :: group.size])
        everyone = group.all_gather_object(found)
        self.alive = [known for theirs in everyone for known, _ in theirs]
        self._down = {known.where: threading.Event() for known in self.alive}
        return [[inventory for _, inventory in theirs] for theirs in everyone]

    def open(self, where: str) -> RemoteNode | None:
        """One that answered, by the name of its places; the caller closes it. Any thread."""
        found = (known for known in self.alive if known.where == where)
        return next((_remote(known, self._down[where]) for known in found), None)


def _ask_all(nodes: Sequence[Known]) -> list[tuple[Known, Inventory]]:
    """What those that answer have. Raises nothing: the other ranks wait for this one."""
    answers: list[tuple[Known, Inventory]] = []

    def ask(known: Known) -> None:
        with contextlib.suppress(Exception), contextlib.closing(_remote(known)) as node:
            answers.append((known, node.inventory(known.host)))

    with (
        contextlib.suppress(RuntimeError),  # no more threads
        ThreadPoolExecutor(CALLS, "tierckpt-absent") as pool,
    ):
        for known in nodes:
            pool.submit(ask, known)
    return sorted(answers, key=lambda answer: answer[0].host)


def _remote(known: Known, down: threading.Event | None = None) -> RemoteNode:
    from .peer.address import Address
    from .peer.remote import RemoteNode

    address = Address(known.address, known.port)
    return RemoteNode(known.where, address, known.secret.encode(), down)
