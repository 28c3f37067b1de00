"""State of killed jobs besides parameters and optimizer state: extra state of a module, and the
remainder, which an optimizer's `state_dict()` has besides state and options."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support import exact


class Metered(nn.Module):
    """Adds a mean of all values that this rank has seen, which it saves and loads by methods of
    its own, as modules of metrics do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.batches, self.total = 0, torch.zeros(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        self.total = self.total + x.detach().mean(0)
        return x + 1e-3 * self.total / self.batches

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}batches"] = self.batches
        destination[f"{prefix}total"] = self.total

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in ("batches", "total"):
            setattr(self, name, state_dict.pop(f"{prefix}{name}"))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Decaying(torch.optim.AdamW):
    """An optimizer with more in its `state_dict()` than the state of parameters: a remainder."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        self.calls, self.rates = 0, torch.zeros(3)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.rates = torch.cat([self.rates[1:], torch.tensor([self.param_groups[0]["lr"]])])
        for group in self.param_groups:
            group["weight_decay"] = 1e-2 / (1 + self.calls % 5 + float(self.rates[0]))
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls, "rates": self.rates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.calls, self.rates = state_dict.pop("calls"), state_dict.pop("rates")
        super().load_state_dict(state_dict)


def own_digests(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Digests of the extra state of module and optimizer."""
    (metered,) = (each for each in model.modules() if isinstance(each, Metered))
    own = {
        "metered": [metered.batches, metered.total],
        "remainder": [optimizer.calls, optimizer.rates],
    }
    return {name: exact.digest(exact.image(value)) for name, value in own.items()}
