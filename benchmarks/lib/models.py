"""Models with a state of known size and a step of realistic length, on random data.

Those of stall.py and its like are written here, and need torch alone: no torchvision, download or
data set. `lib.papers.models` has those of the papers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]
INSTALL = {
    "torchvision": "pip install --no-deps torchvision, of the release that fits torch",
    "transformers": "pip install 'tierckpt[transformers]'",
}


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Adam, with two moments for each parameter."""
    return torch.optim.Adam(parameters, lr=1e-4)


def usual_loss(wrapped: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean square for numbers; cross entropy for classes of images or tokens, and for
    Inception with its second head."""
    out = wrapped(inputs)
    if targets.is_floating_point():
        return functional.mse_loss(out, targets)
    if hasattr(out, "aux_logits"):  # Inception-V3 in training
        second = functional.cross_entropy(out.aux_logits, targets)
        return functional.cross_entropy(out.logits, targets) + 0.4 * second
    out = getattr(out, "logits", out)
    return functional.cross_entropy(out.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Model:
    """A model with its data.

    make: the model in training mode. sample: a batch of so many samples from a generator. loss:
    forward pass of the (wrapped) model over a batch. batch: samples a rank. shape: a batch, for
    people. package: the package that it needs, or an empty text.
    """

    title: str
    make: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], Batch]
    batch: int
    shape: str = ""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = adam
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = usual_loss
    package: str = ""

    def missing(self) -> str | None:
        """Why this model cannot be made here, or None."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed: {INSTALL[self.package]}"
        return None

    def batch_of(self, step: int, rank: int = 0) -> Batch:
        """The batch of a step, the same in every run."""
        return self.sample(self.batch, torch.Generator().manual_seed(1000 * step + rank))


def vectors(width: int) -> Callable[[int, torch.Generator], Batch]:
    """Random vectors, and random ones to come near to."""

    def sample(batch: int, chance: torch.Generator) -> Batch:
        shape = (batch, width)
        return torch.randn(shape, generator=chance), torch.randn(shape, generator=chance)

    return sample


def images(side: int, classes: int = 1000) -> Callable[[int, torch.Generator], Batch]:
    """Random images with labels."""

    def sample(batch: int, chance: torch.Generator) -> Batch:
        pictures = torch.randn(batch, 3, side, side, generator=chance)
        return pictures, torch.randint(classes, (batch,), generator=chance)

    return sample


def tokens(length: int, vocabulary: int) -> Callable[[int, torch.Generator], Batch]:
    """Random tokens with labels."""

    def sample(batch: int, chance: torch.Generator) -> Batch:
        shape = (batch, length)
        return (
            torch.randint(vocabulary, shape, generator=chance),
            torch.randint(vocabulary, shape, generator=chance),
        )

    return sample


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


WIDTH = 1024
MODELS = {
    # 16 * 1024**2 fp32 parameters are 64 MiB, with Adam's two moments 192 MiB. On one thread of a
    # 2.5 GHz core the models then take 150 to 800 ms a step.
    "linear": Model("linear layers", lambda: linear_stack(16, WIDTH), vectors(WIDTH), 96),
    # 8 * 128**2 fp32 parameters are 0.5 MiB, with Adam's two moments 1.5 MiB.
    "toy": Model("small linear layers", lambda: linear_stack(8, 128), vectors(128), 64),
    "resnet18": Model("ResNet-18", resnet18, images(112), 8),
    "gpt2": Model("GPT-2", lambda: Transformer(12, 768, 50257, 1024), tokens(512, 50257), 8),
}
NAMES = tuple(MODELS)
OF_PAPERS = "papers."
"""The start of the names of models in `lib.papers.models`."""
OF_BYTES = "bytes."
"""The start of the name of linear layers of so many bytes, with Adam's state: a short step."""


def find(name: str) -> Model:
    """The model of a name."""
    if name.startswith(OF_PAPERS):
        from lib.papers.models import MODELS as PAPERS  # torchvision, transformers

        return PAPERS[name.removeprefix(OF_PAPERS)]
    if name.startswith(OF_BYTES):
        layers = max(1, int(name.removeprefix(OF_BYTES)) // (3 * 4 * WIDTH * WIDTH))
        return Model(name, lambda: linear_stack(layers, WIDTH), vectors(WIDTH), 4)
    return MODELS[name]


def made(name: str) -> tuple[Model, nn.Module]:
    """The model, and its module with the same weights on every rank and in every run."""
    torch.manual_seed(1234)
    model = find(name)
    return model, model.make()


def preload(name: str) -> None:
    """Import what the model and its optimizer need, without making them."""
    with torch.device("meta"):
        model = find(name)
        model.optimizer(model.make().parameters())
