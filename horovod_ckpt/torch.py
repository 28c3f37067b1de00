"""`import horovod_ckpt.torch as hvd` in place of `import horovod.torch as hvd`.

Has everything of Horovod's module under the same names; five of them differ.
`DistributedOptimizer` restores the newest checkpoint at once, takes checkpoints, and closes at the
end of the script or at `shutdown`. `broadcast_parameters` and `broadcast_optimizer_state` do not
change parameters and buffers that were just restored and that no rank has changed since.
`elastic.TorchState` commits to our levels.

`named_parameters` must come directly from the whole model's `named_parameters()`, through which the
checkpoint finds the model's buffers; otherwise (a list, a part, none at all) give `model=`.
Settings come from `TIERCKPT_*` variables or a file (`TIERCKPT_CONFIG`), or as further arguments of
`DistributedOptimizer`, elastic or not.

Outside of elastic jobs it supports one optimizer: the restore happens when the first one is made,
and could not restore the others, so a second one is refused. Give several optimizers to
`horovod_ckpt.install`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Unpack

import horovod.torch
import torch
from horovod.torch import *  # noqa: F403

from tierckpt import ConfigError
from tierckpt.checkpointer.checkpointer import close_now
from tierckpt.settings import with_settings
from tierckpt.state.names import unwrap

from . import adapter as _ours
from . import elastic as _elastic
from .adapter import Outside, in_elastic_job
from .broadcast import Untouched, place

__all__ = ["DistributedOptimizer", "broadcast_optimizer_state", "broadcast_parameters", "elastic"]
__all__ += [name for name in dir(horovod.torch) if not name.startswith("_")]

DEFAULTS = {"restore": True, "close_at_exit": True, "boundary": "forward"}
THE_STATES = ("model", "restore", "close_at_exit")
"""Arguments of `horovod_ckpt.DistributedOptimizer` that an elastic state does not use: it receives
the model itself, and always restores and closes."""

_made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The optimizers with a checkpointer, numbered by creation: the same order on all ranks."""
_numbers = itertools.count()


def __getattr__(name: str) -> Any:
    return getattr(horovod.torch, name)


class _Arguments(_ours.DistributedArguments, total=False):
    model: torch.nn.Module | None
    restore: bool
    close_at_exit: bool


@with_settings
def DistributedOptimizer(optimizer: Any, *args: Any, **settings: Unpack[_Arguments]) -> Any:
    """`horovod_ckpt.DistributedOptimizer` for a script without calls for checkpoints.

    The boundary is the next forward pass. Under elastic Horovod the state object takes the
    checkpoints, with the settings given here: then this calls Horovod's own function, and our
    settings are the attribute `checkpoint_settings` of the result.
    """
    if not in_elastic_job():
        model = settings.get("model")
        _refuse_second(_ours.find_model(args, settings) if model is None else model)
        given: dict[str, Any] = {**DEFAULTS, **settings}
        made = _ours.DistributedOptimizer(optimizer, *args, **given)
        if isinstance(made.checkpointer, Outside):
            return made
        made.untouched = Untouched(made.checkpointer, made)
        _made[next(_numbers)] = made
        return made
    ours: dict[str, Any] = {n: v for n, v in settings.items() if n not in THE_STATES}
    horovods = {name: ours.pop(name) for name in _ours.HOROVODS if name in ours}
    distributed = horovod.torch.DistributedOptimizer(optimizer, *args, **horovods)
    distributed.checkpoint_settings = ours
    return distributed


def shutdown() -> None:
    """Take the final checkpoint, then call Horovod's own `shutdown`; later none could be taken."""
    close_now()
    horovod.torch.shutdown()


def _refuse_second(model: torch.nn.Module) -> None:
    """Raise ConfigError for a model that has a checkpointer from an earlier call."""
    open_ones = [each.checkpointer for each in _made.values() if not each.checkpointer.closed]
    if any(ckpt.adapter.handle.state.model is unwrap(model) for ckpt in open_ones):
        raise ConfigError(
            "this model has a checkpointer already, from an earlier call of DistributedOptimizer, "
            "and its restore could not include a second optimizer. Make all optimizers with "
            "horovod.torch.DistributedOptimizer and give them to horovod_ckpt.install, "
            "{'name': optimizer, 'other name': ...}; to start again, close() the attribute "
            "`checkpointer` of the first"
        )


def broadcast_optimizer_state(
    optimizer: Any, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Call Horovod's own function; between a restore and the first step, keep restored parameters.

    For an optimizer without state (SGD without momentum, or the argument of
    `DistributedOptimizer`) Horovod makes a step with zero gradients, in which weight decay would
    change the parameters.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own = [t for p in params for t in optimizer.state.get(p, {}).values()]
    with _restored_ones_kept(filter(torch.is_tensor, own) if optimizer.state else params):
        horovod.torch.broadcast_optimizer_state(optimizer, root_rank, model)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Call Horovod's own function; between a restore and the first step, keep restored tensors.

    The restore gave each rank its own BatchNorm statistics, and Horovod would replace them by the
    root's. Tensors that the script has loaded since the restore, on any rank, are broadcast.
    """
    given = params.values() if isinstance(params, dict) else params
    with _restored_ones_kept(p[1] if isinstance(p, tuple) else p for p in given):
        horovod.torch.broadcast_parameters(params, root_rank)


@contextmanager
def _restored_ones_kept(given: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context of a broadcast: at its end, tensors of `given` that were just restored get their
    values back, except those that the script has changed since, on any rank. Collective."""
    made = [optimizer for _, optimizer in sorted(_made.items())]
    restored = [each.untouched for each in made if each.untouched.counts()]
    places = {place(tensor) for tensor in given} if restored else set()
    kept = [(t, t.detach().clone()) for each in restored for t in each.among(places)]
    yield
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)


class _TorchState(_elastic.TorchState):
    """`horovod_ckpt.elastic.TorchState` with the settings of its optimizers' creation.

    Settings in `tierckpt=` override them.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        tierckpt: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        settings: dict[str, Any] = {}
        for value in (optimizer, *kwargs.values()):
            if isinstance(value, torch.optim.Optimizer):
                settings.update(getattr(value, "checkpoint_settings", {}))
        super().__init__(model, optimizer, {**settings, **(tierckpt or {})}, **kwargs)


elastic = SimpleNamespace(**{**vars(horovod.torch.elastic), "TorchState": _TorchState})
"""Horovod's module of that name, with our `TorchState`."""
