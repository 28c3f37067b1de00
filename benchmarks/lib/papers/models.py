"""The models of the papers, at their published sizes, on synthetic data.

Images and tokens are random: the time of a step, the size of a checkpoint and the exactness of a
restart do not depend on them. Batches and image sizes are those that a CPU steps in about a second.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from lib.models import Batch, Model, images, tokens


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with momentum, as image classifiers use it: one value for each parameter."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def torchvision(name: str, **arguments: Any) -> nn.Module:
    """A model of torchvision."""
    _declare()
    model: nn.Module = getattr(importlib.import_module("torchvision.models"), name)(**arguments)
    return model


def transformers(name: str, config: str) -> nn.Module:
    """A model of transformers from its default configuration, without a download."""
    _declare()  # it imports torchvision where installed
    library = importlib.import_module("transformers")
    model: nn.Module = getattr(library, name)(getattr(library, config)())
    return model.train()


@cache
def _declare() -> torch.library.Library | None:
    """Declare two operators of torchvision, so that it can be imported without its library.

    Its wheels from PyPI are for CUDA. Without CUDA their library cannot be loaded, and the import
    fails because these operators are undeclared. Models do not use them. The declarations end
    with the result.
    """
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return None
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


NT3_INPUTS = 60_483


def nt3(inputs: int = NT3_INPUTS) -> nn.Module:
    """CANDLE's NT3, a classifier of gene expressions: 155 million parameters, most of them in the
    first dense layer."""
    outputs = (inputs - 19 - 9) // 10 * 128
    return nn.Sequential(
        *(nn.Conv1d(1, 128, 20), nn.ReLU(), nn.MaxPool1d(1)),
        *(nn.Conv1d(128, 128, 10), nn.ReLU(), nn.MaxPool1d(10), nn.Flatten()),
        *(nn.Linear(outputs, 200), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(200, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 2)),
    )


def genes(inputs: int) -> Callable[[int, torch.Generator], Batch]:
    """Random expressions of genes, of two classes of tissue."""

    def sample(batch: int, chance: torch.Generator) -> Batch:
        values = torch.randn(batch, 1, inputs, generator=chance)
        return values, torch.randint(2, (batch,), generator=chance)

    return sample


def plain_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """NT3's optimizer, which keeps no state."""
    return torch.optim.SGD(parameters, lr=1e-3)


class Edsr(nn.Module):
    """EDSR (Lim et al., 2017): residual blocks without BatchNorm, and a pixel shuffle.

    The baseline has 16 blocks of 64 features, for images of twice the size.
    """

    def __init__(self, blocks: int = 16, features: int = 64) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, features, 3, padding=1)
        self.body = nn.ModuleList(_edsr_block(features) for _ in range(blocks))
        self.last = nn.Conv2d(features, features, 3, padding=1)
        self.tail = nn.Sequential(
            nn.Conv2d(features, 4 * features, 3, padding=1),
            nn.PixelShuffle(2),
            nn.Conv2d(features, 3, 3, padding=1),
        )

    def forward(self, small: Tensor) -> Tensor:
        head = features = self.head(small)
        for block in self.body:
            features = features + block(features)
        large: Tensor = self.tail(head + self.last(features))
        return large


def _edsr_block(features: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(features, features, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(features, features, 3, padding=1),
    )


def pairs(side: int) -> Callable[[int, torch.Generator], Batch]:
    """Random images, and the same at half the size."""

    def sample(batch: int, chance: torch.Generator) -> Batch:
        large = torch.rand(batch, 3, 2 * side, 2 * side, generator=chance)
        return functional.avg_pool2d(large, 2), large

    return sample


def absolute(wrapped: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """EDSR's loss, L1."""
    return functional.l1_loss(wrapped(inputs), targets)


def toy() -> nn.Module:
    """A classifier with BatchNorm and dropout, 0.3 million parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(8)),
        *(nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10)),
    )


def _vision(title: str, name: str, side: int, batch: int, **arguments: Any) -> Model:
    return Model(
        title,
        lambda: torchvision(name, **arguments),
        images(side),
        batch,
        f"{batch} x 3 x {side} x {side}",
        momentum,
        package="torchvision",
    )


def _language(title: str, name: str, config: str, vocabulary: int) -> Model:
    return Model(
        title,
        lambda: transformers(name, config),
        tokens(128, vocabulary),
        1,
        "1 x 128 tokens",
        package="transformers",
    )


MODELS: dict[str, Model] = {
    "toy-cnn": Model("toy", toy, images(16, 10), 16, "16 x 3 x 16 x 16", momentum),
    "nt3": Model("NT3", nt3, genes(NT3_INPUTS), 1, "1 x 60,483", plain_sgd),
    "nt3-toy": Model("NT3, short", lambda: nt3(600), genes(600), 4, "4 x 600", plain_sgd),
    "edsr": Model("EDSR 16 x 64", Edsr, pairs(24), 1, "1 x 3 x 24 x 24", loss=absolute),
    "edsr-toy": Model(
        "EDSR 2 x 8", lambda: Edsr(2, 8), pairs(8), 1, "1 x 3 x 8 x 8", loss=absolute
    ),
    "resnet50": _vision("ResNet-50", "resnet50", 64, 1),
    "resnet18": _vision("ResNet-18", "resnet18", 224, 4),
    "vgg16": _vision("VGG-16", "vgg16", 224, 1),
    "inception-v3": _vision("Inception-V3", "inception_v3", 299, 2, init_weights=False),
    "alexnet": _vision("AlexNet", "alexnet", 224, 16),
    "gpt2": _language("GPT-2", "GPT2LMHeadModel", "GPT2Config", 50257),
    "bert": _language("BERT", "BertForMaskedLM", "BertConfig", 30522),
}
