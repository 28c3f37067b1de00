"""What is checked when a checkpointer is attached: here, where it can still be mended."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from . import health, tree
from .agent import AgentSettings
from .agentclient import AgentClient
from .config import Config
from .desk import DeskSettings
from .errors import ConfigError, NodeHealthError
from .group import Group, Node
from .pool import too_small
from .slots import JobDirectory, Slot, job_id_of
from .state import TrainingState

PLACES = ("path", "shm_dir", "events_dir", "trace_dir", "job_id", "node")
"""Settings that may differ between ranks: a node's disk may have the node's name in its path."""


def check_state(state: TrainingState) -> None:
    """Raise UnsupportedStateError for what could not be taken later."""
    walk = state.walk()
    state.entries(walk)
    state.buffer_entries(walk)
    arena = tree.Arena()
    state.pack_groups(arena.keep)
    # A loader that is asked begins to draw, and a restore may have it draw from somewhere else.
    objects = {**state.extra, **state.extra_per_rank}.items()
    state.pack_extra({n: o for n, o in objects if not isinstance(o, DataLoader)}, arena)


@dataclasses.dataclass(frozen=True)
class Roll:
    """Who takes part in the job, and where; by rank."""

    hosts: tuple[str, ...]
    """Nodes, as `group.host_id` names them."""
    names: tuple[str, ...]
    """Host names of their machines."""
    domains: tuple[str, ...]
    """What dies together."""

    def node(self, rank: int) -> Node:
        """The rank's node."""
        return Node.of(self.hosts[rank], self.hosts)


def check_alike(config: Config, group: Group, host: str) -> Roll:
    """Ranks decide alike without talking, so they must start from the same settings.

    Collective. Raises ConfigError on all ranks, naming one that differs.
    """
    places: dict[str, Any] = dict.fromkeys(PLACES, "-")
    peer = dataclasses.replace(config.peer, domain="-", interface="-", port=0)
    mine = dataclasses.replace(config, peer=peer, **places)
    here = (host, socket.gethostname(), config.peer.domain or host)
    everyone = group.all_gather_object((mine, here))
    ours = everyone[0][0]
    for rank, (theirs, _) in enumerate(everyone):
        if theirs != ours:
            raise ConfigError(
                f"rank {rank} and rank 0 have different settings:\n  {theirs}\n  {ours}\n"
                "All ranks need the same arguments, environment variables and file."
            )
    hosts, names, domains = zip(*(there for _, there in everyone), strict=True)
    return Roll(hosts, names, domains)


def lacking_room(
    config: Config, state: TrainingState, ranks: int, count: int, slots: Iterable[Slot | None]
) -> str:
    """In words and bytes, that shared memory will not do for `count` slots; empty when it will.

    An estimate while the optimizer has made no state yet. `slots` are those that are there already.
    """
    needed = count * _shard_bytes(state, ranks)
    found = os.statvfs(config.shm_dir)
    free = found.f_bavail * found.f_frsize
    have = sum(s.nbytes for s in slots if s is not None)
    if needed <= free + have:
        return ""
    return (
        f"{config.shm_dir} has {free} bytes free, and this rank needs about {needed} "
        f"for {count} slots: {too_small(config.shm_dir)}"
    )


def _shard_bytes(state: TrainingState, ranks: int) -> int:
    """About how large one rank's shard is."""
    walk = state.walk()
    held = sum(t.nbytes for t in walk.striped)
    if not walk.state:  # most optimizers will make two values for every parameter
        held *= 3
    return held // ranks + sum(b.nbytes for b in walk.buffers)


def check_health(config: Config, state: TrainingState, group: Group, node: Node, count: int) -> str:
    """What is wrong with the job's nodes, in words, by name; empty when all is well, or nobody
    asked. Collective: each node's first rank looks. `count` slots of every rank there need room.

    Raises NodeHealthError, on all ranks alike, when nodes that are not well are to be refused.
    """
    if config.health == "off":
        return ""
    name = config.node or socket.gethostname()
    mine: list[str] = []
    if node.first == group.rank:
        needs, memory_bytes = _needs(config, _shard_bytes(state, group.size), group, node, count)
        processes = config.agent != "inline"
        mine = health.examine(needs, memory_bytes, config.health_seconds, processes)
    told = group.all_gather_object((name, mine))
    unwell = NodeHealthError({name: problems for name, problems in told if problems})
    if unwell.problems and config.health == "refuse":
        raise unwell
    return str(unwell)


def _needs(
    config: Config, shard_bytes: int, group: Group, node: Node, count: int
) -> tuple[list[health.Need], int]:
    """What this node's directories and memory have to offer: the slots that are not there yet, and
    one version on each level."""
    job = JobDirectory.at(config.shm_dir, config.job_id or job_id_of(config.path), config.node)
    have = sum(path.stat().st_size for path in job.segments())
    slots_bytes = max(count * shard_bytes * len(node.ranks) - have, 0)
    needs = [health.Need(config.shm_dir, slots_bytes)]
    if config.uses("local"):
        needs.append(health.Need(config.directory, shard_bytes * len(node.ranks), make=True))
    if config.uses("persistent") and "://" not in config.persistent.path:
        needs.append(health.Need(config.persistent.path, shard_bytes * group.size, make=True))
    return needs, slots_bytes


def agent_client(config: Config, group: Group, job: JobDirectory, node: Node) -> AgentClient:
    """This rank's way to the node's agent, which is not started yet."""
    persistent = None
    if config.uses("persistent"):
        persistent = dataclasses.asdict(config.persistent)
        persistent.update(node=node.index, nodes=node.count)
    return AgentClient(
        AgentSettings(
            root=str(job.root),
            folder=job.path.name,
            nice=config.agent_nice,
            linger_seconds=config.agent_linger_seconds,
        ),
        DeskSettings(
            directory=config.directory,
            shard=group.rank,
            shards=group.size,
            keep_last=config.local.keep_last,
            keep_every=config.local.keep_every,
            persistent=persistent,
            modules=config.local.modules,
        ),
        inline=config.agent == "inline",
    )
