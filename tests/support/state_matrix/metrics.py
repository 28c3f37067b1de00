"""A model with metrics of torchmetrics in it, each of which keeps its state with the model's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchmetrics
from torch import nn
from torchmetrics import (
    aggregation,
    audio,
    classification,
    clustering,
    nominal,
    regression,
    retrieval,
    text,
    wrappers,
)
from torchmetrics import image as images

from tests.support.state_matrix.models import Wrapped

Update = Callable[[Any, torch.Tensor], None]
"""Gives a metric its arguments, made of one row of random numbers for each sample."""

CLASSES, LABELS = 3, 3


def binary(metric: Any, x: torch.Tensor) -> None:
    metric.update(x[:, 0].sigmoid(), (x[:, 1] > 0).int())


def multiclass(metric: Any, x: torch.Tensor) -> None:
    metric.update(x[:, :CLASSES].softmax(1), x[:, CLASSES:].argmax(1))


def multilabel(metric: Any, x: torch.Tensor) -> None:
    metric.update(x[:, :LABELS].sigmoid(), (x[:, LABELS:] > 0).int())


def numbers(metric: Any, x: torch.Tensor) -> None:
    metric.update(x[:, 0].abs() + 0.1, x[:, 1].abs() + 0.1)


def rows(metric: Any, x: torch.Tensor) -> None:
    metric.update(x[:, :3].softmax(1), x[:, 3:].softmax(1))


def one(metric: Any, x: torch.Tensor) -> None:
    metric.update(x[:, 0].clone())


def ranked(metric: Any, x: torch.Tensor) -> None:
    metric.update(x[:, 0].clone(), (x[:, 1] > 0).int(), indexes=(x[:, 2] > 0).long())


def clusters(metric: Any, x: torch.Tensor) -> None:
    metric.update(x[:, :3].argmax(1), x[:, 3:].argmax(1))


def points(metric: Any, x: torch.Tensor) -> None:
    metric.update(x, x[:, :2].argmax(1))


def pictures(metric: Any, x: torch.Tensor) -> None:
    both = x.sigmoid().repeat(1, 1, 1, 16, 8).reshape(2, 1, -1, 16)
    metric.update(both[:1], both[1:])


def words(metric: Any, x: torch.Tensor) -> None:
    said = [" ".join("abcdef"[int(i)] for i in (7 * row).abs().long() % 6) for row in x]
    metric.update(said, said[::-1])


def tokens(metric: Any, x: torch.Tensor) -> None:
    metric.update(x[None], x.argmax(1)[None])


FAMILIES: list[tuple[Any, str, dict[str, Any], list[Update]]] = [
    (classification, "Binary", {}, [binary]),
    (classification, "Multiclass", {"num_classes": CLASSES}, [multiclass]),
    (classification, "Multilabel", {"num_labels": LABELS}, [multilabel]),
    (regression, "", {}, [numbers, rows]),
    (aggregation, "", {}, [one]),
    (retrieval, "", {}, [ranked]),
    (nominal, "", {"num_classes": CLASSES}, [clusters]),
    (clustering, "", {"num_classes": CLASSES}, [clusters, points]),
    (audio, "S", {}, [rows]),
    (text, "", {}, [words, tokens]),
    (images, "", {}, [pictures]),
]
NEEDED: dict[str, Any] = {
    "beta": 0.5,
    "data_range": 1.0,
    "min_precision": 0.2,
    "min_recall": 0.2,
    "min_sensitivity": 0.2,
    "min_specificity": 0.2,
    "p": 3.0,
}
OTHER = {
    "InfoLM",  # these fetch a model
    "BERTScore",
    "LearnedPerceptualImagePatchSimilarity",
    "FrechetInceptionDistance",
    "InceptionScore",
    "KernelInceptionDistance",
    "MemorizationInformedFrechetInceptionDistance",
    "PerceptualPathLength",
    "RunningMean",  # the position of these in their window is in an attribute, and in no state_dict
    "RunningSum",
    "BaseAggregator",  # these are not metrics by themselves
    "Running",
}


def options_of(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the class."""
    found = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in given:
            found[name] = given[name]
        elif name in NEEDED and parameter.default is inspect.Parameter.empty:
            found[name] = NEEDED[name]
    return found


def all_metrics() -> Iterator[tuple[str, Callable[[], Any], Update]]:
    """Every class of these families that can be made and updated here, with its arguments."""
    for family, start, given, updates in FAMILIES:
        for name in sorted(vars(family)):
            kind = getattr(family, name)
            if not inspect.isclass(kind) or not issubclass(kind, torchmetrics.Metric):
                continue
            if not name.startswith(start) or name in OTHER:
                continue
            options = options_of(kind, given)
            if update := next((u for u in updates if _goes(kind, options, u)), None):
                yield name, lambda kind=kind, options=options: kind(**options), update


def _goes(kind: type, options: dict[str, Any], update: Update) -> bool:
    try:
        update(kind(**options), torch.randn(4, 6))
    except Exception:  # other arguments, or a missing package
        return False
    return True


def wrapped_metrics() -> Iterator[tuple[str, Callable[[], Any], Update]]:
    """Models with metrics in them."""
    per_class = classification.MulticlassAccuracy(num_classes=CLASSES, average=None)
    yield "in ClasswiseWrapper", lambda: wrappers.ClasswiseWrapper(per_class.clone()), multiclass
    error = torchmetrics.MeanSquaredError
    yield "in MinMaxMetric", lambda: wrappers.MinMaxMetric(error()), numbers
    yield "in MultioutputWrapper", lambda: wrappers.MultioutputWrapper(error(), 3), rows
    kinds = [torchmetrics.MeanMetric, torchmetrics.SumMetric, torchmetrics.CatMetric]
    yield "in MetricCollection", lambda: torchmetrics.MetricCollection([k() for k in kinds]), one


METRICS = {name: (make, update) for name, make, update in (*all_metrics(), *wrapped_metrics())}


class Measured(Wrapped):
    """A model that has all metrics, and updates each in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({name: make() for name, (make, _) in METRICS.items()})
        for metric in self.metrics.modules():
            if isinstance(metric, torchmetrics.Metric):
                metric.persistent(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, (_, update) in METRICS.items():
            update(self.metrics[name], x.detach())
        return self.first(x)
