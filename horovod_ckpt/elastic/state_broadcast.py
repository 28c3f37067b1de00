"""How one rank gives all others what it has in its tensors; all functions are collective.

In place of `hvd.broadcast_parameters` and `hvd.broadcast_optimizer_state`, which do less and more:
they refuse tensors of some types and memory orders, and modules' extra state. And an optimizer
without state is made to have some by a step with zero gradients, on every rank: weight decay moves
parameters in that, and Adam counts it. Where there is still none (SGD without momentum), options
such as the learning rate are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch

from tierckpt.state.custom_values import is_made_of_tensors
from tierckpt.state.extras import ExtraStates
from tierckpt.state.modules import changing_buffers
from tierckpt.state.modules.custom_states import ModuleStates
from tierckpt.state.names import named_buffers, named_parameters
from tierckpt.state.optimizers.put_back import OptimizerRestore, Values
from tierckpt.state.training_state import TrainingState

MOST_BYTES = 2**30
"""Of one broadcast: Horovod counts its elements, bytes here, in a C int."""


def send_model(model: torch.nn.Module, root: int, buffers: bool = True) -> None:
    """Parameters, persistent buffers and modules' extra and own state, as a checkpoint has them."""
    if buffers:  # a rank that is new has them as they are at first
        kinds = hvd.broadcast_object(changing_buffers.kinds_of(model), root, "kinds of buffers")
        changing_buffers.adopt(model, kinds)
    named = [*named_parameters(model), *(named_buffers(model) if buffers else [])]
    send_tensors(dict(named), root)
    objects: list[ExtraStates | ModuleStates] = [ExtraStates(model)]
    objects += [ModuleStates(model)] if buffers else []  # each rank's own, like buffers
    told = hvd.broadcast_object([each.state_dict() for each in objects], root, "modules' state")
    for each, state in zip(objects, told, strict=True):
        each.load_state_dict(state)


def send_loose_parameters(
    optimizers: Mapping[str, torch.optim.Optimizer], model: torch.nn.Module, root: int
) -> None:
    """Parameters that optimizers have and the model has not; a checkpoint has them, too."""
    known = {id(param) for _, param in named_parameters(model)}
    loose = {
        f"{label}/{number}": param
        for label, optimizer in optimizers.items()
        for number, param in enumerate(_parameters(optimizer))
        if id(param) not in known
    }
    send_tensors(loose, root)


def send_optimizer_state(label: str, optimizer: torch.optim.Optimizer, root: int) -> None:
    """What an optimizer keeps for each parameter; groups' options are no part of it."""
    params = _parameters(optimizer)
    mine = [_outlines(optimizer.state.get(param, {})) for param in params]
    for param, told in zip(params, hvd.broadcast_object(mine, root, label), strict=True):
        before = optimizer.state.pop(param, {})
        if told:
            optimizer.state[param] = {k: _made(v, before.get(k), param) for k, v in told.items()}
    tensors = {
        f"{label}/{number}/{key}": value
        for number, param in enumerate(params)
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, torch.Tensor) and not is_made_of_tensors(value)
    }
    send_tensors(tensors, root)


def send_remainders(state: TrainingState, root: int) -> None:
    """What optimizers' own `state_dict()`s have beside state and options, which all have by now."""
    told = hvd.broadcast_object(state.remainders(), root, "remainders")
    if hvd.rank() == root or not told:
        return
    values: dict[str, Values] = {label: {} for label in state.optimizers}
    groups: dict[str, list[dict[str, Any]]] = {}
    for label, optimizer in state.optimizers.items():
        groups[label] = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        for param in _parameters(optimizer):
            if param in optimizer.state:
                values[label][state.name_of(param)] = dict(optimizer.state[param])
    OptimizerRestore(state, {"remainders": told, "groups": groups}, values).put()


def send_tensors(named: Mapping[str, torch.Tensor], root: int) -> None:
    """All ranks have the same names, shapes and types; what they have is replaced in place."""
    sent = {name: as_bytes(tensor) for name, tensor in named.items() if tensor.numel()}
    slices = {f"{n}#{i}": part for n, flat in sent.items() for i, part in enumerate(_cut(flat))}
    hvd.broadcast_parameters(slices, root)
    for name, received in sent.items():
        tensor = named[name].detach()
        if received.data_ptr() != tensor.data_ptr():
            tensor.copy_(received.view(tensor.dtype).view(tensor.shape))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _cut(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its memory, in order, as parts of at most MOST_BYTES."""
    for start in range(0, flat.numel(), MOST_BYTES):
        yield flat[start : start + MOST_BYTES]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its very memory if that has no gaps and is in order, else a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class _Outline:
    """All of a tensor but its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    """Also where the parameter is not: Adam counts its steps there."""


def _outlines(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter with an outline in the place of each tensor."""
    return {
        k: _outline(v) if isinstance(v, torch.Tensor) and not is_made_of_tensors(v) else v
        for k, v in state.items()
    }


def _outline(tensor: torch.Tensor) -> _Outline:
    return _Outline(tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type == "cpu")


def _made(told: Any, before: Any, param: torch.Tensor) -> Any:
    """A tensor as told, the one that was there before if it is such; else what was told itself."""
    if not isinstance(told, _Outline):
        return told
    if isinstance(before, torch.Tensor) and _outline(before) == told:
        return before
    device = torch.device("cpu") if told.on_cpu else param.device
    return torch.empty_strided(told.shape, told.stride, dtype=told.dtype, device=device)
