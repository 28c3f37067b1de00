"""Checks at the start of a checkpointer, when a user can still correct the cause."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from tierckpt import _garbage
from tierckpt._text import some
from tierckpt.config import Config
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.settings_check import JobTopology, agree_on_settings, refused
from tierckpt.coordination.shown_once import said_by
from tierckpt.errors import NodeHealthError, TierckptError
from tierckpt.group import Group, Node
from tierckpt.journal.support import check_support
from tierckpt.state import tree_codec
from tierckpt.state.counters import is_metric
from tierckpt.state.names import named_modules
from tierckpt.state.training_state import TrainingState, label_optimizers
from tierckpt.state.validate import refuse_model
from tierckpt.storage import health
from tierckpt.storage.memory import image_file
from tierckpt.storage.memory.job_directory import job_directory

from .adapter import Adapter
from .levels.node_resources import lacking_bytes

Optimizers = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
)


def agree(
    group: Group,
    adapter: Adapter,
    model: torch.nn.Module,
    optimizer: Optimizers,
    extra: Mapping[str, Any] | None,
    extra_per_rank: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    config_file: str | os.PathLike[str] | None,
) -> tuple[TrainingState, Config, JobTopology]:
    """Check this rank's arguments and settings, and compare the settings with the other ranks'.
    Collective; arguments as for `Checkpointer`.

    Raises ConfigError or UnsupportedStateError on all ranks, naming those with a problem.
    """
    with _on_all_ranks(group), _garbage.paused():
        refuse_model(model)
        given = label_optimizers(optimizer)
        shared = adapter.reduced_parameters(), adapter.untrained_parameters()
        state = TrainingState(model, given, extra, extra_per_rank, *shared)
        check_state(state)
    config, topology = agree_on_settings(settings, config_file, group)
    with _on_all_ranks(group):
        check_support(config, state, adapter.repeats_steps, adapter.step_class)
    state.forward_changes(config.forward_changes)
    return state, config, topology


@contextlib.contextmanager
def _on_all_ranks(group: Group) -> Iterator[None]:
    """Context whose error all ranks raise: those without it, in `agree_on_settings`."""
    try:
        yield
    except TierckptError as error:
        raise refused(error, group) from error.__cause__


def report_problems(
    config: Config, group: Group, state: TrainingState, reports: Reports, *severe: str
) -> None:
    """Report `severe` problems that are not empty, settings without effect, and state that is not
    stored or is stored in a way of its own."""
    for text in severe:
        if text and group.rank == 0:
            reports.notice(text, logging.ERROR)
    if idle := config.idle:
        reports.notice_of_all(f"without persistent_path there is no effect of {some(idle)}")
    if omitted := left_out(state):
        reports.notice_of_all(omitted, logging.INFO)
    for text in (*state.module_states.notes, *state.notes):
        reports.notice_of_all(text)


def check_state(state: TrainingState) -> None:
    """Raise UnsupportedStateError for state that a version could not store."""
    state.refuse_odd_keys()
    walk = state.walk()
    state.entries(walk)
    state.buffer_entries(walk)
    arena = tree_codec.Arena()
    state.optimizer_tree.pack_groups(arena.keep)
    state.optimizer_tree.pack_remainders(arena)
    # state_dict() of a loader starts its iterator, and a restore may move the loader elsewhere.
    state.module_states.check()
    objects = {**state.extra, **state.extra_per_rank}.items()
    found = state.pack_extra({n: o for n, o in objects if not isinstance(o, DataLoader)}, arena)
    state.notes += [
        without_state(name, obj)
        for name, obj in objects
        if tree_codec.is_empty(found.get(name, name)) and not _is_idle(obj)
    ]


def _is_idle(obj: Any) -> bool:
    """Whether an object has no state at all: a scaler that is off, a loss."""
    return type(obj).__module__.partition(".")[0] == "torch"


def without_state(name: str, obj: Any) -> str:
    """The warning about an object of `extra` with an empty `state_dict()`."""
    cure = "If it has a state, let state_dict() return it, and load_state_dict() load it"
    if is_metric(obj):
        cure = f"Call {name}.persistent(True) before, with the name of the variable"
    elif isinstance(obj, torch.nn.Module):
        cure = "If it has a state, make it a buffer, or return it from get_extra_state()"
    return (
        f"extra[{name!r}], a {type(obj).__name__}: its state_dict() is empty, so nothing of it is "
        f"in a checkpoint, and a resumed run begins with a new one. {cure}"
    )


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


def usual_slots(state: TrainingState) -> int:
    """The number of slots if the setting leaves it open: a third one on a GPU."""
    return 3 if any(p.is_cuda for p in state.walk().params) else 2


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
