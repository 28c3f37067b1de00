"""Peers: redundancy groups, the introduction of the nodes' agents, and nodes that the job has
left.

Former nodes: the job shrank, or a launcher left a node out because a process failed there. The
node's agent keeps running for a while, with shards in memory and on disk that no other node has.
Agents that met for the peer level know the addresses of all others, and their successors after a
restart ask those on nodes that the job has left.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from tierckpt._text import error_text, some
from tierckpt.agent.client import AgentClient
from tierckpt.agent.protocol import (
    AgentAddress,
    KnownNodes,
    ListenFailed,
    ListenSettings,
    Mark,
    PartySettings,
    ServedPlaces,
)
from tierckpt.config import Config
from tierckpt.core.restore_plan import Inventory, Location
from tierckpt.format.ids import VersionId
from tierckpt.group import Group, Node
from tierckpt.storage.job_directory import job_directory
from tierckpt.storage.local import LocalStore

from .error_barrier import ErrorBarrier, by_rank
from .settings_check import JobTopology

if TYPE_CHECKING:
    from tierckpt.erasure.groups import RedundancyGroup
    from tierckpt.net.addresses import Address
    from tierckpt.peer.remote_reads import RemoteNode

    from .error_barrier import ErrorBarrier


MEET_SECONDS = 30.0
"""Time that an agent may take to listen at the start of a run."""


Groups: TypeAlias = "tuple[RedundancyGroup, ...]"


def redundancy_groups(config: Config, topology: JobTopology, group: Group) -> tuple[Groups, str]:
    """Return the redundancy groups, and a message if they are not as configured. Collective.

    Raises ConfigError when the groups cannot be as configured and the job has no data yet. Later,
    nodes may be lost without replacement, but the data of earlier runs must still be restorable:
    then there are no groups.
    """
    if not config.uses("peer"):
        return (), ""
    from tierckpt.erasure.groups import Scheme, TooFewDomainsError, plan_groups

    scheme = Scheme.parse(config.peer.redundancy)
    try:
        return plan_groups(topology.domains, scheme), ""
    except TooFewDomainsError as error:
        if not any(group.all_gather_object(_has_run_before(config))):
            raise
        return (), (
            f"the peer level is off: {error}. Data that earlier runs of this job left can still be "
            "restored, and rebuilt where it was protected; a new version is lost with a node's "
            "disk until peer_redundancy fits the job's nodes, or the job has its nodes again"
        )


def _has_run_before(config: Config) -> bool:
    """Whether an earlier run left data on this node, on disk or in memory."""
    store = LocalStore(config.directory)
    with contextlib.suppress(OSError):
        if store.parities() or store.keys():
            return True
    with contextlib.suppress(OSError):
        return next(job_directory(config).sealed(), None) is not None
    return False


def out_of_reach(addresses: Sequence[Address | None], networks: Sequence[str]) -> list[str]:
    """Return the agents that others cannot reach, each with the remedy. By rank, `addresses` has
    the place where each node's agent listens (given by one rank of the node), and `networks` the
    network of the rank (`own_network`)."""
    problems: list[str] = []
    taken: dict[Address, int] = {}
    for rank, address in enumerate(addresses):
        if address is None:
            continue
        listens = f"rank {rank}'s agent would listen on"
        if address.is_loopback and len(set(networks)) > 1:
            problems.append(
                f"{listens} {address.host}, where other machines cannot reach it; set "
                "peer_interface to an interface or address that they can reach"
            )
        elif (other := taken.setdefault(address, rank)) != rank:
            problems.append(
                f"{listens} {address}, and rank {other}'s agent would, too; set peer_interface to "
                "an address of the node's own"
            )
    return problems


class PeerSetup:
    """One rank's part of the peer level. Training thread.

    Work that needs another node is done by the agents; this object only introduces them.
    """

    def __init__(
        self,
        config: Config,
        group: Group,
        topology: JobTopology,
        agent: AgentClient,
        groups: Groups,
    ) -> None:
        """`groups`: the result of `redundancy_groups`."""
        self._config, self._group, self._topology, self._agent = config.peer, group, topology, agent
        self.node: Node = topology.node(group.rank)
        self.groups = groups
        self.ready = False
        """True when the agents know each other."""
        self.own_address: Address | None = None
        """Where this rank listens; the others learn it when the agents meet."""
        self.addresses: list[Address | None] = []
        """Where each rank listens, once the agents know each other."""
        self.secret = ""
        """The secret of the run, since the agents met."""
        self._lost: dict[VersionId, frozenset[int]] = {}
        if groups:  # now: without a restore the agents meet in the first step
            import tierckpt.erasure.parity_manifest
            import tierckpt.net.addresses  # noqa: F401

    @property
    def slow_coding(self) -> str:
        """A message if the fast library for the codes in use is missing, else empty."""
        if not any(group.code.m > 1 and group.code.k > 1 for group in self.groups):
            return ""
        from tierckpt.erasure import kernels

        return kernels.ISAL_MISSING if kernels.find_isal() is None else ""

    def meet(
        self,
        group: Group | ErrorBarrier,
        secret: str,
        generation: int,
        former_nodes: Sequence[AgentAddress],
        complain: Callable[[str], None],
    ) -> None:
        """Introduce the agents of all nodes to each other, at the start of a run. Collective over
        `group`, the job's.

        The agents prove to each other that they know the run's `secret`. They remember the agents
        of `former_nodes` for the next run. If one node's agent cannot be reached, the level is off
        on all ranks alike, and the job continues.
        """
        if not self.groups:
            return
        from tierckpt.net.addresses import own_network

        own, problem = None, ""
        where = self._where(secret)
        if self.node.first == self._group.rank:
            own, problem = self._listen(where)
        gathered = group.all_gather_object((own, problem, own_network(), self.own_address))
        addresses = [address for address, *_ in gathered]
        problems = by_rank([why for _, why, *_ in gathered])
        problems = problems or out_of_reach(addresses, [network for _, _, network, _ in gathered])
        self.secret, self.addresses = secret, [address for *_, address in gathered]
        self.ready = not problems
        if problems:
            complain(f"the peer level is off: {'; '.join(problems)}")
            return
        if own is None:
            return
        hosts = self._topology.hosts
        of_host = {h: a for h, a in zip(hosts, addresses, strict=True) if a is not None}
        of_rank = {rank: of_host[host] for rank, host in enumerate(hosts)}
        parties = [
            _party_settings(rank, group, of_rank)
            for group in self.groups
            for rank in group.ranks
            if rank in self.node.ranks
        ]
        where = replace(where, port=own.port)
        everybody = (AgentAddress(h, a.host, a.port, secret) for h, a in sorted(of_host.items()))
        known_nodes = KnownNodes(generation, (*everybody, *former_nodes))
        self._agent.introduce(where, parties, known_nodes)

    def protect(self, version: VersionId) -> bool:
        """Order the protection of a version complete on all local levels.

        True when this rank receives the result; the first rank of each node speaks for the others.
        """
        if not self.ready or self.node.first != self._group.rank:
            return False
        self._agent.protect(version, self._lost.get(version))
        return True

    def mend(self, version: VersionId, lost: frozenset[int]) -> None:
        """When this version is protected, make parity beside these shards only."""
        self._lost = {version: lost}

    def _where(self, secret: str) -> ListenSettings:
        """Return where the agent has to listen, and the places that it serves."""
        agent = self._agent
        return ListenSettings(
            secret,
            self._config.device,
            self._config.port,
            self.towards,
            ServedPlaces(agent.settings.root, agent.settings.folder, agent.session.directory),
        )

    @property
    def towards(self) -> str:
        """A machine of another node, or this one, if there is no other."""
        others = [
            n
            for n, h in zip(self._topology.names, self._topology.hosts, strict=True)
            if h != self._topology.hosts[self._group.rank]
        ]
        own = self._topology.names[self._group.rank]
        # Not towards this node: a machine's own name is often a loopback address on it.
        return next((name for name in others if name != own), "localhost")

    def _listen(self, where: ListenSettings) -> tuple[Address | None, str]:
        """Return where this node's agent listens, or the reason why it does not."""
        from tierckpt.net.addresses import Address

        try:
            answer = self._agent.listen(where, MEET_SECONDS)
            if isinstance(answer, ListenFailed):
                return None, answer.error
            return Address(answer.host, answer.port), ""
        except (TimeoutError, OSError) as error:
            return None, str(error) or type(error).__name__
        except Exception as error:  # an invalid answer: the other ranks wait for this one
            return None, error_text(error)


