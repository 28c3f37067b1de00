"""Optimizers, dtypes and features of models: every pair of two of these is in a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

import torch
from torch import nn

from tests.support.state_matrix.jobs import Cases, Job, adam, adamw, flat_inputs, pictures, sgd
from tests.support.state_matrix.models import Tied, Transposed, Unused, channels_last

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# Not torch's fused SGD: with 16-bit numbers under DDP, one run in 60 differed by garbage in its
# momentum, without any checkpoint (torch 2.13).
OPTIMIZERS: dict[str, Make] = {
    "sgd foreach": partial(sgd, foreach=True),
    "adam foreach": partial(adam, foreach=True, amsgrad=True),
    "adam fused": partial(adam, fused=True, amsgrad=True),
    "adamw fused": partial(adamw, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "nadam": partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class TiedAndOdd(Tied):
    """Tied weights, a scalar, and a parameter with many dimensions of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.single = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.single.sum()


class Frozen(Unused):
    """Parameters without gradients, and random numbers in the forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3)


FEATURES: dict[str, Callable[[], nn.Module]] = {
    "channels_last": channels_last,
    "column by column": Transposed,
    "tied and odd": TiedAndOdd,
    "frozen and unused": Frozen,
}


def made(optimizer: str, dtype: torch.dtype, feature: str) -> Job:
    model = FEATURES[feature]().to(dtype)
    inputs = (pictures if feature == "channels_last" else flat_inputs)(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Job(model, {"optimizer": OPTIMIZERS[optimizer](trained)}, inputs)


CASES = Cases()
for (row, optimizer), (column, dtype) in product(enumerate(OPTIMIZERS), enumerate(DTYPES)):
    feature = list(FEATURES)[(row + column) % len(FEATURES)]
    CASES.add(f"{optimizer} {dtype} {feature}", partial(made, optimizer, dtype, feature))
