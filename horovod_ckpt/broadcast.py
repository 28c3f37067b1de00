"""Broadcast of one rank's state to all others, and the restored tensors that it leaves alone.

All functions of the broadcast are collective.

Replaces `hvd.broadcast_parameters` and `hvd.broadcast_optimizer_state`. These refuse tensors of
some types and memory orders, and do not send modules' extra state. For an optimizer without state
they make a step with zero gradients, on every rank: in it weight decay changes parameters, and
Adam counts the step. If there is still no state (SGD without momentum), they do not send options
such as the learning rate.

Untouched tensors are restored ones that still have the restored bytes.

A script with checkpoints of its own may load one after the restore, on one rank, and broadcast it.
Then the loaded values win on all ranks; otherwise each rank keeps its restored values, because
BatchNorm statistics differ between ranks. Torch's version counters are not enough: a write through
`.data` does not change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import horovod.torch as hvd
import torch
import xxhash
from msgspec import Struct

from tierckpt.format.layout import PER_RANK
from tierckpt.state import module_attributes
from tierckpt.state.extras import ExtraStates
from tierckpt.state.module_states import ModuleStates
from tierckpt.state.names import named_buffers, named_parameters
from tierckpt.state.optimizer_restore import OptimizerRestore, Values
from tierckpt.state.training_state import TrainingState
from tierckpt.state.tree_codec import is_made_of_tensors

from .adapter import Checkpointer

__all__ = ["Untouched", "place"]


MAX_BYTES = 2**30
"""Largest size of one broadcast: Horovod counts its elements, here bytes, in a C int."""


def send_model(model: torch.nn.Module, root: int, buffers: bool = True) -> None:
    """Send parameters, persistent buffers and modules' extra and own state, as in a checkpoint."""
    if buffers:  # a new rank has them in their initial form
        kinds = hvd.broadcast_object(
            module_attributes.buffer_kinds(model), root, "kinds of buffers"
        )
        module_attributes.adopt_buffers(model, kinds)
    named = [*named_parameters(model), *(named_buffers(model) if buffers else [])]
    send_tensors(dict(named), root)
    objects: list[ExtraStates | ModuleStates] = [ExtraStates(model)]
    objects += [ModuleStates(model)] if buffers else []  # each rank's own, like buffers
    received = hvd.broadcast_object([each.state_dict() for each in objects], root, "modules' state")
    for each, state in zip(objects, received, strict=True):
        each.load_state_dict(state)


def send_loose_parameters(
    optimizers: Mapping[str, torch.optim.Optimizer], model: torch.nn.Module, root: int
) -> None:
    """Send parameters that optimizers have and the model does not have, as in a checkpoint."""
    known = {id(param) for _, param in named_parameters(model)}
    loose = {
        f"{label}/{number}": param
        for label, optimizer in optimizers.items()
        for number, param in enumerate(_parameters(optimizer))
        if id(param) not in known
    }
    send_tensors(loose, root)


def send_optimizer_state(label: str, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Send an optimizer's state for each parameter, without the options of groups."""
    params = _parameters(optimizer)
    outlines = [_outlines(optimizer.state.get(param, {})) for param in params]
    for param, sent in zip(params, hvd.broadcast_object(outlines, root, label), strict=True):
        before = optimizer.state.pop(param, {})
        if sent:
            optimizer.state[param] = {k: _made(v, before.get(k), param) for k, v in sent.items()}
    tensors = {
        f"{label}/{number}/{key}": value
        for number, param in enumerate(params)
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, torch.Tensor) and not is_made_of_tensors(value)
    }
    send_tensors(tensors, root)


def send_remainders(state: TrainingState, root: int) -> None:
    """Send the rest of the optimizers' `state_dict()`s. State and options must be sent before."""
    remainders = hvd.broadcast_object(state.optimizer_tree.remainders(), root, "remainders")
    if hvd.rank() == root or not remainders:
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
    OptimizerRestore(state, {"remainders": remainders, "groups": groups}, values).put()


