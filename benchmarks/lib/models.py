"""Models with a state of known size and a step of realistic length.

They are written here so that a benchmark needs torch alone: no torchvision, download or data set.
Every model computes its own loss from a random batch that stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Adam, with two moments for each parameter."""
    return torch.optim.Adam(parameters, lr=1e-4)


@dataclass(frozen=True)
class Workload:
    """A model, its batch, the loss and the optimizer.

    model: on the device, not wrapped yet.
    loss: forward pass of a (wrapped) model over the fixed batch, to a scalar.
    """

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = adam


def linear_stack(layers: int, width: int) -> nn.Module:
    """Bias-free square layers: layers * width**2 parameters, nothing else."""
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, width, bias=False), nn.ReLU()]
    return nn.Sequential(*blocks)


class Residual(nn.Module):
    """ResNet's basic block: two 3x3 convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet18(classes: int = 1000) -> nn.Module:
    """ResNet-18 with the usual 11.7 million parameters and 20 BatchNorm layers."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    stages: list[nn.Module] = []
    inner = 64
    for outer, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        stages += [Residual(inner, outer, stride), Residual(outer, outer, 1)]
        inner = outer
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *stages, *head)


class Transformer(nn.Module):
    """Embeddings, encoder layers and an output layer tied to the embedding."""

    def __init__(self, layers: int, width: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(positions, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.tokens(ids) + self.places[: ids.shape[1]])
        return hidden @ self.tokens.weight.T


def build(name: str, batch: int, device: torch.device) -> Workload:
    """Make the named model with a fixed random batch of `batch` samples on `device`."""
    torch.manual_seed(1234)  # the same weights on every rank and in every run
    if name.startswith(OF_PAPERS):
        return _of_papers(name.removeprefix(OF_PAPERS), batch, device)
    maker, sample = _MODELS[name]
    model = maker().to(device)
    inputs, targets = (part.to(device) for part in sample(batch))

    def loss(wrapped: nn.Module) -> Tensor:
        out = wrapped(inputs)
        if targets.is_floating_point():
            return functional.mse_loss(out, targets)
        return functional.cross_entropy(out.flatten(0, -2), targets.flatten())

    return Workload(model, loss)


def _of_papers(name: str, batch: int, device: torch.device) -> Workload:
    """A model of papers.py: these may need torchvision or transformers."""
    from lib.papers.models import MODELS

    found = MODELS[name]
    inputs = [part.to(device) for part in found.sample(batch, torch.Generator().manual_seed(1))]
    return Workload(
        found.make().to(device), lambda wrapped: found.loss(wrapped, *inputs), found.optimizer
    )


def _vectors(width: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda batch: (torch.randn(batch, width), torch.randn(batch, width))


def _images(side: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda batch: (torch.randn(batch, 3, side, side), torch.randint(1000, (batch,)))


def _words(vocabulary: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda batch: (
        torch.randint(vocabulary, (batch, length)),
        torch.randint(vocabulary, (batch, length)),
    )


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    # 16 * 1024**2 fp32 parameters are 64 MiB, with Adam's two moments 192 MiB.
    "linear": (lambda: linear_stack(16, 1024), _vectors(1024)),
    # 8 * 128**2 fp32 parameters are 0.5 MiB, with Adam's two moments 1.5 MiB.
    "toy": (lambda: linear_stack(8, 128), _vectors(128)),
    "resnet18": (resnet18, _images(112)),
    "gpt2": (lambda: Transformer(12, 768, 50257, 1024), _words(50257, 512)),
    "bert-large": (lambda: Transformer(24, 1024, 30522, 512), _words(30522, 512)),
}

NAMES = tuple(_MODELS)
OF_PAPERS = "papers."
"""The start of the names of models in `lib.papers.models`."""

# Samples a rank; on one thread of a 2.5 GHz core the CPU models then take 150-800 ms a step.
BATCHES = {"linear": 96, "toy": 64, "resnet18": 8, "gpt2": 8, "bert-large": 8}