def _party_settings(
    shard: int, group: RedundancyGroup, addresses: dict[int, Address]
) -> PartySettings:
    """Return a shard's party; `addresses` has the agent of every member's node, by rank."""
    there = [addresses[rank] for rank in group.ranks]
    hosts, ports = tuple(each.host for each in there), tuple(each.port for each in there)
    code = group.code
    return PartySettings(shard, group.ranks, code.n, code.k, code.m, hosts, ports)


ROSTER_SECONDS = 5.0
"""Time that this node's agent may take to answer `Hello` with the nodes it knows."""
CALLS = 16
"""Number of nodes that a rank asks at once."""
MAX_NAMED = 4
"""Number of silent nodes that are named, with the reason."""
MAX_LISTS = 16
"""Number of different lists of known nodes that are read."""

UNKNOWN: Mark = (0, "")
"""Mark of a rank with an agent that has no list of other nodes."""


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
        senders = [marks.index(mark) for mark in newest_first[:MAX_LISTS]]
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
        more = sorted(nodes)[MAX_NAMED:]
        rest = [f"{len(more)} more nodes did not answer either: {some(more)}"] if more else []
        return lines[:MAX_NAMED] + rest

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
            silent[known] = str(error) if plain else f"{known.where}: {error_text(error)}"
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
    from tierckpt.net.addresses import Address
    from tierckpt.peer.remote_reads import RemoteNode

    address = Address(known.address, known.port)
    return RemoteNode(known.where, address, known.secret.encode(), down, in_memory)
