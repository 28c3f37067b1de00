"""The package that Lightning is in: `lightning.pytorch` or `pytorch_lightning`.

They are the same code with classes of their own, and one process may have both. All names of
Lightning's that are private are used through this package, and checked by `check`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from typing import Any

from tierckpt import _version
from tierckpt.errors import ConfigError, UnsupportedStateError
from tierckpt.integrations import Framework, Say

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
LIGHTNING = Framework(*_version.LIGHTNING)
PRIVATE = (
    "fit_loop.epoch_loop.batch_progress.total",
    "fit_loop.epoch_loop.val_loop._combined_loader",
    "fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader",
    "fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop._num_ready_batches_reached",
    "fit_loop.epoch_loop._results",
    "fit_loop.epoch_loop.on_advance_end",
    "fit_loop.epoch_loop.on_run_start",
    "fit_loop.epoch_loop.reset",
    "fit_loop.epoch_progress.current.ready",
    "fit_loop.on_advance_start",
    "fit_loop._combined_loader",
    "fit_loop._data_fetcher",
    "fit_loop._data_source.dataloader",
    "fit_loop._last_train_dl_reload_epoch",
    "_accelerator_connector.cluster_environment",
    "_checkpoint_connector._loaded_checkpoint",
    "_logger_connector._callback_metrics",
    "_logger_connector._current_fx",
    "_logger_connector._first_loop_iter",
    "_logger_connector._logged_metrics",
    "_logger_connector._progress_bar_metrics",
    "_signal_connector._original_handlers",
)
"""The private attributes of a Trainer that this package uses."""
OWN_FETCHING = (
    "training_step has an argument dataloader_iter: it fetches batches itself, and Tierckpt cannot "
    "know how many of them it trained on. Let it take `batch`, or remove TierCheckpoint"
)
CHANGES = {
    "ModelPruning": "it gives parameters other names (weight_orig) in the middle of the training, "
    "and a restart would start with the former ones. Prune the model before fit(), with "
    "torch.nn.utils.prune: the masks are buffers, and part of every version",
    "LearningRateFinder": "it would search again after each restart. Search once, with "
    "Tuner(trainer).lr_find(model)",
    "BatchSizeFinder": "it would search again after each restart. Search once, with "
    "Tuner(trainer).scale_batch_size(model)",
}
"""Callbacks of Lightning that are refused, with the reasons."""
PLAIN_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
SHARDED = (
    "{name}: it shards the model or its optimizer over the ranks, and Tierckpt stores states that "
    "are the same on all ranks. Use Trainer(strategy='ddp'), or remove TierCheckpoint"
)


def callback_base() -> type:
    """The base class of a callback of the imported Lightning or, without one, of the installed one.
    Raises ConfigError if there is none."""
    names = [name for name in PACKAGES if name in sys.modules]
    names = names or [name for name in PACKAGES if _is_installed(name)]
    if not names:
        raise ConfigError("tierckpt.lightning needs Lightning: pip install lightning")
    base: type = importlib.import_module(names[0]).Callback
    return base


def for_every_package(kind: Any) -> Any:
    """A callback's class that also derives from the base class of any other Lightning imported by
    now; the class itself if there is none."""
    bases = [sys.modules[name].Callback for name in PACKAGES if name in sys.modules]
    others = tuple(base for base in bases if not issubclass(kind, base))
    if not others:
        return kind
    return type(kind.__name__, (kind, *others), {"__module__": kind.__module__})


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def package_of(trainer: Any) -> str:
    """The package of a Trainer's class, or of the one that it derives from."""
    for base in type(trainer).__mro__:
        for name in PACKAGES:
            if base.__module__.startswith(f"{name}."):
                return name
    raise ConfigError(f"TierCheckpoint is a callback of Lightning's Trainer, not of {trainer!r}")


def part(trainer: Any, name: str) -> Any:
    """A module of the Trainer's package."""
    return importlib.import_module(f"{package_of(trainer)}.{name}")


def check(trainer: Any, say: Say) -> None:
    """Warn of an untested version. Raises ConfigError for one without the private names, and
    UnsupportedStateError for a strategy that shards the state, a callback of `CHANGES`, or a
    training step that fetches batches itself."""
    version = importlib.import_module(package_of(trainer)).__version__
    LIGHTNING.require(version, trainer, PRIVATE)
    LIGHTNING.warn_if_unknown(version, say)
    names = [base.__name__ for base in type(trainer.strategy).__mro__]
    if "DeepSpeedStrategy" in names or not any(name in names for name in PLAIN_STRATEGIES):
        raise UnsupportedStateError(SHARDED.format(name=names[0]))
    for callback in trainer.callbacks:
        for base in type(callback).__mro__:
            if why := CHANGES.get(base.__name__):
                raise UnsupportedStateError(f"the callback {type(callback).__name__}: {why}")
    step = trainer.lightning_module.training_step
    if "dataloader_iter" in inspect.signature(step).parameters:
        raise UnsupportedStateError(OWN_FETCHING)


def searches(trainer: Any) -> bool:
    """Whether this fit is the search of a Tuner, not a training."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)


__all__ = ["callback_base", "check", "for_every_package", "package_of", "part", "searches"]
