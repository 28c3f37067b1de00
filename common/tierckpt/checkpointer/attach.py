"""Checks at the start of a checkpointer, when a user can still correct the cause."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from tierckpt._children import module_path
from tierckpt._text import some
from tierckpt.agent.address import AgentSettings
from tierckpt.agent.client import AgentClient
from tierckpt.agent.protocol import PersistentSettings, SessionSettings
from tierckpt.config import Config
from tierckpt.coordination.shown_once import said_by
from tierckpt.errors import NodeHealthError
from tierckpt.group import Group, Node
from tierckpt.state import tree_codec
from tierckpt.state.names import named_modules
from tierckpt.state.training_state import TrainingState
from tierckpt.storage import health
from tierckpt.storage.memory import image_file
from tierckpt.storage.memory.image_file import images_of
from tierckpt.storage.memory.job_directory import JobDirectory, job_directory, rank_of
from tierckpt.storage.memory.slot_pool import too_small


def check_state(state: TrainingState) -> None:
    """Raise UnsupportedStateError for state that a version could not store."""
    state.refuse_odd_keys()
    walk = state.walk()
    state.entries(walk)
    state.buffer_entries(walk)
    arena = tree_codec.Arena()
    state.pack_groups(arena.keep)
    state.pack_remainders(arena)
    # state_dict() of a loader starts its iterator, and a restore may move the loader elsewhere.
    state.module_states.check()
    objects = {**state.extra, **state.extra_per_rank}.items()
    state.pack_extra({n: o for n, o in objects if not isinstance(o, DataLoader)}, arena)


def left_out(state: TrainingState) -> str:
    """The buffers that no `state_dict()` contains, in words; empty if there are none."""
    names = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in named_modules(state.model)
        for name in sorted(module._non_persistent_buffers_set)
        if module._buffers.get(name) is not None
    ]
    if not names:
        return ""
    return (
        f"not persistent, hence in no checkpoint: {some(names)}. Register buffers with "
        "persistent=True if a resumed run cannot compute them again"
    )


def own_ways(state: TrainingState) -> list[str]:
    """Notes about modules with their own way to save their state, in words."""
    return state.module_states.notes


def lacking_room(
    config: Config,
    job: JobDirectory,
    node: Node,
    shard_bytes: int,
    count: int,
    in_place: bool = False,
) -> str:
    """The text of a notice if memory has too little room for `count` slots of each rank of this
    node; empty if there is enough.

    `shard_bytes` is an estimate while the optimizer has no state yet. `in_place`: slots are files
    of the local level.
    """
    place = config.directory if in_place else config.shm_dir
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    more = lacking_bytes(config, job, node, shard_bytes, count, in_place)
    if more <= free:
        return ""
    ranks = len(node.ranks)
    needs = f"{place} has {free} bytes free, and this node's ranks ({ranks}) need about {more} more"
    if in_place:
        return (
            f"{needs} there for {count} slots each and the versions that they keep: some will not "
            "be committed. Give it more memory, or set local_keep_last to less"
        )
    return f"{needs} for {count} slots each: {too_small(place)}"


def lacking_bytes(
    config: Config, job: JobDirectory, node: Node, shard_bytes: int, count: int, in_place: bool
) -> int:
    """Bytes that `count` slots of each rank of this node need beyond those that they hold already;
    0 if they need no more."""
    files = image_file.most_files(config, count) if in_place else count
    held = held_bytes(config, job, node, in_place)
    return max(files * shard_bytes * len(node.ranks) - held, 0)


def held_bytes(config: Config, job: JobDirectory, node: Node, in_place: bool) -> int:
    """Bytes of the slots of this node's ranks: in files of the local level, or in shared memory."""
    files = [(path, path.name) for path in job.segments()]
    if in_place:
        files = images_of(Path(config.directory), job.path)
    held = 0
    for path, slot in files:
        with contextlib.suppress(FileNotFoundError):  # replaced by its rank just now
            held += path.lstat().st_size if rank_of(slot) in node.ranks else 0
    return held


def shard_bytes(state: TrainingState, ranks: int) -> int:
    """Estimated bytes of one rank's shard."""
    walk = state.walk()
    striped, own = walk.nbytes()
    if not walk.state:
        values = 1 + max(map(_values_to_come, state.optimizers.values()), default=0)
        striped, own = values * striped, values * own
    return striped // ranks + own + sum(b.nbytes for b in walk.buffers)


def _values_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Number of values that the optimizer keeps for each value of a parameter: mostly two."""
    options = optimizer.defaults
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(options.get("momentum")))
    return 2 + int(bool(options.get("amsgrad")))


def check_health(config: Config, state: TrainingState, group: Group, node: Node, count: int) -> str:
    """Check the job's nodes: returns their problems in words, by node name; empty if there are none
    or `health` is `off`. Collective: the first rank of each node examines it. Each rank of a node
    needs room for `count` slots.

    Raises NodeHealthError on all ranks if a node has problems and `health` is `refuse`.
    """
    if config.health == "off":
        return ""
    name = config.node or socket.gethostname()
    problems_here: list[str] = []
    if node.first == group.rank:
        needs, memory_bytes = _needs(config, shard_bytes(state, group.size), group, node, count)
        processes = config.agent != "inline"
        problems_here = health.examine(needs, memory_bytes, config.health_seconds, processes)
    gathered = group.all_gather_object((name, problems_here))
    error = NodeHealthError({name: problems for name, problems in gathered if problems})
    if error.problems and config.health == "refuse":
        raise said_by(error, 0, group.rank)
    return str(error)


def _needs(
    config: Config, shard_bytes: int, group: Group, node: Node, count: int
) -> tuple[list[health.Need], int]:
    """The room that this node's directories and memory need: for the slots that do not exist yet,
    and for one version on each level. With it the bytes of those slots."""
    job = job_directory(config)
    in_place = image_file.expected(config)
    slots_bytes = lacking_bytes(config, job, node, shard_bytes, count, in_place)
    needs = [health.Need(config.shm_dir, 0 if in_place else slots_bytes)]
    if config.uses("local"):
        local_bytes = slots_bytes if in_place else shard_bytes * len(node.ranks)
        needs.append(health.Need(config.directory, local_bytes, make=True))
    if config.uses("persistent") and "://" not in config.persistent.path:
        shared = (config.persistent.path, shard_bytes * group.size)
        needs.append(health.Need(*shared, make=True, parents=False))
    return needs, slots_bytes


def agent_client(
    config: Config,
    group: Group,
    job: JobDirectory,
    node: Node,
    environment: str,
    may_start: bool = True,
) -> AgentClient:
    """This rank's client of the node's agent, which is not started here.

    `environment`: the environment of the node's first rank. `may_start`: this rank's environment
    is the same, so that this rank may start the agent too."""
    persistent = None
    if config.uses("persistent"):
        level = dataclasses.asdict(config.persistent)
        where = {"node": node.index, "nodes": node.count, "best": config.best}
        persistent = PersistentSettings(**{**level, **where})
    return AgentClient(
        AgentSettings(
            root=str(job.root),
            folder=job.path.name,
            nice=config.agent_nice,
            linger_seconds=config.agent_linger_seconds,
            module_path=tuple(module_path()),
        ),
        SessionSettings(
            directory=config.directory,
            shard=group.rank,
            shards=group.size,
            keep_last=config.local.keep_last,
            keep_every=config.local.keep_every,
            persistent=persistent,
            codecs=config.local.codecs,
            ranks=node.ranks,
        ),
        inline=config.agent == "inline",
        environment=environment,
        may_start=may_start,
    )
