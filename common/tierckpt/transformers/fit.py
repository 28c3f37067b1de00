"""One call of `Trainer.train` with checkpoints: attach, restore, boundaries, end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, cast

import ddp_ckpt
from tierckpt.errors import RestoreError
from tierckpt.integrations.notices import Notices
from tierckpt.settings import Arguments
from tierckpt.state.extras import Generator

from .framework import MARK, check, skipping
from .training_data import TrainingData
from .training_state import SIZES, TrainingState

STATE, DATA = "transformers", "transformers data"
"""Names of the Trainer's state and place in `extra_per_rank`."""
IMPORTED = (
    "v{version} was imported from {source}, and has no state of a Trainer. Give train() the folder "
    "itself, resume_from_checkpoint=..., and TierTrainer an empty path: the job goes on from the "
    "folder, and takes its versions there (`tierckpt export --format transformers` makes a folder)"
)
NOT_LOADED = (
    "resume_from_checkpoint is not used: the job goes on from {version}. To begin with that "
    "checkpoint, use another path for TierTrainer, and no fork_from"
)


class TrainerArguments(Arguments, total=False):
    """The argument `tierckpt` of a Trainer."""

    generators: Iterable[Generator]


class Fit:
    """Belongs to the Trainer, from the start of `train()` to the next. Training thread."""

    def __init__(self, trainer: Any, first_epoch: int, asks: bool) -> None:
        """`first_epoch`: where the Trainer would start. `asks`: it is to resume. Raises the errors
        of `framework.check`."""
        self._say = Notices()
        check(trainer, self._say)
        self._trainer, self._asks = trainer, asks
        self._version = 0
        """The restored version."""
        self.first_epoch = first_epoch
        self.resumes = False
        """True from a restore to the first resumed epoch."""
        self.interrupted = False
        """The training ends early, and its last version is taken."""
        self._metric: float | None = None

    def begin(self, model: Any, loader: Any, settings: TrainerArguments) -> TrainingData:
        """Attach and restore; returns the loader for the Trainer's loop. Collective; raises the
        errors of `ddp_ckpt.Checkpointer` and of its `restore`."""
        trainer = self._trainer
        generators = settings.get("generators", ())
        self._data = TrainingData(loader, trainer.eval_dataset, generators)
        self._state = TrainingState(trainer, loader)
        self._steps = trainer.state.global_step
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self._swaps_weights = callable(getattr(optimizer, "train", None))
        self.checkpointer = ddp_ckpt.Checkpointer(model, optimizer, **self._arguments(settings))
        self._say.attach(self.checkpointer)
        self._restore()
        return self._data

    def _arguments(self, given: TrainerArguments) -> Arguments:
        trainer = self._trainer
        settings = cast(Arguments, {k: value for k, value in given.items() if k != "generators"})
        extra: dict[str, Any] = {**(settings.get("extra") or {})}
        extra["scheduler"] = trainer.lr_scheduler
        if scaler := getattr(trainer.accelerator, "scaler", None):
            extra["scaler"] = scaler
        own = {STATE: self._state, DATA: self._data.resumable}
        per_rank = {**(settings.get("extra_per_rank") or {}), **own}
        return {**settings, "boundary": "explicit", "extra": extra, "extra_per_rank": per_rank}

    def _restore(self) -> None:
        finished = self.checkpointer._finished
        finished.parts = (self,)  # a further train() of a Trainer begins again
        finished.asked, finished.trains = self._asks, True
        restored = self.checkpointer.restore()
        self._version = version = restored.version
        if not version:
            return
        trainer = self._trainer
        if restored.imported:
            raise RestoreError(IMPORTED.format(version=version, source=restored.imported))
        now, saved = self._state.step_size, self._state.saved_step_size
        now.require(saved, version, SIZES)
        self._data.resumable.convert(now.batches_for_one_of(saved))
        self._state.load()
        self.resumes = True
        self._steps = trainer.state.global_step
        self.first_epoch = self._data.resumable.epoch
        if self._state.stops and self._state.epoch_is_over:
            self.first_epoch = trainer.state.num_train_epochs

    def run_epoch(self, run: Callable[..., None], arguments: dict[str, Any]) -> None:
        """Run one epoch of the Trainer's, or the rest of the restored one."""
        trainer, data = self._trainer, self._data
        batches, amid = data.batches, self.resumes and data.batches > 0
        if self._version:
            if self.resumes and arguments["resume_from_checkpoint"] is not None:
                forked_from = self.checkpointer.restored.forked_from
                version = forked_from or f"its own v{self._version}"
                self._say(NOT_LOADED.format(version=version), logging.WARNING)
            arguments["resume_from_checkpoint"] = MARK if amid else None
        self._load_late()
        self._state.epoch_is_over = False
        if amid:
            arguments["epochs_trained"] = arguments["epoch"]
            arguments["steps_trained_in_current_epoch"] = batches
            if data.is_over:
                self._state.load_flags()
        ignores = trainer.args.ignore_data_skip
        trainer.args.ignore_data_skip = ignores and not amid
        try:
            with skipping(self._skipped):
                run(**arguments)
        finally:
            trainer.args.ignore_data_skip = ignores
        self._state.epoch_is_over = True

    def _skipped(self, data: TrainingData, batches: int) -> TrainingData:
        if not self._version:
            data.skip(batches)
        return data

    def _load_late(self) -> None:
        """Set the state of the boundary again, last before the first batch."""
        if self.resumes:
            self._state.load_late()
            self._data.is_over = self._state.stops or self._state.stops_epoch
        self.resumes = False

    def step_facts(self, grad_norm: Any, learning_rate: Any) -> tuple[Any, Any]:
        """What a step logs. The end of an epoch logs it again, also if another run made the
        step."""
        if self._trainer.state.global_step != self._steps:
            self._state.grad_norm, self._state.learning_rate = grad_norm, learning_rate
        return self._state.grad_norm, self._state.learning_rate

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Keep the metric by which the Trainer chooses its best model, for `keep_best`."""
        name = self._trainer.args.metric_for_best_model
        if name:
            name = name if name.startswith("eval_") else f"eval_{name}"
            self._metric = metrics.get(name)

    def step_ended(self) -> None:
        """Pass the boundary if a step was made since the last one. Collective."""
        trainer = self._trainer
        metric, self._metric = self._metric, None
        if trainer.state.global_step == self._steps or self.checkpointer.closed:
            return
        self._steps = trainer.state.global_step
        self.checkpointer.step(metric)
        control = trainer.control
        if self.checkpointer.should_exit():
            # Before any work at the end of the epoch, which would be stored.
            self.checkpointer._close()
            self.interrupted = control.should_training_stop = True
            return
        ends = self._data.resumable.at_end or control.should_training_stop
        if ends or control.should_epoch_stop or self._swaps_weights:
            # Callbacks, and schedule-free optimizers, change weights in place between steps.
            self.checkpointer.complete()

    def finish(self) -> None:
        """Close after the training. Collective."""
        self._load_late()
        if not self.checkpointer.closed:
            self.checkpointer._close()

    def leave(self, error: BaseException) -> None:
        """Let go after an exception: versions stay for a restart. Not collective."""
        if hasattr(self, "checkpointer") and not self.checkpointer.closed:
            self.checkpointer.__exit__(type(error), error, None)


__all__ = ["Fit", "TrainerArguments"]
