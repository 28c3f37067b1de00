"""The parts of an Accelerator that a checkpoint needs, and the kinds that are refused."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from tierckpt import _tested_versions
from tierckpt.errors import ConfigError, UnsupportedStateError
from tierckpt.integrations.frameworks import Framework, Say

if TYPE_CHECKING:
    from accelerate import Accelerator

ACCELERATE = Framework(*_tested_versions.ACCELERATE)
PRIVATE = (
    *("_models", "_optimizers", "_schedulers", "_custom_objects", "_dataloaders"),
    *("step", "scaler", "gradient_state.sync_gradients", "project_configuration.iteration"),
)
"""The attributes of an Accelerator that this package uses; most are private."""
PREPARE = (
    "attach(accelerator): the accelerator has prepared no {kind}. Call attach after "
    "accelerator.prepare(model, optimizer, ...)"
)
REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")
"""Kinds of `Accelerator.distributed_type` with a whole model on every rank."""
SHARDED = (
    "Accelerate's distributed type {name}: it shards the model or its optimizer over the ranks, or "
    "runs on TPUs, and Tierckpt stores states that are the same on all ranks. Choose plain data "
    "parallelism (`accelerate launch --multi_gpu` or `--cpu`, without a plugin for {name}), or use "
    "accelerator.save_state()"
)
MESH = (
    "Accelerate's parallelism_config ({sizes}): it shards the model or the sequence over the "
    "ranks, and Tierckpt stores states that are the same on all ranks. Leave parallelism_config "
    "out, or use accelerator.save_state()"
)


def check(accelerator: Accelerator, say: Say) -> None:
    """Warn of an untested version. Raises ConfigError for one without the private names, or if
    nothing was prepared, and UnsupportedStateError for an accelerator that shards the state."""
    version = _version_of(accelerator)
    ACCELERATE.require(version, accelerator, PRIVATE)
    ACCELERATE.warn_if_unknown(version, say)
    name = str(getattr(accelerator.distributed_type, "name", accelerator.distributed_type))
    if name not in REPLICATED:
        raise UnsupportedStateError(SHARDED.format(name=name))
    mesh = getattr(accelerator, "parallelism_config", None)
    sizes = {key: size for key, size in vars(mesh or object).items() if _shards(key, size)}
    if mesh is not None and sizes:
        text = ", ".join(f"{key}={size}" for key, size in sizes.items())
        raise UnsupportedStateError(MESH.format(sizes=text))
    for kind, prepared in (("model", accelerator._models), ("optimizer", accelerator._optimizers)):
        if not prepared:
            raise ConfigError(PREPARE.format(kind=kind))


def _shards(key: str, size: Any) -> bool:
    return (
        key.endswith("_size") and key != "dp_replicate_size" and isinstance(size, int) and size > 1
    )


def _version_of(accelerator: Accelerator) -> str:
    for base in type(accelerator).__mro__:
        package, _, _ = base.__module__.partition(".")
        if package == "accelerate":
            return str(importlib.import_module(package).__version__)
    raise ConfigError(
        f"attach() takes an Accelerator of Hugging Face Accelerate, not {accelerator!r}"
    )


def model_of(accelerator: Accelerator) -> torch.nn.Module:
    """The prepared model; several in a ModuleList."""
    models = accelerator._models
    model: torch.nn.Module = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
    return model


def optimizers_of(accelerator: Accelerator) -> Any:
    """The optimizer inside its wrapper, or a list of several."""
    inner = [each.optimizer for each in accelerator._optimizers]
    return inner[0] if len(inner) == 1 else inner


def objects_of(accelerator: Accelerator) -> dict[str, Any]:
    """The schedulers inside their wrappers, the scaler, and the registered objects, by name."""
    found: dict[str, Any] = {"accelerator": Counts(accelerator)}
    for number, each in enumerate(accelerator._schedulers):
        found[f"scheduler{number}"] = getattr(each, "scheduler", each)
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    for number, each in enumerate(accelerator._custom_objects):
        found[f"object{number}"] = each
    return found


class Counts:
    """The counts of an Accelerator: passes since it synchronized gradients, and saved states."""

    is_place = True
    """See `state.extras.is_place`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        accelerator = self._accelerator
        return {"step": accelerator.step, "saves": accelerator.project_configuration.iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the counts."""
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["saves"]


__all__ = ["check", "model_of", "objects_of", "optimizers_of"]
