"""All layers of torch.nn that have state, observers of quantization, buffers that change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.ao import quantization

from tests.support.state_matrix.jobs import Cases, Job, trained
from tests.support.state_matrix.models import Wrapped

CASES = Cases()


class Reshaped(nn.Module):
    """A layer between two views, so that all layers take the same input."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.Size(self.shape).numel()
        out = self.layer(x.repeat(1, 4).flatten()[:count].view(self.shape))
        out = out[0] if isinstance(out, tuple) else out
        return out.sum() * x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: Reshaped(nn.BatchNorm1d(6), 5, 6),
    "BatchNorm2d": lambda: Reshaped(nn.BatchNorm2d(3), 2, 3, 4, 5),
    "BatchNorm3d": lambda: Reshaped(nn.BatchNorm3d(3, momentum=None), 2, 3, 2, 2, 5),
    "BatchNorm1d without statistics": lambda: Reshaped(
        nn.BatchNorm1d(6, track_running_stats=False), 5, 6
    ),
    "BatchNorm1d not affine": lambda: Reshaped(nn.BatchNorm1d(6, affine=False), 5, 6),
    "InstanceNorm1d": lambda: Reshaped(
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True), 2, 3, 20
    ),
    "InstanceNorm2d": lambda: Reshaped(nn.InstanceNorm2d(3, track_running_stats=True), 2, 3, 4, 5),
    "InstanceNorm3d": lambda: Reshaped(
        nn.InstanceNorm3d(3, track_running_stats=True), 2, 3, 2, 2, 5
    ),
    "LayerNorm": lambda: Reshaped(nn.LayerNorm(6), 5, 6),
    "GroupNorm": lambda: Reshaped(nn.GroupNorm(2, 6), 5, 6),
    "RMSNorm": lambda: Reshaped(nn.RMSNorm(6), 5, 6),
    "PReLU": lambda: Reshaped(nn.PReLU(6), 5, 6),
    "Bilinear": lambda: Twice(nn.Bilinear(6, 6, 4)),
    "Conv1d": lambda: Reshaped(nn.Conv1d(3, 4, 3), 2, 3, 20),
    "Conv2d": lambda: Reshaped(nn.Conv2d(3, 4, 3), 2, 3, 4, 5),
    "Conv3d": lambda: Reshaped(nn.Conv3d(3, 4, 2), 2, 3, 2, 2, 5),
    "ConvTranspose1d": lambda: Reshaped(nn.ConvTranspose1d(3, 4, 3), 2, 3, 20),
    "ConvTranspose2d": lambda: Reshaped(nn.ConvTranspose2d(3, 4, 3), 2, 3, 4, 5),
    "ConvTranspose3d": lambda: Reshaped(nn.ConvTranspose3d(3, 4, 2), 2, 3, 2, 2, 5),
    "RNN": lambda: Reshaped(nn.RNN(6, 4, num_layers=2, dropout=0.3), 5, 4, 6),
    "LSTM": lambda: Reshaped(nn.LSTM(6, 4, bidirectional=True), 5, 4, 6),
    "GRU": lambda: Reshaped(nn.GRU(6, 4), 5, 4, 6),
    "LSTMCell": lambda: Reshaped(nn.LSTMCell(6, 4), 5, 6),
    "GRUCell": lambda: Reshaped(nn.GRUCell(6, 4), 5, 6),
    "RNNCell": lambda: Reshaped(nn.RNNCell(6, 4), 5, 6),
    "MultiheadAttention": lambda: Attending(nn.MultiheadAttention(6, 2, dropout=0.2)),
    "MultiheadAttention of other sizes": lambda: Attending(
        nn.MultiheadAttention(6, 2, kdim=6, vdim=6, add_bias_kv=True)
    ),
    "TransformerEncoderLayer": lambda: Reshaped(nn.TransformerEncoderLayer(6, 2, 8), 5, 4, 6),
    "Embedding": lambda: Looked(nn.Embedding(20, 4, padding_idx=0)),
    "EmbeddingBag": lambda: Looked(nn.EmbeddingBag(20, 4, mode="mean")),
    "AdaptiveLogSoftmaxWithLoss": lambda: Adaptive(),
}


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


class Attending(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[None], x[None], x[None])[0]


class Looked(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer((7 * x.abs()).long() % 20)


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.AdaptiveLogSoftmaxWithLoss(6, 9, [3, 6], div_value=1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, (7 * x[:, 0].abs()).long() % 9).loss


class Together(nn.Module):
    """Many parallel layers."""

    def __init__(self, layers: dict[str, Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleDict({name: make() for name, make in layers.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.stack([layer(x).sum() for layer in self.layers.values()])


CASES.add("torch.nn", lambda: trained(Together(LAYERS)))


# --- quantization --------------------------------------------------------------------------------


def prepared() -> Job:
    """torch's own training for quantization, with one scale for each channel."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 4, 3),
        nn.BatchNorm1d(4),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated in favour of torchao
        model.train().qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)
    return trained(model)


OBSERVERS: dict[str, Callable[[], nn.Module]] = {
    "MinMaxObserver": quantization.MinMaxObserver,
    "MovingAverageMinMaxObserver": quantization.MovingAverageMinMaxObserver,
    "PerChannelMinMaxObserver": lambda: quantization.PerChannelMinMaxObserver(ch_axis=1),
    "MovingAveragePerChannelMinMaxObserver": lambda: (
        quantization.MovingAveragePerChannelMinMaxObserver(ch_axis=1)
    ),
    "HistogramObserver": quantization.HistogramObserver,
    "FakeQuantize": lambda: quantization.FakeQuantize(
        quantization.PerChannelMinMaxObserver,
        qscheme=torch.per_channel_affine,
        ch_axis=1,
    ),
    "FusedMovingAvgObsFakeQuantize": lambda: quantization.FusedMovingAvgObsFakeQuantize(
        quantization.MovingAveragePerChannelMinMaxObserver,
        qscheme=torch.per_channel_symmetric,
        dtype=torch.qint8,
        quant_min=-128,
        quant_max=127,
    ),
}
CASES.add("prepared for quantization", prepared)
CASES.add("observers", lambda: trained(Together(OBSERVERS)))


# --- buffers that are replaced -------------------------------------------------------------------


class Filled(Wrapped):
    """A buffer, None at first, one that grows, an added one, one that becomes None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("history", torch.zeros(0, 6))
        self.register_buffer("first_input", torch.zeros(2))
        self.late: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        self.history = torch.cat([self.history, now[None]])
        self.first_input = None
        if self.late is None:
            del self.late
            self.register_buffer("late", now.clone())
        return self.first(x) + self.mean + self.history.sum(0) + self.late


class SharedBuffer(Filled):
    """The growing buffer is registered at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Module()
        self.other.register_buffer("history", self.history)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.other.history = self.history
        return out


TORCH_REFUSES = ("buffers that become others", "a growing buffer at two places")
"""Cases that torch refuses to load into a newly made model."""
CASES.add("buffers that become others", lambda: trained(nn.Sequential(Filled())))
CASES.add("a growing buffer at two places", lambda: trained(SharedBuffer()))
