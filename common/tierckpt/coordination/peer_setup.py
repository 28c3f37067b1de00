"""Peer setup: redundancy groups, and the introduction of the nodes' agents to each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tierckpt._text import in_words
from tierckpt.agent.client import AgentClient
from tierckpt.agent.protocol import (
    AgentAddress,
    KnownNodes,
    ListenFailed,
    ListenSettings,
    PartySettings,
    ServedPlaces,
)
from tierckpt.config import Config
from tierckpt.erasure import isal
from tierckpt.erasure.groups import RedundancyGroup, Scheme, TooFewDomainsError, plan_groups
from tierckpt.format.ids import VersionId
from tierckpt.group import Group, Node
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.job_directory import job_directory

from .error_barrier import ErrorBarrier, by_rank
from .settings_check import JobTopology

if TYPE_CHECKING:
    from tierckpt.peer.address import Address

MEET_SECONDS = 30.0
"""Time that an agent may take to listen at the start of a run."""


Groups = tuple[RedundancyGroup, ...]


def redundancy_groups(config: Config, topology: JobTopology, group: Group) -> tuple[Groups, str]:
    """Return the redundancy groups, and a message if they are not as configured. Collective.

    Raises ConfigError when the groups cannot be as configured and the job has no data yet. Later,
    nodes may be lost without replacement, but the data of earlier runs must still be restorable:
    then there are no groups.
    """
    scheme = Scheme.parse(config.peer.redundancy)
    if not config.uses("peer"):
        return (), ""
    try:
        return plan_groups(topology.domains, scheme, config.peer.group_size), ""
    except TooFewDomainsError as error:
        if not any(group.all_gather_object(_is_begun(config))):
            raise
        return (), (
            f"the peer level is off: {error}. Data that earlier runs of this job left can still be "
            "restored, and rebuilt where it was protected; a new version is lost with a node's "
            "disk until peer_redundancy fits the job's nodes, or the job has its nodes again"
        )


def _is_begun(config: Config) -> bool:
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

    @property
    def slow_coding(self) -> str:
        """A message if the fast library for the codes in use is missing, else empty."""
        needs = any(group.code.m > 1 and group.code.k > 1 for group in self.groups)
        return isal.MISSING if needs and isal.find() is None else ""

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
        on all ranks alike, and the job goes on.
        """
        if not self.groups:
            return
        from tierckpt.peer.address import own_network

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
        """Order the protection of a version that is complete on all local levels.

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
            self._config.interface,
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
        from tierckpt.peer.address import Address

        try:
            heard = self._agent.listen(where, MEET_SECONDS)
            if isinstance(heard, ListenFailed):
                return None, heard.error
            return Address(heard.host, heard.port), ""
        except (TimeoutError, OSError) as error:
            return None, str(error) or type(error).__name__
        except Exception as error:  # an invalid answer: the other ranks wait for this one
            return None, in_words(error)


def _party_settings(
    shard: int, group: RedundancyGroup, addresses: dict[int, Address]
) -> PartySettings:
    """Return a shard's party; `addresses` has the agent of every member's node, by rank."""
    there = [addresses[rank] for rank in group.ranks]
    hosts, ports = tuple(each.host for each in there), tuple(each.port for each in there)
    code = group.code
    return PartySettings(shard, group.ranks, code.n, code.k, code.m, hosts, ports)
