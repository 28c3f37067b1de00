"""The Checkpointer of Horovod jobs that are not elastic, and its entry points.

These are a drop-in for `hvd.DistributedOptimizer`, and `install` for its results.

A rank outside its optimizer's process set takes no checkpoints.

Horovod lets every rank make the optimizer, and ranks outside the set step without reductions. So
one script runs on all ranks: on such a rank these methods do nothing, and no checkpoint contains
the rank's state.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import horovod.torch as hvd
import torch

import tierckpt
from tierckpt.checkpointer.checkpointer import attach_to_script, give_attribute
from tierckpt.config import load_config
from tierckpt.settings import Arguments, with_settings
from tierckpt.state.names import named_buffers, named_parameters
from tierckpt.state.training_state import label_optimizers

from .adapter import HorovodAdapter

__all__ = ["Checkpointer", "Outside", "stands_outside"]


FOLDERS = ("events_dir", "trace_dir")
"""Settings that name a folder where each rank has a file."""


@with_settings
class Checkpointer(tierckpt.Checkpointer):
    """Checkpoints a model that Horovod trains; see `tierckpt.Checkpointer` for the rest.

    Args:
        model: the module that is trained.
        optimizer: the result of `hvd.DistributedOptimizer`: one, a sequence, or a dict. There may
            also be plain optimizers among them, for parameters that are each rank's own.
        settings: `extra` and the other arguments of `tierckpt.Checkpointer`, and all settings.

    Its ranks are those of the optimizer's process set, numbered within it. Several process sets are
    several jobs: each needs a `path` of its own. If `events_dir` or `trace_dir` is set, each set
    has a folder in it, `process-set-<id>`.

    Raises ConfigError in an elastic job: use `horovod_ckpt.elastic.TorchState` there.
    """

    adapter: HorovodAdapter

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, **settings: Unpack[Arguments]
    ) -> None:
        adapter = HorovodAdapter(model, optimizer)
        settings = _with_folders_apart(settings, adapter.process_set)
        super().__init__(model, optimizer, adapter=adapter, group=adapter.group, **settings)


def _with_folders_apart(settings: Arguments, process_set: Any) -> Arguments:
    """Give each process set its own folder in `events_dir` and `trace_dir`: files are named after
    ranks, each set numbers its ranks from 0, and all sets may have the same setting."""
    if process_set is hvd.global_process_set:
        return settings
    given = {name: settings.get(name) for name in FOLDERS}
    try:
        config = load_config(given, config_file=settings.get("config_file"))
    except tierckpt.ConfigError:
        return settings  # the Checkpointer raises it again, on all ranks
    folder = f"process-set-{process_set.process_set_id}"
    apart = settings.copy()
    if config.events_dir:
        apart["events_dir"] = os.path.join(config.events_dir, folder)
    if config.trace_dir:
        apart["trace_dir"] = os.path.join(config.trace_dir, folder)
    return apart


OUTSIDE = (
    "rank %d is not in the optimizer's process set %s: its state is in no checkpoint, its "
    "restore() returns 0, and Horovod does not reduce its gradients. If it is to follow the other "
    "ranks, broadcast the result of their restore() to it"
)


class Outside:
    """The methods of a Checkpointer that loops call. None of them waits for another rank."""

    version = iteration = 0
    metric: float | None = None
    exit_reason = ""
    interrupted = False
    end: tierckpt.JobEnd | None = None

    def __init__(self) -> None:
        self.restored = tierckpt.Restored(0)
        self.closed = False

    def restore(self, *_: Any, **__: Any) -> tierckpt.Restored:
        """Restore nothing; returns 0."""
        return self.restored

    def should_exit(self) -> bool:
        """False."""
        return False

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """True: there is nothing to wait for."""
        return True

    def pin(self, version: int) -> tuple[str, ...]:
        """Nothing."""
        return ()

    unpin = pin

    def step(self, metric: float | None = None) -> None:
        """Nothing."""

    def save(self, now: bool = False) -> None:
        """Nothing."""

    def register(self, name: str, obj: Any, per_rank: bool = False) -> None:
        """Nothing."""

    def add_callbacks(self, callbacks: tierckpt.Callbacks) -> None:
        """Nothing: they would never be called."""

    def complete(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Only set `closed`."""
        self.closed = True

    abandon = close_or_abandon = close

    def __enter__(self) -> Outside:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stands_outside(optimizers: Iterable[Any]) -> bool:
    """True if all optimizers have one process set, and this rank is not in it. Logs a warning."""
    sets = [getattr(each, "process_set", hvd.global_process_set) for each in optimizers]
    if not sets or any(each is not sets[0] for each in sets) or sets[0].included():
        return False
    logging.getLogger("tierckpt").warning(OUTSIDE, hvd.rank(), sets[0].ranks)
    return True


class DistributedArguments(Arguments, total=False):
    """The arguments of `hvd.DistributedOptimizer` and of a Checkpointer."""

    named_parameters: Any
    compression: Any
    backward_passes_per_step: int
    op: Any
    gradient_predivide_factor: float
    num_groups: int
    groups: Any
    sparse_as_dense: bool
    process_set: Any


