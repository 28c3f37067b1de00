"""What is checked when a checkpointer is attached: here, where it can still be mended."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence

from torch.utils.data import DataLoader

from . import health, inplace, tree
from .agent import AgentSettings
from .agentclient import AgentClient
from .config import Config
from .desk import DeskSettings
from .errors import NodeHealthError
from .group import Group, Node
from .pool import too_small
from .slots import JobDirectory, Slot, job_id_of
from .state import TrainingState


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


def lacking_room(
    config: Config,
    state: TrainingState,
    ranks: int,
    slots: Sequence[Slot | None],
    in_place: bool = False,
) -> str:
    """In words and bytes, that memory will not do for the slots; empty when it will.

    An estimate while the optimizer has made no state yet. `slots` are those that are there already,
    and None for each that is not; `in_place`: they are files of the local level.
    """
    count = inplace.most_files(config, len(slots)) if in_place else len(slots)
    place = config.directory if in_place else config.shm_dir
    needed = count * shard_bytes(state, ranks)
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    have = sum(s.nbytes for s in slots if s is not None and (s.file is not None) == in_place)
    if needed <= free + have:
        return ""
    if in_place:
        return (
            f"{place} has {free} bytes free, and this rank needs about {needed} there for "
            f"{len(slots)} slots and the versions that it keeps: some will not be committed. Give "
            "it more memory, or set local_keep_last to less"
        )
    return (
        f"{place} has {free} bytes free, and this rank needs about {needed} "
        f"for {count} slots: {too_small(place)}"
    )


def shard_bytes(state: TrainingState, ranks: int) -> int:
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
        needs, memory_bytes = _needs(config, shard_bytes(state, group.size), group, node, count)
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
    in_place = inplace.expected(config)
    files = {*job.segments(), *(path for path in job.images() if path.exists())}
    have = sum(path.stat().st_size for path in files)
    each = inplace.most_files(config, count) if in_place else count
    slots_bytes = max(each * shard_bytes * len(node.ranks) - have, 0)
    needs = [health.Need(config.shm_dir, 0 if in_place else slots_bytes)]
    if config.uses("local"):
        local_bytes = slots_bytes if in_place else shard_bytes * len(node.ranks)
        needs.append(health.Need(config.directory, local_bytes, make=True))
    if config.uses("persistent") and "://" not in config.persistent.path:
        needs.append(health.Need(config.persistent.path, shard_bytes * group.size, make=True))
    return needs, slots_bytes


def agent_client(config: Config, group: Group, job: JobDirectory, node: Node) -> AgentClient:
    """This rank's way to the node's agent, which is not started yet."""
    persistent = None
    if config.uses("persistent"):
        persistent = dataclasses.asdict(config.persistent)
        persistent.update(node=node.index, nodes=node.count, best=config.best)
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
