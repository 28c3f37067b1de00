"""The state of a Trainer between two batches, besides model and optimizers.

Lightning's checkpoint files hold its loops in the middle of a batch, and their restart leaves out
validations and updates of schedulers, and forgets logged values. Here it is the state after all
work of a batch, so that a resumed loop does all of the next one.
"""

from __future__ import annotations

import contextlib
import json
import math
from fractions import Fraction
from typing import Any

from tierckpt.errors import RestoreError
from tierckpt.integrations.other_ranks import StepSize
from tierckpt.state import tree_codec
from tierckpt.state.extras import Generator
from tierckpt.state.witness import Comparison

from . import hook_states, logged_results, metric_states
from .hook_states import HookError
from .training_data import TrainingData

CONNECTOR = (
    *("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"),
    *("_first_loop_iter", "_current_fx"),
)
"""Attributes of the logger connector."""
NAMES = ("batch_size", "accumulate_grad_batches")
NO_ORDER = (
    "v{version} was taken by {had} rank(s), and this job has {has}: samples that were trained on "
    "in this epoch are known for other numbers of ranks only if there is one training loader, with "
    "a batch_size and a DistributedSampler (Lightning adds one for two or more ranks). Start {had} "
    "rank(s)"
)
OTHER_LOADER = (
    "the checkpoint is of another number of ranks, and the training loader has batch_size={has} or "
    "no DistributedSampler: it needs a DistributedSampler, and batch_size={want}, so that a step "
    "has as many samples as before; or change accumulate_grad_batches with it. (For a single rank "
    "give the loader a DistributedSampler of your own)"
)
OTHER_BATCH = (
    "the checkpoint was taken amid an epoch with batch_size={want}, and the training loader has "
    "batch_size={has}: the samples to skip would not be those trained on. Set batch_size={want}"
)
OTHER_ORDER = (
    "the checkpoint was taken amid an epoch, and the sampler makes its order of samples for a "
    "batch size, which was {want} and is {has} now: the samples to skip would not be those trained "
    "on. Give the sampler its former batch_size, or start the former number of ranks"
)
INDIVISIBLE = (
    "v{version} was taken with {samples} samples a step ({old}), which cannot be divided by "
    "{ranks} rank(s) x accumulate_grad_batches={accumulation}. Set another "
    "accumulate_grad_batches, or start {had} rank(s), or begin a new job at another path"
)
DDP_FLAG = "require_forward_param_sync"
"""Attribute of a DDP module: whether its next forward pass broadcasts the buffers of rank 0. A
manual optimization turns it off after the first batch, and buffers differ from then on."""