HOROVODS = tuple(inspect.signature(hvd.DistributedOptimizer).parameters)
"""Names of Horovod's own arguments, in order."""


@with_settings
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    *args: Any,
    model: torch.nn.Module | None = None,
    restore: bool = False,
    close_at_exit: bool = False,
    **settings: Unpack[DistributedArguments],
) -> Any:
    """Make a `hvd.DistributedOptimizer` and its checkpointer in one call.

    Takes every argument of Horovod's function, by name or position, and all of
    `tierckpt.Checkpointer` (`path`, `extra`, ...) by name. Returns Horovod's optimizer, which has
    the `Checkpointer` as its attribute `checkpointer`.

    Args:
        optimizer: the optimizer to distribute.
        args: Horovod's positional arguments.
        model: the module that is trained. May be left out if `named_parameters` comes directly
            from the whole module's `named_parameters()`.
        restore: restore the newest version at once.
        close_at_exit: take a final checkpoint when the script ends without an exception.
        settings: keyword arguments of Horovod and of a Checkpointer.

    Raises ConfigError if the model is not known, and the errors of Horovod and of Checkpointer.
    """
    if model is None:
        model = find_model(args, settings)
    ours: dict[str, Any] = {**settings}
    horovods = {n: ours.pop(n) for n in HOROVODS if n in ours}
    distributed = hvd.DistributedOptimizer(optimizer, *args, **horovods)
    checkpointer = install(distributed, model, **ours)
    if not isinstance(checkpointer, Outside):
        attach_to_script(checkpointer, restore, close_at_exit)
    return distributed


@with_settings
def install(
    optimizer: Any | Mapping[str, Any], model: torch.nn.Module, **settings: Unpack[Arguments]
) -> Checkpointer | Outside:
    """Add checkpoints to optimizers that `hvd.DistributedOptimizer` has returned.

    Returns the Checkpointer, which is also the attribute `checkpointer` of each optimizer. On a
    rank outside the optimizer's process set it is an `Outside`, which takes no checkpoints.
    """
    optimizers = label_optimizers(optimizer)
    if hvd.is_initialized() and stands_outside(optimizers.values()):
        outside = Outside()
        for each in optimizers.values():
            each.checkpointer = outside  # type: ignore[attr-defined]
        return outside
    made = Checkpointer(model, optimizer, **settings)
    give_attribute(made)
    return made


def find_model(args: Sequence[Any], settings: Mapping[str, Any]) -> torch.nn.Module:
    """Find the model in the arguments after the optimizer of a `DistributedOptimizer` call without
    `model`. Raises ConfigError if it is not known."""
    known = dict(zip(HOROVODS[1:], args, strict=False))
    return _model_of(known.get("named_parameters", settings.get("named_parameters")))


def _model_of(named: Any) -> torch.nn.Module:
    """The module whose method `named_parameters()` returned this unused generator.

    A checkpoint needs the module's buffers, but Horovod receives only parameters. The generator has
    a reference to the module. Raises ConfigError for anything else, and for a part of a model.
    """
    if isinstance(named, types.GeneratorType) and named.gi_frame is not None:
        owner = named.gi_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            _refuse_a_part(owner)
            return owner
    raise tierckpt.ConfigError(
        "the model is needed, for its buffers: pass model=..., or named_parameters directly from "
        "model.named_parameters()"
    )


def _refuse_a_part(module: torch.nn.Module) -> None:
    """Raise ConfigError for a part of a larger module that has more state.

    A script that trains only a new head gives Horovod only the head's parameters; without this
    check no checkpoint would contain the statistics of the rest.
    """
    if not _wholes(module):
        return
    gc.collect()  # a larger module may be unused, and not be freed on every rank yet
    for whole in _wholes(module):
        left_out = _left_out(whole, module)
        raise tierckpt.ConfigError(
            f"named_parameters is that of a part ({type(module).__name__}) of a larger model "
            f"({type(whole).__name__}), and the checkpoint would be without the rest: "
            f"{', '.join(left_out[:3])}{', ...' if left_out[3:] else ''}. Pass the larger model "
            "as model=..., or the part if the checkpoint is to have only that"
        )


def _wholes(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules that contain `module`, and that have parameters or buffers beyond it."""
    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
    # Others have not run torch.nn.Module's __init__, and have no list of parts.
    modules = [m for m in modules if "_modules" in vars(m)]
    holding = [m for m in modules if any(part is module for part in m.modules())]
    return [m for m in holding if _left_out(m, module)]


def _left_out(whole: torch.nn.Module, part: torch.nn.Module) -> list[str]:
    """Names of parameters and buffers that `whole` has and `part` does not have."""
    known = {id(t) for _, t in named_parameters(part) + named_buffers(part)}
    return [n for n, t in named_parameters(whole) + named_buffers(whole) if id(t) not in known]
