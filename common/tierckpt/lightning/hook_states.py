"""State that scripts store by Lightning's hooks: callbacks, datamodule, `on_save_checkpoint`.

`on_save_checkpoint` receives a dict as Lightning makes it for a checkpoint file, and only keys that
it adds are stored.
"""

from __future__ import annotations

from typing import Any

import torch

ATTRIBUTES = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""What ModelCheckpoint needs, to not save a step twice, and leaves out of `state_dict()`."""
AVERAGE = "_average_model"
"""The averaged weights of a WeightAveraging (EMA) or StochasticWeightAveraging callback."""


def averages(trainer: Any) -> dict[str, torch.nn.Module]:
    """The averaged models of the callbacks, which are equal on all ranks."""
    found = {
        f"average of {callback.state_key}": getattr(callback, AVERAGE, None)
        for callback in trainer.callbacks
    }
    return {name: each for name, each in found.items() if isinstance(each, torch.nn.Module)}


def pack(trainer: Any) -> dict[str, Any]:
    """The states of callbacks and datamodule, and the keys that hooks add to a checkpoint."""
    callbacks = {}
    for callback in trainer.callbacks:
        state = {k: v for k, v in callback.state_dict().items() if k != "average_model_state"}
        own = {name: getattr(callback, name) for name in ATTRIBUTES if hasattr(callback, name)}
        if state or own:
            callbacks[callback.state_key] = {"state": state, "own": own}
    data = trainer.datamodule
    return {
        "callbacks": callbacks,
        "datamodule": {} if data is None else data.state_dict(),
        "hooks": _added_by_hooks(trainer, "on_save_checkpoint"),
    }


def load(trainer: Any, packed: dict[str, Any]) -> None:
    """Give the states to callbacks, datamodule and hooks."""
    for callback in trainer.callbacks:
        saved = packed["callbacks"].get(callback.state_key)
        if saved is None:
            continue
        if saved["state"]:
            average = getattr(callback, AVERAGE, None)
            if isinstance(average, torch.nn.Module):
                saved["state"].setdefault("average_model_state", average.state_dict())
            callback.load_state_dict(saved["state"])
        vars(callback).update(saved["own"])
    if packed["datamodule"]:
        trainer.datamodule.load_state_dict(packed["datamodule"])
    if packed["hooks"]:
        _added_by_hooks(trainer, "on_load_checkpoint", packed["hooks"])


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


def _added_by_hooks(trainer: Any, hook: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call the hook of callbacks and module with a checkpoint; returns what they added to it."""
    module = trainer.lightning_module
    callbacks = [
        each for each in trainer.callbacks if _has(each, hook) and not hasattr(each, AVERAGE)
    ]
    if not callbacks and not _has(module, hook):
        return {}
    checkpoint = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": module.state_dict(),
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
        "optimizer_states": [each.state_dict() for each in trainer.optimizers],
        "lr_schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        **(given or {}),
    }
    before = set(checkpoint)
    for callback in callbacks:
        getattr(callback, hook)(trainer, module, checkpoint)
    if _has(module, hook):
        getattr(module, hook)(checkpoint)
    return {key: value for key, value in checkpoint.items() if key not in before}


def _has(owner: Any, hook: str) -> bool:
    """Whether a class of the script's overrides one of Lightning's empty hooks."""
    for base in type(owner).__mro__:
        if hook in vars(base):
            return not base.__module__.startswith(("lightning.pytorch.", "pytorch_lightning."))
    return False


__all__ = ["averages", "load", "pack"]
