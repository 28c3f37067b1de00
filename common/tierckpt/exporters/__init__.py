"""Exporters: what happens to a job's checkpoints, for the tools that people watch their jobs with.

    from tierckpt.exporters import PrometheusPort

    ckpt = Checkpointer(model, optimizer, path="ckpts", callbacks=[PrometheusPort(9400)])

`exporter` maps events to metrics, in one place; each exporter hands them to its library. A library
is imported when its exporter starts to work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .exporter import METRICS, PHASES, REASONS, SEVERITIES, SHAPES, Exporter, Kind, exporters_of
    from .exporter import samples, zeros
    from .mlflow import MLflow
    from .opentelemetry import OpenTelemetry
    from .prometheus import PrometheusFile, PrometheusPort, PrometheusRegistry
    from .tensorboard import TensorBoard
    from .wandb import WandB

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

__getattr__ = lazy_exports(__name__)