def send_tensors(named: Mapping[str, torch.Tensor], root: int) -> None:
    """Replace the tensors of all ranks, in place, by those of `root`; names, shapes and types are
    the same on all ranks."""
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
    """The parts of a flat tensor, in order, of at most MAX_BYTES each."""
    for start in range(0, flat.numel(), MAX_BYTES):
        yield flat[start : start + MAX_BYTES]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: a view if its memory is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class _Outline(Struct, frozen=True):
    """All properties of a tensor without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    """True also for state of a parameter on a GPU: Adam counts its steps on the CPU."""


def _outlines(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter with an outline in the place of each tensor."""
    return {
        k: _outline(v) if isinstance(v, torch.Tensor) and not is_made_of_tensors(v) else v
        for k, v in state.items()
    }


def _outline(tensor: torch.Tensor) -> _Outline:
    return _Outline(tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type == "cpu")


def _made(sent: Any, before: Any, param: torch.Tensor) -> Any:
    """Make the tensor for an outline that was sent, or keep the one before if it fits; return any
    other value as it is."""
    if not isinstance(sent, _Outline):
        return sent
    if isinstance(before, torch.Tensor) and _outline(before) == sent:
        return before
    device = torch.device("cpu") if sent.on_cpu else param.device
    return torch.empty_strided(sent.shape, sent.stride, dtype=sent.dtype, device=device)


Named = dict[str, torch.Tensor]


class Untouched:
    """The tensors that one checkpointer has restored. Training thread."""

    def __init__(self, checkpointer: Checkpointer, optimizer: Any) -> None:
        """Take the digests; call it right after the restore, if there was one."""
        self._checkpointer, self._optimizer = checkpointer, optimizer
        self._digests = _digests(self._tensors()) if self.counts() else {}

    def counts(self) -> bool:
        """True after a restore, until the first step. Equal on all ranks."""
        ckpt = self._checkpointer
        made_none = ckpt.adapter.handle.steps_made == ckpt.restored.version
        return bool(ckpt.restored.levels) and made_none and not ckpt.closed

    def among(self, places: set[int]) -> list[torch.Tensor]:
        """The tensors with memory in `places` that have the restored bytes on all ranks.
        Collective. Reports the others in a warning."""
        given = {n: t for n, t in self._tensors().items() if place(t) in places}
        changed = [n for n, digest in _digests(given).items() if digest != self._digests.get(n)]
        by_rank = dict(enumerate(self._checkpointer.group.all_gather_object(changed)))
        anywhere = {name for names in by_rank.values() for name in names}
        if anywhere:
            self._checkpointer.adapter.report_overwritten(
                {r: names for r, names in by_rank.items() if names}
            )
        return [tensor for name, tensor in given.items() if name not in anywhere]

    def _tensors(self) -> Named:
        """Parameters, buffers, and optimizer state of each rank's own, by name."""
        state = self._checkpointer.adapter.handle.state
        found: Named = dict(named_parameters(state.model) + named_buffers(state.model))
        known = {id(tensor) for tensor in found.values()}
        loose = (p for p in self._optimizer._parameter_names if id(p) not in known)
        found.update((f"optimizer's parameter {n}", p) for n, p in enumerate(loose))
        walk = state.walk()
        for label, each in state.optimizers.items():
            for number, (param, kept) in enumerate(each.state.items()):
                if walk.placement(param) is PER_RANK:
                    found.update(_tensors_in(kept, f"{label}/{number}"))
        return found


def place(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory: a parameter and its entry in a state_dict share it."""
    return tensor.untyped_storage().data_ptr()


def _tensors_in(kept: Mapping[str, Any], prefix: str) -> Named:
    return {f"{prefix}/{k}": value for k, value in kept.items() if torch.is_tensor(value)}


def _digests(named: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    flat = {name: as_bytes(tensor).cpu().numpy() for name, tensor in named.items()}
    return {name: xxhash.xxh3_128_digest(part.data) for name, part in flat.items()}
