"""The state of a Trainer between two batches, besides model and optimizers.

Lightning's checkpoint files hold its loops in the middle of a batch, and their restart leaves out
validations and updates of schedulers, and forgets logged values. Here it is the state after all
work of a batch, so that a resumed loop does all of the next one.

Scripts store state by Lightning's hooks: callbacks, datamodule, `on_save_checkpoint`.

`on_save_checkpoint` receives a dict as Lightning makes it for a checkpoint file. What hooks change
in it is stored, and `on_load_checkpoint` receives such a dict with the same changes.

Logged values are the metrics of the epoch in progress, which `self.log` accumulates. Lightning
keeps them in objects that it makes when a name is logged for the first time, and stores them in no
checkpoint. The accumulators of torchmetrics' metrics are stored apart, as their modules leave them
out of `state_dict()`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tierckpt._text import error_text
from tierckpt.errors import RestoreError, TierckptError
from tierckpt.integrations import StepSize
from tierckpt.state import tree_codec
from tierckpt.state.extras import Generator
from tierckpt.state.names import inside
from tierckpt.state.witness import Comparison

from .package import package_of, part
from .training_data import TrainingData

__all__ = [
    "HookError",
    "TrainerState",
    "averages",
    "load_hooks",
    "load_metrics",
    "load_results",
    "moved",
    "owners",
    "pack_hooks",
    "pack_metrics",
    "pack_results",
    "scaler_of",
]


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


def pack_hooks(trainer: Any) -> dict[str, Any]:
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


def load_hooks(trainer: Any, packed: dict[str, Any]) -> None:
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
        raise HookError(f"{type(owner).__name__}.{name}() raised {error_text(error)}") from error


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


KEPT_METRIC = ("_update_count", "_computed", "_forward_cache", "_is_synced")


def pack_metrics(module: torch.nn.Module) -> dict[str, Any]:
    """The accumulators of all metrics in the module, by the metric's name."""
    found = {
        name: {key: getattr(metric, key) for key in (*metric._defaults, *KEPT_METRIC)}
        for name, metric in module.named_modules()
        if _is_metric(metric)
    }
    for name, collection in module.named_modules():
        # Of metrics with equal states, a MetricCollection updates only the first.
        if getattr(collection, "_groups_checked", False):
            for first, *others in collection._groups.values():
                for other in others:
                    found[inside(name, other)] = found[inside(name, first)]
    return found


def load_metrics(module: torch.nn.Module, packed: dict[str, Any]) -> None:
    """Set the accumulators of the metrics that still exist."""
    metrics: dict[str, Any] = {n: m for n, m in module.named_modules() if _is_metric(m)}
    for name in packed.keys() & metrics.keys():
        for key, value in packed[name].items():
            setattr(metrics[name], key, moved(value, metrics[name].device))


def moved(value: Any, device: Any) -> Any:
    """The value with all tensors in it on the device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def _is_metric(module: Any) -> bool:
    names = ("_defaults", "_reductions", *KEPT_METRIC)
    return isinstance(module, torch.nn.Module) and all(hasattr(module, name) for name in names)


RESULT_STATES = ("value", "cumulated_batch_size")
KEPT_RESULT = ("_forward_cache", "_computed", "has_reset", "_update_count")
RESULT_FACTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)


def pack_results(results: Any) -> dict[str, Any]:
    """The values of a `_ResultCollection`, by key. Leaves out values that are reduced over a
    process group of the script's own."""
    return {key: _packed(each) for key, each in results.items() if each.meta.sync._group is None}


def _packed(result: Any) -> dict[str, Any]:
    meta = result.meta
    names = (*RESULT_STATES, *KEPT_RESULT) if result.is_tensor else KEPT_RESULT
    return {
        "is_tensor": result.is_tensor,
        "facts": json.dumps({name: getattr(meta, name) for name in RESULT_FACTS}),
        "reduce": meta.reduce_fx.__name__,
        "sync": json.dumps([meta.sync.should, meta.sync.rank_zero_only, meta.sync.op]),
        "values": {name: getattr(result, name) for name in names if hasattr(result, name)},
    }


def load_results(trainer: Any, results: Any, packed: dict[str, Any]) -> None:
    """Set the values in place of all that `results` has."""
    results.clear()
    package = part(trainer, "trainer.connectors.logger_connector.result")
    for key, saved in packed.items():
        meta = package._Metadata(
            **json.loads(saved["facts"]), reduce_fx=getattr(torch, saved["reduce"])
        )
        should, rank_zero_only, op = json.loads(saved["sync"])
        meta.sync = package._Sync(
            _should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only, _op=op
        )
        result = package._ResultMetric(meta, saved["is_tensor"])
        for name, value in saved["values"].items():
            setattr(result, name, value)
        if not saved["is_tensor"]:
            result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        results[key] = result.to(trainer.lightning_module.device)


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
    "the checkpoint was taken within an epoch with batch_size={want}, and the training loader has "
    "batch_size={has}: the samples to skip would not be those trained on. Set batch_size={want}"
)
OTHER_ORDER = (
    "the checkpoint was taken within an epoch, and the sampler makes its order of samples for a "
    "batch size, which was {want} and is {has} now: the samples to skip would not be those trained "
    "on. Give the sampler its former batch_size, or start the former number of ranks"
)
INDIVISIBLE = (
    "v{version} was taken with {samples} samples a step ({old}), which cannot be divided by "
    "{ranks} rank(s) x accumulate_grad_batches={accumulation}. Set another "
    "accumulate_grad_batches, or start {had} rank(s), or start a new job at another path"
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
            "scripts": pack_hooks(trainer) if self._has_trained else self._scripts,
            "connector": {name: getattr(connector, name) for name in CONNECTOR},
            "results": pack_results(epoch._results),
            "metrics": pack_metrics(trainer.lightning_module),
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
            tree_codec.pack(pack_hooks(self._trainer), "hooks", tree_codec.Arena().keep)

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
    def is_mid_epoch(self) -> bool:
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
        load_hooks(trainer, self._scripts)

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
        vars(trainer._logger_connector).update(moved(saved["connector"], device))
        load_results(trainer, epoch._results, saved["results"])
        load_metrics(trainer.lightning_module, saved["metrics"])
        resume_averaging(trainer)
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
