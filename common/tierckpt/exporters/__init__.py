"""Exporters: what happens to a job's checkpoints, for the tools that people watch their jobs with.

    from tierckpt.exporters import PrometheusPort

    ckpt = Checkpointer(model, optimizer, path="ckpts", callbacks=[PrometheusPort(9400)])

`exporter` maps events to metrics, in one place; each exporter hands them to its library. A library
is imported when its exporter starts to work.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exporter import Exporter
    from .mlflow import MLflow
    from .opentelemetry import OpenTelemetry
    from .prometheus import PrometheusFile, PrometheusPort, PrometheusRegistry
    from .tensorboard import TensorBoard
    from .wandb import WandB

_HOME = {
    "Exporter": "exporter",
    "MLflow": "mlflow",
    "OpenTelemetry": "opentelemetry",
    "PrometheusFile": "prometheus",
    "PrometheusPort": "prometheus",
    "PrometheusRegistry": "prometheus",
    "TensorBoard": "tensorboard",
    "WandB": "wandb",
}

__all__ = [
    "Exporter",
    "MLflow",
    "OpenTelemetry",
    "PrometheusFile",
    "PrometheusPort",
    "PrometheusRegistry",
    "TensorBoard",
    "WandB",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
