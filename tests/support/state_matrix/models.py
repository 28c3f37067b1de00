"""Models with features that a checkpoint may restore wrongly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))
    return net.to(dtype)


def channels_last() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.Flatten()
    )
    return net.to(memory_format=torch.channels_last)


class Wrapped(nn.Module):
    """A linear layer and the feature under test."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


class OddShapes(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 7))
        self.single = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.scale + self.nothing.sum() + self.single.sum()


class Unused(Wrapped):
    """Parameters that never get a gradient, and one that must not."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.steps = nn.Parameter(torch.randint(0, 9, (4,)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.frozen


class Tied(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class Buffers(Wrapped):
    """Buffers of many types, each changed by every forward pass."""

    TYPES = (torch.int64, torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.float64)

    def __init__(self) -> None:
        super().__init__()
        for dtype in self.TYPES:
            name = f"of_{str(dtype).removeprefix('torch.')}"
            self.register_buffer(name, torch.zeros(3, dtype=dtype))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("complex", torch.randn(2, 2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for dtype in self.TYPES:
                getattr(self, f"of_{str(dtype).removeprefix('torch.')}").add_(1)
            self.mask.logical_not_()
            self.complex.mul_(1j)
            self.count += 1
        return self.first(x) * self.count


class Float8(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("e4m3", torch.randn(9).to(torch.float8_e4m3fn))
        self.register_buffer("e5m2", torch.randn(3, 3).to(torch.float8_e5m2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        with torch.no_grad():
            self.e4m3.copy_(torch.randn(9).to(torch.float8_e4m3fn))
            self.e5m2.copy_(out[:3, :3].to(torch.float8_e5m2))
        return out


class Replaced(Wrapped):
    """A buffer, another tensor after every forward pass, like many hand-written averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.first(x) - self.mean


class Late(Wrapped):
    """A branch used only later, so that its optimizer state is created then."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(6, 6)
        self.joined = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + (self.late(x) if self.joined else 0)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((7 * x.abs()).long() % 20)


class Renormed(nn.Module):
    """Weights that the forward pass changes: it scales the rows that it looks up."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, max_norm=0.7, **options)
        self.bag = nn.EmbeddingBag(30, 4, max_norm=0.5, norm_type=1.0, mode="sum", **options)
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (7 * x.abs()).long() % 20
        return self.last(self.table(words).mean(1)) + self.bag(words)


class TiedRenormed(nn.Module):
    """Such a weight, shared with another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, max_norm=0.7)
        self.last = nn.Linear(6, 20)
        self.last.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table((7 * x.abs()).long() % 20))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex64) @ self.weight


class Transposed(nn.Module):
    """Weights stored column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 5, num_layers=2, dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x[None])[0]


class Scaled(nn.Module):
    """Keeps the largest values that it saw, as 8-bit layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[float] = []
        self.newest = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.newest = x.detach().abs().max()
        self.largest = [*self.largest[-3:], float(self.newest)]
        return x / max(self.largest)

    def get_extra_state(self) -> dict[str, Any]:
        return {"largest": self.largest, "newest": self.newest}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.largest, self.newest = list(state["largest"]), state["newest"]


def partly_compiled() -> nn.Module:
    net = mlp()
    net[0] = torch.compile(net[0], backend="eager")
    return net


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 2))


def mixed() -> nn.Module:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.bfloat16)

    return nn.Sequential(nn.Linear(6, 8), Cast(), nn.Linear(8, 4).to(torch.bfloat16))


def many_small() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(400)))


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 1500), nn.Linear(1500, 400, bias=False))
