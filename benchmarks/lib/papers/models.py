"""The models of the papers, at their published sizes, on synthetic data.

Images and tokens are random: the time of a step, the size of a checkpoint and the exactness of a
restart do not depend on them. Batches and image sizes are those that a CPU steps in about a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from lib.models import adam

Batch = tuple[Tensor, Tensor]
INSTALL = {
    "torchvision": "pip install --no-deps torchvision, of the release that fits torch",
    "transformers": "pip install 'tierckpt[transformers]'",
}


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with momentum, as image classifiers use it: one value for each parameter."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def entropy(wrapped: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of a classifier of images, of tokens, or of Inception with its second head."""
    out = wrapped(inputs)
    if hasattr(out, "aux_logits"):  # Inception-V3 in training
        second = functional.cross_entropy(out.aux_logits, labels)
        return functional.cross_entropy(out.logits, labels) + 0.4 * second
    out = getattr(out, "logits", out)
    return functional.cross_entropy(out.flatten(0, -2), labels.flatten())


@dataclass(frozen=True)
class PaperModel:
    """A model with its data.

    make: the model in training mode. sample: a batch of so many samples from a generator. loss:
    forward pass of the (wrapped) model over a batch. batch: samples a rank. shape: a batch, for
    people. package: the package that it needs, or an empty text.
    """

    title: str
    make: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], Batch]
    batch: int
    shape: str
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = momentum
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = entropy
    package: str = ""

    def missing(self) -> str | None:
        """Why this model cannot be made here, or None."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed: {INSTALL[self.package]}"
        return None


def torchvision(name: str, **arguments: Any) -> nn.Module:
    """A model of torchvision.

    Its wheels from PyPI are for CUDA. Without CUDA its library cannot be loaded, and the package
    fails on import because two operators are then undeclared. Models do not use these.
    """
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
    model: nn.Module = getattr(importlib.import_module("torchvision.models"), name)(**arguments)
    return model


_LIBRARIES: list[torch.library.Library] = []
"""Declarations end with their library."""


def transformers(name: str, config: str) -> nn.Module:
    """A model of transformers from its default configuration, without a download."""
    library = importlib.import_module("transformers")
    model: nn.Module = getattr(library, name)(getattr(library, config)())
    return model.train()


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


def toy() -> nn.Module:
    """A classifier with BatchNorm and dropout, 0.3 million parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(8)),
        *(nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10)),
    )


def _vision(title: str, name: str, side: int, batch: int, **arguments: Any) -> PaperModel:
    return PaperModel(
        title,
        lambda: torchvision(name, **arguments),
        images(side),
        batch,
        f"{batch} x 3 x {side} x {side}",
        package="torchvision",
    )


def _language(title: str, name: str, config: str, vocabulary: int) -> PaperModel:
    return PaperModel(
        title,
        lambda: transformers(name, config),
        tokens(128, vocabulary),
        1,
        "1 x 128 tokens",
        adam,
        package="transformers",
    )


MODELS: dict[str, PaperModel] = {
    "toy-cnn": PaperModel("toy", toy, images(16, 10), 16, "16 x 3 x 16 x 16"),
    "resnet18": _vision("ResNet-18", "resnet18", 224, 4),
    "vgg16": _vision("VGG-16", "vgg16", 224, 1),
    "inception-v3": _vision("Inception-V3", "inception_v3", 299, 2, init_weights=False),
    "alexnet": _vision("AlexNet", "alexnet", 224, 16),
    "gpt2": _language("GPT-2", "GPT2LMHeadModel", "GPT2Config", 50257),
    "bert": _language("BERT", "BertForMaskedLM", "BertConfig", 30522),
}
