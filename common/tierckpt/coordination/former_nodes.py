"""Former nodes: nodes that the job has left and whose agents still run.

The job shrank, or a launcher left a node out because a process failed there. The node's agent keeps
running for a while, with shards in memory and on disk that no other node has. Agents that met for
the peer level know the addresses of all others, and their successors after a restart ask those on
nodes that the job has left.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tierckpt._text import in_words, some
from tierckpt.agent.client import AgentClient
from tierckpt.agent.protocol import AgentAddress, KnownNodes, Mark
from tierckpt.core.copies import Inventory, Location
from tierckpt.group import Group

if TYPE_CHECKING:
    from tierckpt.peer.read_client import RemoteNode

    from .error_barrier import ErrorBarrier

ROSTER_SECONDS = 5.0
"""Time that this node's agent may take to answer `Hello` with the nodes it knows."""
CALLS = 16
"""Number of nodes that a rank asks at once."""
MOST_NAMED = 4
"""Number of silent nodes that are named, with the reason."""
MOST_LISTS = 16
"""Number of different lists of known nodes that are read."""

UNKNOWN: Mark = (0, "")
"""Mark of a rank whose agent has no list of other nodes."""


class FormerNodes:
    """One rank's access to former nodes; `look` is collective. Training thread, except `open`."""

    def __init__(self, agent: AgentClient, hosts: Sequence[str], asks: bool) -> None:
        """`hosts`: every rank's node. `asks`: this rank asks the node's agent, which has a peer
        level."""
        self._agent, self._hosts, self._asks = agent, hosts, asks
        self.alive: list[AgentAddress] = []
        """Agents that answered at the last look; equal on all ranks."""
        self.silent: list[str] = []
        """The first few nodes that did not answer, with the reason. Equal on all ranks."""
        self._down: dict[str, threading.Event] = {}
        """For each of `alive`, by the name of its place: set if it has stopped answering since."""

    def known_nodes(self) -> KnownNodes | None:
        """Return the former nodes that this node's agent knows; None if there are none, or it does
        not answer."""
        if not self._asks:
            return None
        with contextlib.suppress(Exception):  # of any kind: the other ranks wait for this one
            if (known := self._agent.known_nodes(ROSTER_SECONDS)) is not None:
                known_nodes = known.without(self._hosts)
                return known_nodes if known_nodes.agents else None
        return None

    def look(
        self, group: Group | ErrorBarrier, known_nodes: KnownNodes | None, marks: Sequence[Mark]
    ) -> list[list[Inventory]]:
        """Return the inventories of former nodes, by the rank that asked. Collective.

        `marks` are the marks of every rank's list. Lists may differ, as nodes come from different
        runs: one rank sends each list to all, and each rank asks its part of all known agents. A
        node that does not answer is down, as most of those left out are; `silent` names it.
        """
        self.alive, self.silent = [], []
        if {*marks} == {UNKNOWN}:
            return [[] for _ in marks]
        newest_first = sorted({*marks} - {UNKNOWN}, reverse=True)
        senders = [marks.index(mark) for mark in newest_first[:MOST_LISTS]]
        lists = group.all_gather_object(known_nodes if group.rank in senders else None)
        known = dict.fromkeys(each for sender in senders for each in lists[sender].agents)
        gathered = group.all_gather_object(_ask_all(list(known)[group.rank :: group.size]))
        self.alive = [known for answers, _ in gathered for known, _ in answers]
        self._down = {known.where: threading.Event() for known in self.alive}
        self.silent = self._silent_lines(why for _, whys in gathered for why in whys.items())
        return [[inventory for _, inventory in answers] for answers, _ in gathered]

    def _silent_lines(self, whys: Iterable[tuple[AgentAddress, str]]) -> list[str]:
        """Return a line for each node of which no agent answered; for the first few only."""
        answered = {known.host for known in self.alive}
        nodes: dict[str, list[str]] = {}
        for known, why in whys:
            if known.host not in answered:
                nodes.setdefault(known.node, []).append(why)
        lines = [
            f"node {node}, which the job has left, did not answer; shards that it alone has count "
            f"as lost: {'; '.join(dict.fromkeys(reasons))}"
            for node, reasons in sorted(nodes.items())
        ]
        more = sorted(nodes)[MOST_NAMED:]
        rest = [f"{len(more)} more nodes did not answer either: {some(more)}"] if more else []
        return lines[:MOST_NAMED] + rest

    def open(self, place: Location) -> RemoteNode | None:
        """Return an agent that answered, to read from that place. The caller closes it. Any
        thread."""
        for known in self.alive:
            if known.where == place.where:
                return _remote(known, self._down[place.where], place.in_memory)
        return None


def _ask_all(
    nodes: Sequence[AgentAddress],
) -> tuple[list[tuple[AgentAddress, Inventory]], dict[AgentAddress, str]]:
    """Return the inventories of agents that answer, and the reasons of the others. Raises nothing:
    the other ranks wait for this one."""
    answers: list[tuple[AgentAddress, Inventory]] = []
    silent = {known: f"{known.where} was not asked: no more threads" for known in nodes}

    def ask(known: AgentAddress) -> None:
        try:
            with contextlib.closing(_remote(known)) as node:
                answers.append((known, node.inventory(known.host)))
        except Exception as error:
            plain = isinstance(error, OSError)
            silent[known] = str(error) if plain else f"{known.where}: {in_words(error)}"
        else:
            del silent[known]

    with (
        contextlib.suppress(RuntimeError),  # no more threads
        ThreadPoolExecutor(CALLS, "tierckpt-absent") as pool,
    ):
        for known in nodes:
            pool.submit(ask, known)
    return sorted(answers, key=lambda answer: answer[0].host), silent


def _remote(
    known: AgentAddress, down: threading.Event | None = None, in_memory: bool = False
) -> RemoteNode:
    from tierckpt.peer.address import Address
    from tierckpt.peer.read_client import RemoteNode

    address = Address(known.address, known.port)
    return RemoteNode(known.where, address, known.secret.encode(), down, in_memory)
