"""The attributes of an elastic state, sorted by type in Horovod's way.

There may be any number of modules and optimizers, with any names. Other objects with a `state_dict`
(a schedule, Horovod's sampler) are saved by it, and a `ResumableSampler` by its position; all else
is a plain value. This module keeps only the names, and the objects are attributes of the state: if
a script replaces one, the new object counts from the next `sync()` on.
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
        """Make all of `given` attributes of `owner`.

        Raises ConfigError without a module or without an optimizer, and for an object under a name
        that the checkpoint reserves; UnsupportedStateError, with the attribute's name, for a value
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
        """The only module, or a new module that contains all modules under their names."""
        models: dict[str, torch.nn.Module] = self._named(self._models)
        if len(models) == 1:
            return next(iter(models.values()))
        container = torch.nn.Module()
        container._modules.update(models)  # add_module would refuse names such as `type`
        return container

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name; a single one is `optimizer`, as outside of elastic jobs."""
        named = self._named(self._optimizers)
        return named if len(named) > 1 else dict.fromkeys(["optimizer"], *named.values())

    @property
    def objects(self) -> dict[str, Any]:
        """The objects with `state_dict` and `load_state_dict`, by name."""
        named = self._named(self._objects)
        return {n: v.position if isinstance(v, ResumableSampler) else v for n, v in named.items()}

    def deal_anew(self) -> None:
        """Have samplers deal the rest of the epoch to the current ranks."""
        for sampler in self._named(self._objects).values():
            if isinstance(sampler, ElasticSampler):
                sampler.reset()
            elif isinstance(sampler, ResumableSampler):
                sampler.deal_to(hvd.rank(), hvd.size())

    def broadcast(self, root: int, buffers: bool = True) -> None:
        """Send the whole state of `root` to all ranks; nothing of `root` changes. Collective.

        Without `buffers` each rank keeps its own buffers, as after any step.
        """
        state = TrainingState(self.model, self.optimizers)
        for label, optimizer in state.optimizers.items():
            send_optimizer_state(label, optimizer, root)
        send_model(self.model, root, buffers)
        send_loose_parameters(state.optimizers, self.model, root)
        self.broadcast_settings(root)
        send_remainders(state, root)

    def broadcast_settings(self, root: int) -> None:
        """Send the settings of `root` that reset callbacks may change: options of parameter groups,
        objects (a schedule computes the next rates from its state), and plain values. Collective.
        State that is each rank's own (buffers, random streams) stays."""
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
        f"TorchState was given {name}=..., but {owner} uses this name; choose another one "
        f"(my_{name}=...)"
    )


def _is_object(value: Any) -> bool:
    return hasattr(value, "load_state_dict") or isinstance(value, ResumableSampler)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _lacking(given: Mapping[str, Any], models: Iterable[str]) -> str:
    found = ", ".join(f"{name}: {type(value).__name__}" for name, value in given.items())
    lacking = "torch.optim.Optimizer" if models else "torch.nn.Module"
    return (
        f"TorchState found no {lacking} among its arguments ({found or 'nothing'}). It copies "
        "modules while their gradients are reduced, so it needs at least one module and one "
        "result of hvd.DistributedOptimizer, under any names. For a job without them use "
        "Horovod's own state, horovod.torch.elastic.TorchState"
    )
