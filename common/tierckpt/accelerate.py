"""Checkpoints for loops that use Hugging Face Accelerate.

::

    from tierckpt.accelerate import attach

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with attach(accelerator, path="ckpts") as ckpt:
        data = ckpt.resume(loader)
        for epoch in range(data.epoch, epochs):
            for batch in data:
                with accelerator.accumulate(model):
                    ...
                ckpt.step()

A restart resumes at the next batch, in the middle of an epoch, bit for bit.

A prepared loader counts its passes (`iteration`), and each pass sets the epoch of samplers and
data set to that count. `SeedableRandomSampler` draws its order from a seed and this epoch. Both
are part of the place. Everything else is as in `tierckpt.ResumableLoader`: the random states at
the start of the pass, and the number of batches.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch.utils.data import DataLoader, IterableDataset

import ddp_ckpt
from tierckpt import _version
from tierckpt.checkpointer.adapter import Handle
from tierckpt.errors import ConfigError, RestoreError, TierckptError, UnsupportedStateError
from tierckpt.integrations import (
    Framework,
    KeptGradients,
    Pass,
    Passes,
    PlaceOfAnyRanks,
    Say,
    StepSize,
    order_batch_of,
)
from tierckpt.resumable_loader import samplers_of
from tierckpt.settings import Arguments, with_settings
from tierckpt.state.extras import Generator
from tierckpt.state.witness import Ways

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Checkpointer", "ResumedLoader", "attach"]


ACCELERATE = Framework(*_version.ACCELERATE)
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
        """The counts; where the loop is left while it accumulates, those of the last step, as its
        loader gives the batches since again."""
        accelerator = self._accelerator
        step, passes = accelerator.step, accelerator.gradient_accumulation_steps
        if not accelerator.sync_gradients:
            step -= step % passes
        return {"step": step, "saves": accelerator.project_configuration.iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the counts."""
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["saves"]


NAMES = ("batch_size", "gradient_accumulation_steps")
UNPREPARED = (
    "resume(loader): the loader, a {kind}, was not prepared. Give what accelerator.prepare(loader) "
    "returned"
)
UNSEEDED = (
    "resume(loader): the checkpoint was taken in the first pass over a StatefulDataLoader with "
    "workers. Accelerate starts these workers in prepare(), and they draw from another seed now. "
    "Call accelerate.utils.set_seed() with the same number in each run, before "
    "accelerator.prepare(); or set use_stateful_dataloader=False"
)


