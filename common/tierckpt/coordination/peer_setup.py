"""The training side of the peer level: who protects whom, and how the nodes' agents meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

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

from .error_barrier import by_rank
from .settings_check import JobTopology

if TYPE_CHECKING:
    from tierckpt.peer.address import Address

MEET_SECONDS = 30.0
"""So long an agent may take to listen, when a run begins."""


Groups = tuple[RedundancyGroup, ...]


def redundancy_groups(config: Config, topology: JobTopology, group: Group) -> tuple[Groups, str]:
    """Who protects whom, empty when nobody does; and what to say where that is not as asked.

    Raises ConfigError when it cannot be as asked and the job has yet to begin. Later nodes may be
    lost that nobody replaces, and what earlier runs left is to be restored all the same: then
    there are no groups. Collective.
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
            f"the peer level is off: {error}. What earlier runs of this job left can still be "
            "restored, and rebuilt where it was protected; new versions are lost with a node's "
            "disk until peer_redundancy is set to what the job can have, or it has its nodes again"
        )


def _is_begun(config: Config) -> bool:
    """Whether a run before left anything on this node, on disk or in memory."""
    store = LocalStore(config.directory)
    with contextlib.suppress(OSError):
        if store.parities() or store.keys():
            return True
    with contextlib.suppress(OSError):
        return next(job_directory(config).sealed(), None) is not None
    return False


def out_of_reach(addresses: Sequence[Address | None], networks: Sequence[str]) -> list[str]:
    """Which agents others would look for in vain, and what to do about it: by rank, where each
    node's agent listens (told by one rank of it), and the network it is in (`own_network`)."""
    problems: list[str] = []
    taken: dict[Address, int] = {}
    for rank, address in enumerate(addresses):
        if address is None:
            continue
        listens = f"rank {rank}'s agent would listen at"
        if address.is_loopback and len(set(networks)) > 1:
            problems.append(
                f"{listens} {address.host}, where other machines cannot reach it; set "
                "peer_interface to the interface, or the address, that they reach"
            )
        elif (other := taken.setdefault(address, rank)) != rank:
            problems.append(
                f"{listens} {address}, and so would rank {other}'s; set peer_interface to an "
                "address that is the node's own"
            )
    return problems


class PeerSetup:
    """One rank's part. Training thread.

    What needs another node goes on between the agents; here they are only introduced.
    """

    def __init__(
        self,
        config: Config,
        group: Group,
        topology: JobTopology,
        agent: AgentClient,
        groups: Groups,
    ) -> None:
        """`groups`: see `redundancy_groups`."""
        self._config, self._group, self._topology, self._agent = config.peer, group, topology, agent
        self._node: Node = topology.node(group.rank)
        self.groups = groups
        self.ready = False
        """The agents know each other."""
        self._lost: dict[VersionId, frozenset[int]] = {}

    @property
    def slow_coding(self) -> str:
        """What to say when there is no fast library for the codes that need one."""
        needs = any(group.code.m > 1 and group.code.k > 1 for group in self.groups)
        return isal.MISSING if needs and isal.find() is None else ""

    def meet(
        self,
        secret: str,
        generation: int,
        former_nodes: Sequence[AgentAddress],
        complain: Callable[[str], None],
    ) -> None:
        """Introduce the agents of all nodes to each other; collective, when a run begins, of which
        they prove to know the secret. They remember those of `former_nodes` nodes for the next one.

        A node whose agent cannot be reached costs the level, on all ranks alike, and not the job.
        """
        if not self.groups:
            return
        from tierckpt.peer.address import own_network

        mine, problem = None, ""
        where = self._where(secret)
        if self._node.first == self._group.rank:
            mine, problem = self._listen(where)
        everyone = self._group.all_gather_object((mine, problem, own_network()))
        addresses = [address for address, _, _ in everyone]
        problems = by_rank([why for _, why, _ in everyone])
        problems = problems or out_of_reach(addresses, [network for _, _, network in everyone])
        self.ready = not problems
        if problems:
            complain(f"the peer level is off: {'; '.join(problems)}")
            return
        if mine is None:
            return
        hosts = self._topology.hosts
        of_host = {h: a for h, a in zip(hosts, addresses, strict=True) if a is not None}
        of_rank = {rank: of_host[host] for rank, host in enumerate(hosts)}
        parties = [
            _party_settings(rank, group, of_rank)
            for group in self.groups
            for rank in group.ranks
            if rank in self._node.ranks
        ]
        where = replace(where, port=mine.port)
        everybody = (AgentAddress(h, a.host, a.port, secret) for h, a in sorted(of_host.items()))
        known_nodes = KnownNodes(generation, (*everybody, *former_nodes))
        self._agent.introduce(where, parties, known_nodes)

    def protect(self, version: VersionId) -> bool:
        """Have a version protected that is complete on all local levels.

        True when this rank will hear how it went; the first of each node speaks for the others.
        """
        if not self.ready or self._node.first != self._group.rank:
            return False
        self._agent.protect(version, self._lost.get(version))
        return True

    def mend(self, version: VersionId, lost: frozenset[int]) -> None:
        """When this version is protected, parity is to be made beside these shards only."""
        self._lost = {version: lost}

    def _where(self, secret: str) -> ListenSettings:
        """Where the agent is to listen, and what it is to show."""
        others = [
            n
            for n, h in zip(self._topology.names, self._topology.hosts, strict=True)
            if h != self._topology.hosts[self._group.rank]
        ]
        mine = self._topology.names[self._group.rank]
        # Not towards ourselves: a machine's own name is often a loopback address on it.
        towards = next((name for name in others if name != mine), "localhost")
        agent = self._agent
        return ListenSettings(
            secret,
            self._config.interface,
            self._config.port,
            towards,
            ServedPlaces(agent.settings.root, agent.settings.folder, agent.session.directory),
        )

    def _listen(self, where: ListenSettings) -> tuple[Address | None, str]:
        """Where this node's agent listens, or why it does not."""
        from tierckpt.peer.address import Address

        try:
            heard = self._agent.listen(where, MEET_SECONDS)
            if isinstance(heard, ListenFailed):
                return None, heard.error
            return Address(heard.host, heard.port), ""
        except (TimeoutError, OSError) as error:
            return None, str(error) or type(error).__name__
        except Exception as error:  # an answer that is none: the other ranks wait for this one
            return None, f"{type(error).__name__}: {error}"


def _party_settings(
    shard: int, group: RedundancyGroup, addresses: dict[int, Address]
) -> PartySettings:
    """A shard's party; `addresses` has the agent of every member's node, by rank."""
    there = [addresses[rank] for rank in group.ranks]
    hosts, ports = tuple(each.host for each in there), tuple(each.port for each in there)
    code = group.code
    return PartySettings(shard, group.ranks, code.n, code.k, code.m, hosts, ports)
