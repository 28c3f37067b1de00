"""The state of a Trainer between two batches, besides model and optimizers.

Lightning's checkpoint files hold its loops in the middle of a batch, and their restart leaves out
validations and updates of schedulers, and forgets logged values. Here it is the state after all
work of a batch, so that a resumed loop does all of the next one.
"""

from __future__ import annotations

import json
from typing import Any

from . import hook_states, logged_results, metric_states
from .training_data import TrainingData

CONNECTOR = (
    *("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"),
    *("_first_loop_iter", "_current_fx"),
)
"""Attributes of the logger connector."""
DDP_FLAG = "require_forward_param_sync"
"""Attribute of a DDP module: whether its next forward pass broadcasts the buffers of rank 0. A
manual optimization turns it off after the first batch, and buffers differ from then on."""


class TrainerState:
    """One of the `extra_per_rank` objects: logged values, and the place in the data, differ between
    ranks. Training thread."""

    def __init__(self, trainer: Any, data: TrainingData) -> None:
        self._trainer, self._data = trainer, data
        self._loop = trainer.fit_loop
        self.loaded: dict[str, Any] | None = None
        """The restored state; None if nothing was restored, or only for another number of ranks."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and tensors; shares its tensors."""
        trainer, loop = self._trainer, self._loop
        epoch, connector = loop.epoch_loop, trainer._logger_connector
        return {
            "progress": json.dumps(_progress(loop)),  # text: a version packs values one by one
            "batches_that_stepped": epoch._batches_that_stepped,
            "validation": {
                "seen": dict(epoch.val_loop._seen_batches_per_dataloader),
                "has_run": epoch.val_loop._has_run,
                "reloaded": _whole(epoch.val_loop._last_val_dl_reload_epoch),
            },
            "broadcasts_buffers": getattr(trainer.strategy.model, DDP_FLAG, True),
            "should_stop": trainer.should_stop,
            "accumulate": trainer.accumulate_grad_batches,
            "reloaded": _whole(loop._last_train_dl_reload_epoch),
            "schedulers": [
                [type(each.scheduler).__name__, each.scheduler.state_dict()]
                for each in trainer.lr_scheduler_configs
            ],
            "precision": {} if scaler_of(trainer) else trainer.precision_plugin.state_dict(),
            "scripts": hook_states.pack(trainer),
            "connector": {name: getattr(connector, name) for name in CONNECTOR},
            "results": logged_results.pack(epoch._results),
            "metrics": metric_states.pack(trainer.lightning_module),
            "data": self._data.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for `load_at_start` and `load_at_resumption`."""
        self.loaded = state

    @property
    def is_amid_epoch(self) -> bool:
        """Whether the epoch's own work is not done in the restored state."""
        progress = self._loop.epoch_progress.current
        return bool(self.loaded and progress.ready > progress.processed)

    @property
    def batches(self) -> int:
        """Batches of the current epoch that were trained on."""
        return int(self._loop.epoch_loop.batch_progress.current.ready)

    def load_at_start(self) -> None:
        """Set what the start of a fit looks at, or changes on top of it."""
        if self.loaded is None:
            return
        trainer, loop, saved = self._trainer, self._loop, self.loaded
        _load_progress(loop, json.loads(saved["progress"]))
        loop.epoch_loop._batches_that_stepped = saved["batches_that_stepped"]
        trainer.accumulate_grad_batches = saved["accumulate"]
        configs = trainer.lr_scheduler_configs
        for config, (kind, state) in zip(configs, saved["schedulers"], strict=False):
            if type(config.scheduler).__name__ == kind:
                config.scheduler.load_state_dict(state)
        if saved["precision"]:
            trainer.precision_plugin.load_state_dict(saved["precision"])
        hook_states.load(trainer, saved["scripts"])

    def load_at_resumption(self) -> None:
        """Set the rest, which the start of a fit resets: before the first batch."""
        if self.loaded is None:
            return
        trainer, epoch, saved = self._trainer, self._loop.epoch_loop, self.loaded
        if saved["validation"]["has_run"]:
            trainer.validating = True
            epoch.val_loop.setup_data()
            trainer.training = True
            if saved["validation"]["reloaded"] is not None:
                epoch.val_loop._last_val_dl_reload_epoch = saved["validation"]["reloaded"]
        epoch.val_loop._seen_batches_per_dataloader.update(saved["validation"]["seen"])
        epoch.val_loop._has_run = saved["validation"]["has_run"]
        if saved["reloaded"] is not None:
            self._loop._last_train_dl_reload_epoch = saved["reloaded"]
        if hasattr(trainer.strategy.model, DDP_FLAG):
            setattr(trainer.strategy.model, DDP_FLAG, saved["broadcasts_buffers"])
        device = trainer.lightning_module.device
        vars(trainer._logger_connector).update(metric_states.moved(saved["connector"], device))
        logged_results.load(trainer, epoch._results, saved["results"])
        metric_states.load(trainer.lightning_module, saved["metrics"])
        hook_states.resume_averaging(trainer)
        trainer.should_stop = trainer.should_stop or saved["should_stop"]


def scaler_of(trainer: Any) -> Any:
    """The GradScaler, an object of its own: its state is copied without waiting for the device."""
    return getattr(trainer.precision_plugin, "scaler", None)


def _whole(epoch: float) -> int | None:
    return None if epoch == float("-inf") else int(epoch)


def _progress(loop: Any) -> dict[str, Any]:
    """The counters of a loop and of all loops in it, by attribute."""
    found = {}
    for name, value in vars(loop).items():
        kind = type(value).__module__.rpartition(".")[2]
        if kind == "progress":
            found[name] = _counts(value)
        elif name != "trainer" and hasattr(value, "on_save_checkpoint"):
            found[name] = _progress(value)
    return found


def _counts(progress: Any) -> Any:
    if not hasattr(progress, "__dict__"):
        return progress
    return {name: _counts(value) for name, value in vars(progress).items()}


def _load_progress(loop: Any, saved: dict[str, Any]) -> None:
    for name, counts in saved.items():
        target = getattr(loop, name)
        if hasattr(target, "on_save_checkpoint"):
            _load_progress(target, counts)
        else:
            target.load_state_dict(counts)


__all__ = ["TrainerState", "scaler_of"]
