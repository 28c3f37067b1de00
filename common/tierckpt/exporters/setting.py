"""The setting `export`: exporters by name, `"prometheus 9400, tensorboard runs/demo"`.

An exporter with other arguments is given in `callbacks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError

if TYPE_CHECKING:
    from .exporter import Exporter

SHAPES = (
    "prometheus [ADDRESS:]PORT",
    "prometheus FILE.prom",
    "opentelemetry [URL]",
    "tensorboard FOLDER",
    "wandb [PROJECT]",
    "mlflow [EXPERIMENT]",
)


def exporters_of(text: str) -> list[Exporter]:
    """The exporters that the setting names. Nothing is opened or imported yet.

    Raises ConfigError for an unknown one, an argument that it does not take, and a package that is
    not installed.
    """
    return [_exporter(part.split(), text) for part in text.split(",") if text.strip()]


def _exporter(words: list[str], text: str) -> Exporter:
    name, *arguments = words or [""]
    make = MAKERS.get(name)
    if make is None or len(arguments) > 1:
        raise ConfigError(_misfit(text))
    try:
        return make(*arguments)
    except TypeError:  # it needs an argument
        raise ConfigError(_misfit(text)) from None
    except ConfigError as error:
        raise ConfigError(f"export is {text!r}: {error}") from None


def _misfit(text: str) -> str:
    return (
        f"export is {text!r}; it takes one or several of these, separated by commas: "
        f"{'; '.join(SHAPES)}"
    )


def _prometheus(where: str) -> Exporter:
    from .prometheus import ALL, LOOPBACK, PrometheusFile, PrometheusPort

    address, _, port = where.rpartition(":")
    if port.isdigit() and "/" not in address:
        address = ALL if address == "*" else address.strip("[]") or LOOPBACK
        return PrometheusPort(int(port), address)
    return PrometheusFile(where)


def _opentelemetry(endpoint: str = "") -> Exporter:
    from .opentelemetry import OpenTelemetry

    return OpenTelemetry(endpoint)


def _tensorboard(folder: str) -> Exporter:
    from .tensorboard import TensorBoard

    return TensorBoard(folder)


def _wandb(project: str = "") -> Exporter:
    from .wandb import WandB

    return WandB(project)


def _mlflow(experiment: str = "") -> Exporter:
    from .mlflow import MLflow

    return MLflow(experiment)


MAKERS: dict[str, Callable[..., Exporter]] = {
    "prometheus": _prometheus,
    "opentelemetry": _opentelemetry,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}

__all__ = ["exporters_of"]
