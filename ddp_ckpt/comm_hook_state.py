"""The state of a communication hook, as a part of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_NOT_SAVED = ("process_group",)


class HookState:
    """Makes the state of a communication hook an object for `extra_per_rank`.

    ::

        state = powerSGD_hook.PowerSGDState(...)
        ddp_ckpt.Checkpointer(model, optimizer, comm_hook=(state, powerSGD_hook.powerSGD_hook),
                              extra_per_rank={"hook": ddp_ckpt.HookState(state)})

    A hook with error feedback adds the compression error of the last gradients to the next ones. A
    resumed run without this state gives different results. The state differs between ranks and is
    as large as the gradients: each rank stores all of its own, and the training thread copies it at
    the boundary.

    Works for objects with attributes that are tensors, numbers, text, NumPy generators, or lists
    and dicts of these; process groups are not saved and stay as they are. A restart with another
    number of ranks leaves the state as it is, like everything in `extra_per_rank`.
    """

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """The attributes, and the type of device of their tensors."""
        fields = {name: getattr(self.state, name) for name in _names(self.state)}
        device = next((t.device.type for t in _tensors(list(fields.values()))), "cpu")
        packed = {name: _packed(value) for name, value in fields.items()}
        return {"fields": packed, "device": device}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Set all attributes again; generators are changed in place."""
        for name, value in saved["fields"].items():
            now = getattr(self.state, name, None)
            if isinstance(now, np.random.RandomState):
                now.set_state(value)
            else:
                setattr(self.state, name, _on(value, saved["device"]))


def _names(state: Any) -> list[str]:
    slots = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*slots, *getattr(state, "__dict__", {})]
    return [name for name in names if name not in _NOT_SAVED and hasattr(state, name)]


def _packed(value: Any) -> Any:
    return value.get_state() if isinstance(value, np.random.RandomState) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _on(value: Any, device: str) -> Any:
    """Copy the value with its tensors on this process's device of that type."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on(each, device) for each in value)
    return value
