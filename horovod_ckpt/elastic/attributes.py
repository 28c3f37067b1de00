"""What an elastic state was given, sorted by type as Horovod sorts it.

Modules and optimizers may have any names and be any number; what has a `state_dict` of its own (a
schedule, Horovod's sampler) is asked for it, and a `ResumableSampler` for its position's; all else
is a plain value. The things themselves stay the state's attributes: here are only their names, so
what a script puts in the place of one counts from the next `sync()` on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic import ElasticSampler

from tierckpt import ConfigError, ResumableSampler
from tierckpt.state.extras import EXTRA_STATES, PLAIN_VALUES, PlainValues
from tierckpt.state.modules.custom_states import MODULE_STATES
from tierckpt.state.training_state import TrainingState, label_optimizers

from .state_broadcast import (
    send_loose_parameters,
    send_model,
    send_optimizer_state,
    send_remainders,
)


class Attributes:
    """The models, optimizers, objects and values of one `TorchState`. Training thread."""

    def __init__(self, owner: object, given: Mapping[str, Any]) -> None:
        """Make everything `given` an attribute of `owner`.

        Raises ConfigError without a module or without an optimizer, and for an object under a name
        that the checkpoint needs; UnsupportedStateError, with the attribute's name, for a value
        that cannot be stored.
        """
        self._owner = owner
        for name, value in given.items():
            setattr(owner, name, value)
        self._models = [n for n, v in given.items() if isinstance(v, torch.nn.Module)]
        self._optimizers = [n for n, v in given.items() if isinstance(v, torch.optim.Optimizer)]
        rest = [n for n in given if n not in (*self._models, *self._optimizers)]
        self._objects = [n for n in rest if _is_object(given[n])]
        self.values = PlainValues(owner, [n for n in rest if n not in self._objects])
        if not self._models or not self._optimizers:
            raise ConfigError(_lacking(given, self._models))
        for name in {PLAIN_VALUES, EXTRA_STATES, MODULE_STATES} & set(self._objects):
            raise ConfigError(_taken(name, "the checkpoint"))
        label_optimizers(self.optimizers)
        self.values.check()

    @property
    def model(self) -> torch.nn.Module:
        """The one module; of several, one made to hold them under their names."""
        models: dict[str, torch.nn.Module] = self._named(self._models)
        if len(models) == 1:
            return next(iter(models.values()))
        error_barrier = torch.nn.Module()
        error_barrier._modules.update(models)  # add_module would refuse names such as `type`
        return error_barrier

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By name; one alone is `optimizer`, as outside of elastic jobs."""
        named = self._named(self._optimizers)
        return named if len(named) > 1 else dict.fromkeys(["optimizer"], *named.values())

    @property
    def objects(self) -> dict[str, Any]:
        """By name, what has a `state_dict` and a `load_state_dict`."""
        named = self._named(self._objects)
        return {n: v.position if isinstance(v, ResumableSampler) else v for n, v in named.items()}

    def deal_anew(self) -> None:
        """Have samplers deal what is left of the epoch to the ranks that are there."""
        for sampler in self._named(self._objects).values():
            if isinstance(sampler, ElasticSampler):
                sampler.reset()
            elif isinstance(sampler, ResumableSampler):
                sampler.deal_to(hvd.rank(), hvd.size())

    def broadcast(self, root: int, buffers: bool = True) -> None:
        """One state: `root` sends everything, and nothing of its own changes. Collective.

        Without `buffers` each rank keeps its own, as after any step.
        """
        state = TrainingState(self.model, self.optimizers)
        for label, optimizer in state.optimizers.items():
            send_optimizer_state(label, optimizer, root)
        send_model(self.model, root, buffers)
        send_loose_parameters(state.optimizers, self.model, root)
        self.broadcast_settings(root)
        send_remainders(state, root)

    def broadcast_settings(self, root: int) -> None:
        """`root` sends what reset callbacks set: options of parameter groups, objects (a schedule
        computes the next rates from what it holds), and plain values. Collective. What each rank
        has of its own (buffers, random streams) stays."""
        for name, optimizer in self.optimizers.items():
            groups = [_options(group) for group in optimizer.param_groups]
            for group, options in zip(
                optimizer.param_groups, hvd.broadcast_object(groups, root, name), strict=True
            ):
                for key, value in options.items():
                    if isinstance(group.get(key), torch.Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = value
        for name, value in self.objects.items():
            value.load_state_dict(hvd.broadcast_object(value.state_dict(), root, name))
        self.values.load_state_dict(hvd.broadcast_object(self.values.state_dict(), root))

    def _named(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in names}


def refuse_names(given: Iterable[str], own: Iterable[str]) -> None:
    """Raise ConfigError for a name that is one of TorchState's `own`."""
    for name in given:
        if name in own:
            raise ConfigError(_taken(name, "TorchState"))


def _taken(name: str, owner: str) -> str:
    return (
        f"TorchState was given {name}=..., and {owner} has something of its own under that name; "
        f"choose another one (my_{name}=...)"
    )


def _is_object(value: Any) -> bool:
    return hasattr(value, "load_state_dict") or isinstance(value, ResumableSampler)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _lacking(given: Mapping[str, Any], models: Iterable[str]) -> str:
    found = ", ".join(f"{name}: {type(value).__name__}" for name, value in given.items())
    what = "torch.optim.Optimizer" if models else "torch.nn.Module"
    return (
        f"TorchState found no {what} among what it was given ({found or 'nothing'}). It copies "
        "modules while their gradients are reduced, so it takes at least one module and what "
        "hvd.DistributedOptimizer returned, under any names. A job that has no such thing keeps "
        "Horovod's own state, horovod.torch.elastic.TorchState"
    )