class ResumedLoader(PlaceOfAnyRanks[Any]):
    """Iterates over a prepared loader, one pass per epoch, and can be resumed at any batch.

    Training thread only. Raises ConfigError for a loader that was not prepared.
    """

    ways = Ways(give="ckpt.resume(loader, generators=[...])")
    _gives_again = True

    def __init__(
        self,
        loader: Iterable[Any],
        accelerator: Accelerator,
        generators: Iterable[Generator] = (),
    ) -> None:
        if not hasattr(loader, "base_dataloader") or not hasattr(loader, "iteration"):
            raise ConfigError(UNPREPARED.format(kind=type(loader).__name__))
        self._prepared: Any = loader
        self._samplers = samplers_of(loader)
        self._order = order_batch_of(loader)
        passes = Passes(loader, _Pass, evaluated=accelerator._dataloaders)
        super().__init__(passes, of=[loader], generators=generators)
        self._pass_iteration = 0
        """The loader's `iteration` in the newest pass."""
        self._early_seed: int | None = None
        """That of the newest pass, see `_early_seed_of`."""
        self._accelerator = accelerator
        self.saved_step: StepSize | None = None
        """The samples of a step in the restored job; None if no restore has set the place."""

    def __getattr__(self, name: str) -> Any:
        """Attributes of the prepared loader (`dataset`, `total_batch_size`)."""
        if name == "_prepared":
            raise AttributeError(name)
        return getattr(self._prepared, name)

    def __iter__(self) -> Iterator[Any]:
        """A pass over the epoch; after a restore, over the rest of the current one. Raises
        TierckptError if its workers were started with another seed before the restore."""
        base = self._prepared.base_dataloader
        seed = _early_seed_of(base)
        if self._resuming is not None and seed is not None:
            saved = self._resuming["early_seed"]
            if saved is None:  # the saved pass made its iterator, which draws a seed
                base._iterator, base._initial_iter_for_state_dict = None, False
            elif saved != seed:
                raise TierckptError(UNSEEDED)
            seed = saved
        self._pass_iteration, self._early_seed = self._prepared.iteration, seed
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch, or continue it if it is the current one. Optional, as in
        `tierckpt.ResumableLoader.set_epoch`."""
        super().set_epoch(epoch)
        self._prepared.set_epoch(epoch)

    @property
    def step_size(self) -> StepSize:
        """The samples of one step in this job."""
        ranks = self._accelerator.num_processes
        total = getattr(self._prepared, "total_batch_size", None) or 0
        accumulation = self._accelerator.gradient_accumulation_steps
        return StepSize(ranks, total // ranks, accumulation, self._order)

    def fit(self, version: int) -> None:
        """Convert the restored place to this job's ranks and batches. Raises RestoreError if a step
        has other samples."""
        if self.saved_step is not None:
            self.step_size.require(self.saved_step, version, NAMES)
            self.convert(self.step_size.batches_for_one_of(self.saved_step))
            if self.step_size != self.saved_step:  # `accumulate` counts from this boundary on
                self._accelerator.step = 0

    def state_dict(self, in_forward: bool = False) -> dict[str, Any]:
        """The place, with the loader's count of passes and the seeds of its samplers."""
        state = super().state_dict(in_forward)
        if "iteration" in state:  # no pass has started since the restore
            return state
        started = state["place"]["begun"]
        seeds = [each.initial_seed for each in self._samplers if hasattr(each, "initial_seed")]
        iteration = self._pass_iteration if started else self._prepared.iteration
        early = self._early_seed if started else None
        step = self.step_size.as_dict()
        return {**state, "iteration": iteration, "seeds": seeds, "early_seed": early, "step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass resume there."""
        super().load_state_dict(state)
        self.saved_step = StepSize(**state["step"])
        self._prepared.iteration = state["iteration"]
        seeded = [each for each in self._samplers if hasattr(each, "initial_seed")]
        for sampler, seed in zip(seeded, state["seeds"], strict=False):
            sampler.initial_seed = seed


def _early_seed_of(base: Any) -> int | None:
    """A StatefulDataLoader has an iterator before its first pass, because `prepare` reads its
    state: the seed of that one's workers, which have drawn from samplers already; 0 without
    workers. None if there is no such iterator."""
    if not getattr(base, "_initial_iter_for_state_dict", False):
        return None
    return int(base._iterator._base_seed) if base.num_workers > 0 else 0


class _Pass(Pass):
    def skip(self, count: int) -> int:
        """Skip batches without loading them, before the first one; returns how many, 0 where that
        would not be exact. The last batch of `count` is loaded: with it the loader fetches the one
        after it."""
        base = self._loader.base_dataloader
        plain = type(base) is DataLoader and base.num_workers == 0
        fetches_itself = hasattr(self._loader, "rng_types")  # not a dispatcher
        if (
            count < 2
            or not plain
            or not fetches_itself
            or isinstance(base.dataset, IterableDataset)
        ):
            return 0
        self._loader.base_dataloader = _Skipping(self._loader, base, count - 1)
        next(self._batches)
        return count


class _Skipping:
    """Stands for a DataLoader until it is iterated over, and then skips batches."""

    def __init__(self, loader: Any, base: Any, count: int) -> None:
        self._loader, self._base, self._count = loader, base, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def __iter__(self) -> Iterator[Any]:
        self._loader.base_dataloader = self._base
        batches: Any = iter(self._base)
        for _ in range(self._count):
            batches._next_index()
        return batches  # type: ignore[no-any-return]


TAKEN = (
    "extra={{{name!r}: ...}}: attach() uses this name for a part of the accelerator. Give the "
    "object another name"
)

TWICE = (
    "resume() was called before, and has restored the checkpoint: give all loaders in one call, "
    "first, second = ckpt.resume(first, second)"
)
OTHER_LOADERS = (
    "v{version} has no place in the data for these loaders: another job took it, or one with other "
    "loaders in resume(). Give the same loaders; or call ckpt.restore() in place of "
    "ckpt.resume(loader), and choose the data yourself"
)


class Checkpointer(ddp_ckpt.Checkpointer):
    """Checkpoints what an Accelerator has prepared; see `tierckpt.Checkpointer` for the rest.

    It stores the prepared models, the optimizers and schedulers inside Accelerate's wrappers, the
    scaler, the objects of `register_for_checkpointing`, and the accelerator's counts. Its versions
    count iterations in which gradients were synchronized and a step was made.
    """

    def __init__(self, accelerator: Accelerator, **settings: Unpack[Arguments]) -> None:
        """Attach. Collective; raises the errors of `check` and of
        `ddp_ckpt.Checkpointer`."""
        said: list[tuple[str, int]] = []
        check(accelerator, lambda text, severity: said.append((text, severity)))
        given: Arguments = {
            **settings,
            "boundary": "explicit",
            "extra": _merged(objects_of(accelerator), settings.get("extra") or {}),
        }
        optimizers = optimizers_of(accelerator)
        super().__init__(model_of(accelerator), optimizers, **given)
        self._accelerator = accelerator
        say = Handle(self).notice
        for text, severity in said:
            say(text, severity)
        every = optimizers if isinstance(optimizers, list) else [optimizers]
        self._gradients = KeptGradients(every, say)
        self._accumulating = False
        self._resumed = False

    def resume(self, *loaders: Iterable[Any], generators: Iterable[Generator] = ()) -> Any:
        """Restore the newest version, and return the loaders, as `prepare` does, each as one that
        starts at the next batch. Iterate over these, and start at their attribute `epoch`.

        Give all prepared loaders that the training takes batches from, in one call, and none of an
        evaluation. `generators`: random generators that data draw from, if they are not found; as
        in `tierckpt.ResumableLoader`. Collective. Raises the errors of `restore`, and RestoreError
        if a step had another number of samples (ranks x batch size x accumulation).
        """
        if self._resumed:
            raise TierckptError(TWICE)
        given = [*generators]
        resumed = [ResumedLoader(loader, self._accelerator, given) for loader in loaders]
        self._resumed = True
        for number, each in enumerate(resumed):
            self.register(f"loader{number}", each, per_rank=True)
        restored = self.restore()
        placed = all(each.saved_step for each in resumed)
        if restored.version and not placed and not restored.imported:  # those start fresh
            raise RestoreError(OTHER_LOADERS.format(version=restored.version))
        for each in resumed:
            each.fit(restored.version)
        return resumed[0] if len(resumed) == 1 else tuple(resumed)

    def step(self, metric: float | None = None) -> None:
        """Mark the boundary: call it once for each batch, after the optimizer's and the
        scheduler's step and `zero_grad`.

        Nothing happens while gradients accumulate, in `accelerator.accumulate` or for an optimizer
        that made no step, since gradients are in no version. `metric`: as in
        `tierckpt.Checkpointer.step`.
        """
        kept = self._accelerator.sync_gradients and self._gradients.are_kept()
        self._accumulating = kept or not self._accelerator.sync_gradients
        if not self._accumulating:
            super().step(metric)

    def should_exit(self) -> bool:
        """True if the job is to end early, and no gradients are being accumulated; as in
        `tierckpt.Checkpointer.should_exit`."""
        return not self._accumulating and super().should_exit()

    def _shut_down(self, remove: bool, abandoned: bool = False) -> None:
        self._gradients.close()
        super()._shut_down(remove, abandoned)


@with_settings
def attach(accelerator: Accelerator, **settings: Unpack[Arguments]) -> Checkpointer:
    """Add checkpoints to a loop that uses `accelerator`: call it after `accelerator.prepare`.

    Args:
        accelerator: the Accelerator, which has prepared models, optimizers and schedulers.
        settings: the keyword arguments of `ddp_ckpt.Checkpointer`, except `boundary`. Objects that
            differ between ranks go into `extra_per_rank`.

    Raises ConfigError if nothing was prepared, UnsupportedStateError if the accelerator shards the
    model (FSDP, DeepSpeed, Megatron-LM), and the errors of `ddp_ckpt.Checkpointer`. Collective.
    """
    return Checkpointer(accelerator, **settings)


def _merged(own: dict[str, Any], given: Any) -> dict[str, Any]:
    for name in given:
        if name in own:
            raise ConfigError(TAKEN.format(name=name))
    return {**own, **given}