class TrainerState:
    """One of the `extra_per_rank` objects: logged values, and the place in the data, differ between
    ranks. Training thread."""

    is_place = True
    """See `state.extras.is_place`."""

    def __init__(self, trainer: Any, data: TrainingData) -> None:
        self._trainer, self._data = trainer, data
        self._loop = trainer.fit_loop
        self.loaded: dict[str, Any] | None = None
        """The restored state; None if nothing was restored."""
        self.factor = Fraction(1)
        """Batches of a rank for one of the restored job; see `convert`."""
        self.is_of_other_ranks = False
        """Another number of ranks took the restored version."""
        self._batch = 0
        """The batch size that goes with the restored place; 0: any."""
        self._has_trained = False
        self._scripts: dict[str, Any] = {}
        """The restored states of the script's hooks, until a batch was trained on."""

    @property
    def comparison(self) -> Comparison | None:
        """See `DataWitness`; likewise:"""
        return self._data.comparison

    @property
    def witnesses(self) -> bool:
        """Whether batches get fingerprints."""
        return self._data.witnesses

    @witnesses.setter
    def witnesses(self, witnesses: bool) -> None:
        self._data.witnesses = witnesses

    def draws_from(self, named: dict[str, Generator]) -> None:
        """As in `ResumableLoader`."""
        self._data.named = named

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
                "is_set_up": epoch.val_loop._combined_loader is not None,
                "reloaded": _whole(epoch.val_loop._last_val_dl_reload_epoch),
            },
            "broadcasts_buffers": getattr(trainer.strategy.model, DDP_FLAG, True),
            "should_stop": trainer.should_stop,
            **self._data.facts._asdict(),
            "ranks": trainer.world_size,
            "accumulate": trainer.accumulate_grad_batches,
            "reloaded": _whole(loop._last_train_dl_reload_epoch),
            "schedulers": [
                [type(each.scheduler).__name__, each.scheduler.state_dict()]
                for each in trainer.lr_scheduler_configs
            ],
            "precision": {} if scaler_of(trainer) else trainer.precision_plugin.state_dict(),
            "scripts": hook_states.pack(trainer) if self._has_trained else self._scripts,
            "connector": {name: getattr(connector, name) for name in CONNECTOR},
            "results": logged_results.pack(epoch._results),
            "metrics": metric_states.pack(trainer.lightning_module),
            "data": self._data.state_dict(),
        }

    def trained(self) -> None:
        """Note that a batch was trained on: hooks of the script may be called from now on, as by
        Lightning's first save. Raises UnsupportedStateError, at the first call, if a version cannot
        store their state. Their own errors are those of every version."""
        if self._has_trained:
            return
        self._has_trained = True
        with contextlib.suppress(HookError):
            tree_codec.pack(hook_states.pack(self._trainer), "hooks", tree_codec.Arena().keep)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for `load_at_start` and `load_at_resumption`."""
        self.loaded = state

    def load_of_other_ranks(self, state: dict[str, Any], ranks: int) -> None:
        """Keep the state of one of `ranks` ranks, without values that belong to its batches:
        metrics and logged means of the epoch in progress."""
        self.loaded = {**state, "results": {}, "metrics": {}}

    def convert(self, version: int) -> None:
        """Convert the place in the epoch to this job's number of ranks. Raises RestoreError if the
        samples of a step would be others."""
        saved = self.loaded
        ranks, accumulation = self._trainer.world_size, self._trainer.accumulate_grad_batches
        if saved is None:
            return
        self.is_of_other_ranks = saved["ranks"] != ranks
        if not self.is_of_other_ranks:
            self._batch = saved["batch"]
            return
        if not saved["batch"] or not saved["is_distributed"]:
            raise RestoreError(NO_ORDER.format(version=version, had=saved["ranks"], has=ranks))
        old = StepSize(saved["ranks"], saved["batch"], saved["accumulate"])
        # The loaders of this fit come later.
        self._batch, rest = divmod(old.samples, ranks * accumulation)
        if rest:
            facts = {"samples": old.samples, "old": old.named(NAMES), "had": old.ranks}
            text = INDIVISIBLE.format(
                version=version, ranks=ranks, accumulation=accumulation, **facts
            )
            raise RestoreError(text)
        new = StepSize(ranks, self._batch, accumulation)
        self.factor = new.batches_for_one_of(old)
        progress = json.loads(saved["progress"])
        batches = progress["epoch_loop"]["batch_progress"]
        for counts in (batches["total"], batches["current"]):
            counts.update({k: math.ceil(v * self.factor) for k, v in counts.items()})
        saved |= {"progress": json.dumps(progress), "accumulate": accumulation}

    def check_loaders(self) -> None:
        """Raise RestoreError if the loaders are not those for which the place was converted."""
        data, want = self._data.facts, self._batch
        if self.is_of_other_ranks and not (data.is_distributed and data.batch == want):
            raise RestoreError(OTHER_LOADER.format(has=data.batch or "?", want=want))
        if want and data.batch and data.batch != want:
            raise RestoreError(OTHER_BATCH.format(has=data.batch, want=want))
        order = self.loaded["order"] if self.loaded else data.order
        if data.order != order:
            raise RestoreError(OTHER_ORDER.format(has=data.order or "any", want=order or "any"))

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
        self._scripts = saved["scripts"]
        hook_states.load(trainer, self._scripts)

    def load_at_resumption(self) -> None:
        """Set the rest, which the start of a fit resets: before the first batch."""
        if self.loaded is None:
            return
        trainer, epoch, saved = self._trainer, self._loop.epoch_loop, self.loaded
        if saved["validation"]["has_run"] or saved["validation"].get("is_set_up"):
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
