"""State that scripts store by Lightning's hooks: callbacks, datamodule, `on_save_checkpoint`.

`on_save_checkpoint` receives a dict as Lightning makes it for a checkpoint file. What hooks change
in it is stored, and `on_load_checkpoint` receives such a dict with the same changes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tierckpt._text import in_words
from tierckpt.errors import TierckptError

from .package import package_of

ATTRIBUTES = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""What ModelCheckpoint needs, to not save a step twice, and leaves out of `state_dict()`."""
AVERAGE = "_average_model"
"""The averaged weights of a WeightAveraging (EMA) or StochasticWeightAveraging callback."""


class HookError(TierckptError):
    """A hook of the script raised an error; the text names both."""


def averages(trainer: Any) -> dict[str, torch.nn.Module]:
    """The averaged models of the callbacks, which are equal on all ranks."""
    found = {
        f"average of {callback.state_key}": getattr(callback, AVERAGE, None)
        for callback in trainer.callbacks
    }
    return {name: each for name, each in found.items() if isinstance(each, torch.nn.Module)}


def pack(trainer: Any) -> dict[str, Any]:
    """The states of callbacks and datamodule, and what hooks change in a checkpoint. Raises
    HookError for an error of one of them."""
    states, packed = {}, {}
    for callback in trainer.callbacks:
        state = _called(callback, "state_dict")
        state = {k: v for k, v in state.items() if k != "average_model_state"}
        own = {name: getattr(callback, name) for name in ATTRIBUTES if hasattr(callback, name)}
        if state or own:
            states[callback.state_key] = state
            packed[str(callback.state_key)] = {"state": state, "own": own}  # some give a type
    data = {} if trainer.datamodule is None else _called(trainer.datamodule, "state_dict")
    changes = {}
    if hooks := _hooks(trainer, "on_save_checkpoint"):
        file = _file(trainer, states, data)
        before = {k: dict(v) if isinstance(v, dict) else v for k, v in file.items()}
        for hook in hooks:
            hook(file)
        changes = _changes(before, file)
    return {"callbacks": packed, "datamodule": data, **changes}


def load(trainer: Any, packed: dict[str, Any]) -> None:
    """Give the states to hooks, datamodule and callbacks, in Lightning's order."""
    if not packed:
        return
    callbacks, data = packed["callbacks"], packed["datamodule"]
    if hooks := _hooks(trainer, "on_load_checkpoint"):
        keys = {str(callback.state_key): callback.state_key for callback in trainer.callbacks}
        states = {keys.get(key, key): saved["state"] for key, saved in callbacks.items()}
        file = _file(trainer, states, data)
        weights = file["state_dict"].items()
        file["state_dict"] = {name: value.to("cpu", copy=True) for name, value in weights}
        _change(file, packed)
        for hook in hooks:
            hook(file)
    if data:
        trainer.datamodule.load_state_dict(data)
    for callback in trainer.callbacks:
        saved = callbacks.get(str(callback.state_key))
        if saved is None:
            continue
        if saved["state"]:
            average = getattr(callback, AVERAGE, None)
            if isinstance(average, torch.nn.Module):
                saved["state"].setdefault("average_model_state", average.state_dict())
            callback.load_state_dict(saved["state"])
        vars(callback).update(saved["own"])


def resume_averaging(trainer: Any) -> None:
    """Let StochasticWeightAveraging make its scheduler as it was: it does so at the start of an
    epoch, and its restored state keeps it from averaging again."""
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]
    for callback in trainer.callbacks:
        if getattr(callback, "_scheduler_state", None) and not callback._initialized:
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for group, kept in zip(groups, options, strict=True):
        group.update(kept)


def owners(trainer: Any, hook: str) -> list[str]:
    """Class names of the callbacks and the module with a hook of the script's own."""
    every = (*trainer.callbacks, trainer.lightning_module)
    return [type(each).__name__ for each in every if _has(each, hook)]


def _hooks(trainer: Any, name: str) -> list[Callable[[dict[str, Any]], None]]:
    """The script's hooks that change a checkpoint, in Lightning's order."""
    module = trainer.lightning_module
    found: list[Callable[[dict[str, Any]], None]] = [
        partial(_called, callback, name, trainer, module)
        for callback in trainer.callbacks
        if _has(callback, name) and not hasattr(callback, AVERAGE)
    ]
    if _has(module, name):
        found.insert(
            0 if name == "on_load_checkpoint" else len(found), partial(_called, module, name)
        )
    return found


def _has(owner: Any, hook: str) -> bool:
    """Whether the object, or a class of the script's, overrides one of Lightning's empty hooks."""
    if hook in vars(owner):
        return True
    for base in type(owner).__mro__:
        if hook in vars(base):
            return not base.__module__.startswith(("lightning.pytorch.", "pytorch_lightning."))
    return False


def _called(owner: Any, name: str, *args: Any) -> Any:
    try:
        return getattr(owner, name)(*args)
    except Exception as error:
        raise HookError(f"{type(owner).__name__}.{name}() raised {in_words(error)}") from error


def _file(trainer: Any, callbacks: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as Lightning's `dump_checkpoint` makes it, before hooks."""
    connector, module = trainer._checkpoint_connector, trainer.lightning_module
    precision = trainer.precision_plugin
    file = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": importlib.import_module(package_of(trainer)).__version__,
        "state_dict": connector._get_lightning_module_state_dict(),
        "loops": connector._get_loops_state_dict(),
        "callbacks": callbacks,
        "optimizer_states": [each.state_dict() for each in trainer.optimizers],
        "lr_schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
    }
    if state := precision.state_dict():
        file[type(precision).__qualname__] = state
    for owner in (module, trainer.datamodule):
        if owner is not None and owner.hparams:
            if hasattr(owner, "_hparams_name"):
                file[owner.CHECKPOINT_HYPER_PARAMS_NAME] = owner._hparams_name
            file[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    if data:
        file[type(trainer.datamodule).__qualname__] = data
    return file


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What hooks have changed: `hooks` has new values, `gone` the keys that are removed, `inside`
    the changes of each dict among the values. The callbacks' own states are stored anyway."""
    new, inside = {}, {}
    for key, value in after.items():
        known = before.get(key)
        if key in before and (value is known or key == "callbacks"):
            continue
        if isinstance(value, dict) and isinstance(known, dict):
            if any((changes := _changes(known, value)).values()):
                inside[key] = changes
        else:
            new[key] = value
    gone = [key for key in before if key not in after]
    return {"hooks": new, "gone": gone, "inside": inside}


def _change(file: dict[str, Any], changes: dict[str, Any]) -> None:
    """Repeat `_changes`. Older versions have `hooks` only."""
    file.update(changes["hooks"])
    for key in changes.get("gone", ()):
        file.pop(key, None)
    for key, inner in changes.get("inside", {}).items():
        if key in file:
            file[key] = {**file[key]}
            _change(file[key], inner)


__all__ = ["HookError", "averages", "load", "owners", "pack"]
