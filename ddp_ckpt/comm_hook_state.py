"""What a communication hook remembers from one iteration to the next, in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_NOT_SAVED = ("process_group",)


class HookState:
    """Makes the state of a communication hook an object for `extra_per_rank`.

        state = powerSGD_hook.PowerSGDState(...)
        ddp_ckpt.Checkpointer(model, optimizer, comm_hook=(state, powerSGD_hook.powerSGD_hook),
                              extra_per_rank={"hook": ddp_ckpt.HookState(state)})

    A hook with error feedback adds what it left out of the last gradients to the next ones. Without
    it a resumed run is another run. It differs between ranks and is as large as the gradients, so
    each rank stores all of its own; the training thread copies it aside at the boundary.

    Works for objects whose attributes are tensors, numbers, text, NumPy generators, and lists and
    dicts of these; process groups are left out and stay as they are. On another number of ranks it
    is left as it is, like everything in `extra_per_rank`.
    """

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """By attribute; and the kind of device that its tensors are on."""
        fields = {name: getattr(self.state, name) for name in _names(self.state)}
        device = next((t.device.type for t in _tensors(list(fields.values()))), "cpu")
        packed = {name: _packed(value) for name, value in fields.items()}
        return {"fields": packed, "device": device}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Give all of them back, in place where that is a generator."""
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
    """Tensors on this process's device of that kind."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on(each, device) for each in value)
    return value
