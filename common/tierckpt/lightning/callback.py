"""The callback for Lightning's Trainer, and one call of `Trainer.fit` with checkpoints.

A fit attaches, restores, makes boundaries, and ends.

Lightning promises to requeue a Slurm job before its allocation ends. Slurm sends a signal then
(`#SBATCH --signal=SIGUSR1@90`). Lightning's handler writes a checkpoint file and requeues the job;
but Tierckpt handles that signal, and Lightning leaves a signal that has a handler alone. So the
job is requeued here, after its last version is stored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import ddp_ckpt
from tierckpt._text import some
from tierckpt.checkpointer.checkpointer import Checkpointer
from tierckpt.core.decisions import Reason
from tierckpt.errors import RestoreError, TierckptError
from tierckpt.halt.signals import Signals
from tierckpt.integrations import KeptGradients, Notices, end_if_interrupted
from tierckpt.settings import Arguments, with_settings
from tierckpt.state import process_state
from tierckpt.state.extras import Generator

from . import trainer_state
from .package import callback_base, check, for_every_package, searches
from .trainer_state import TrainerState, scaler_of
from .training_data import LoopHooks, TrainingData

__all__ = ["Fit", "TierCheckpoint", "requeue_if_announced"]


logger = logging.getLogger("tierckpt")

FAILED = "Slurm has not requeued job %s: %s. Requeue it by hand: scontrol requeue %s"


def requeue_if_announced(trainer: Any, checkpointer: Checkpointer) -> None:
    """Requeue the job, on rank 0, if Lightning would, or if `halt_seconds_left` ended it. Called
    after the checkpointer is closed."""
    environment = trainer._accelerator_connector.cluster_environment
    if not (getattr(environment, "auto_requeue", False) and trainer.is_global_zero):
        return
    ends = checkpointer.exit_reason == Reason.ALLOCATION.text()
    if ends or (checkpointer.interrupted and _has_received(environment.requeue_signal)):
        _requeue(_job(os.environ))


def _has_received(number: signal.Signals) -> bool:
    """Whether a checkpointer received the signal; the handlers stay after its end."""
    owner = getattr(signal.getsignal(number), "__self__", None)
    return isinstance(owner, Signals) and owner.received == number


def _job(variables: Any) -> str:
    """The job's name for `scontrol`; that of one task of an array has two parts."""
    if array := variables.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{variables['SLURM_ARRAY_TASK_ID']}"
    return str(variables.get("SLURM_JOB_ID", ""))


def _requeue(job: str) -> None:
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        problem = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        logger.error(FAILED, job, problem, job)
    else:
        logger.warning("job %s ends early, and Slurm has requeued it", job)


STATE = "lightning"
"""Name of the Trainer's state in `extra_per_rank`."""
OTHER_RANKS = (
    "v{version} is of another number of ranks: the epoch continues with its next samples. Metrics "
    "and logged means of this epoch have its later batches only"
)
IMPORTED = (
    "v{version} was imported from {source}, and has no state of Lightning's loops. Give Lightning "
    "the file itself, fit(ckpt_path=...), and TierCheckpoint an empty path: the job continues from "
    "the file, and takes its versions there (`tierckpt export` makes a .ckpt)"
)
LEFT_OUT = (
    "on_train_epoch_start of {names} is not called in this epoch, which had started before the "
    "restart. If it makes more than a restart restores (the epoch's number of a data set, a list), "
    "do that in on_train_start, too: every run calls it"
)
NOT_LOADED = (
    "ckpt_path {given!r} is not loaded: the job continues from {version}. To start with this file, "
    "use another path for TierCheckpoint, and no fork_from"
)


class Fit:
    """Belongs to the callback, from `on_fit_start` to the end of the training or an exception.
    Training thread."""

    def __init__(
        self,
        trainer: Any,
        monitor: str | None,
        settings: Arguments,
        generators: Sequence[Generator],
    ) -> None:
        """Attach and restore. Collective; raises the errors of `ddp_ckpt.Checkpointer`, of its
        `restore`, and of `package.check`."""
        self._say = Notices()
        check(trainer, self._say)
        self._trainer, self._loop, self._monitor = trainer, trainer.fit_loop, monitor
        self._data = TrainingData(trainer, generators)
        self._state = TrainerState(trainer, self._data)
        self.checkpointer = _attached(trainer, self._state, settings)
        self._say.attach(self.checkpointer)
        self._handler = signal.getsignal(signal.SIGTERM)
        self._steps = trainer.global_step
        manual = not trainer.lightning_module.automatic_optimization
        self._gradients = KeptGradients(trainer.optimizers, self._say) if manual else None
        try:
            self._hooks = LoopHooks(self._loop, self._batch_ended, self.finish)
            self._restore()
        except BaseException:
            self.leave(None)
            raise

    def _restore(self) -> None:
        trainer, finished = self._trainer, self.checkpointer._finished
        # A further fit() of one Trainer continues; it makes new optimizers.
        finished.parts = trainer, trainer.lightning_module
        finished.asked, finished.trains = bool(trainer.ckpt_path), True
        restored = self.checkpointer.restore()
        if not restored.version:
            return
        if restored.imported:
            text = IMPORTED.format(version=restored.version, source=restored.imported)
            raise RestoreError(text)
        self._state.convert(restored.version)
        if self._state.is_of_other_ranks:
            self._say(OTHER_RANKS.format(version=restored.version), logging.WARNING)
        self._streams = process_state.pack_rng(trainer.strategy.root_device)
        if trainer.ckpt_path:
            version = restored.forked_from or f"its own v{restored.version}"
            text = NOT_LOADED.format(given=trainer.ckpt_path, version=version)
            self._say(text, logging.WARNING)
        trainer._checkpoint_connector._loaded_checkpoint = {}
        self._state.load_at_start()
        self._steps = trainer.global_step
        # A sanity check would move what was restored; the job has made it already.
        trainer.num_sanity_val_steps = 0
        mid_epoch = self._state.is_mid_epoch
        if mid_epoch and (names := trainer_state.owners(trainer, "on_train_epoch_start")):
            self._say(LEFT_OUT.format(names=some(names)), logging.WARNING)
        self._data.waits = mid_epoch
        self._max_steps = self._loop.epoch_loop.max_steps
        if mid_epoch and self._max_steps != -1:
            # The end of the epoch is still to come, after the last step.
            self._loop.epoch_loop.max_steps = max(self._max_steps, self._steps + 1)
        self._hooks.resume(mid_epoch, self._resume)

    def _resume(self) -> None:
        """Set the state of the boundary again, last before the next batch."""
        self._loop.epoch_loop.max_steps = self._max_steps
        self._state.load_at_resumption()
        process_state.load_rng(self._streams, self._trainer.strategy.root_device)
        state, saved = self._state, self._state.loaded
        if saved is not None and saved["data"] is not None:
            if state.is_mid_epoch:
                state.check_loaders()
                self._data.set_epoch(self._loop.epoch_progress.current.processed)
                others = state.is_of_other_ranks
                self._data.resume(saved["data"], state.batches, state.factor, others)
            else:
                self._data.start_next(saved["data"])
        self._state.loaded = None

    def take_signals(self) -> None:
        """Take SIGTERM back: Lightning's handler, which is installed after `on_fit_start`, makes a
        broadcast that other ranks may not join, and raises an exception at the next batch. And a
        checkpointer removes its own handler only."""
        ours = isinstance(getattr(self._handler, "__self__", None), Signals)
        with contextlib.suppress(ValueError):  # not on the main thread
            if ours:
                signal.signal(signal.SIGTERM, self._handler)

    def _batch_ended(self) -> None:
        trainer, epoch = self._trainer, self._loop.epoch_loop
        self._state.trained()
        if trainer.global_step == self._steps or self.checkpointer.closed:
            return
        if self._gradients is not None and self._gradients.are_kept():
            return
        self._steps = trainer.global_step
        metrics = trainer._logger_connector._callback_metrics
        self.checkpointer.step(metrics.get(self._monitor) if self._monitor else None)
        if self.checkpointer.should_exit():
            self._stop()
        elif epoch._is_training_done or trainer.should_stop:
            # Callbacks change weights in place at the end of an epoch (SWA, EMA).
            self.checkpointer.complete()

    def _stop(self) -> None:
        """End the training before any work at the end of the epoch, which would be stored."""
        self.checkpointer._close()
        self._trainer.should_stop = True
        self._loop.min_epochs, self._loop.epoch_loop.min_steps = 0, None

    def finish(self) -> None:
        """Close after the training. Collective. Raises SystemExit as `end_if_interrupted`."""
        self._detach()
        self.take_signals()
        if not self.checkpointer.closed:
            self.checkpointer._close()
        self._mend_handlers()
        requeue_if_announced(self._trainer, self.checkpointer)
        end_if_interrupted(self.checkpointer)

    def leave(self, error: BaseException | None) -> None:
        """Detach after an exception: versions stay for a restart. Not collective."""
        self._detach()
        self.take_signals()
        if error is None:
            self.checkpointer.abandon()
        else:
            self.checkpointer.__exit__(type(error), error, None)
        self._mend_handlers()

    def _detach(self) -> None:
        self._data.close()
        if self._gradients is not None:
            self._gradients.close()
        if hasattr(self, "_hooks"):
            self._hooks.close()

    def _mend_handlers(self) -> None:
        """Lightning puts the handlers of `on_fit_start` back at its end: not that of a closed
        checkpointer."""
        handlers = self._trainer._signal_connector._original_handlers
        for number, handler in handlers.items():
            owner = getattr(handler, "__self__", None)
            if isinstance(owner, Signals) and owner.received is None:
                handlers[number] = signal.getsignal(number)


def _attached(trainer: Any, state: TrainerState, settings: Arguments) -> ddp_ckpt.Checkpointer:
    extra: dict[str, Any] = {**(settings.get("extra") or {}), **trainer_state.averages(trainer)}
    if scaler := scaler_of(trainer):
        extra["scaler"] = scaler
    given: Arguments = {
        **settings,
        "boundary": "explicit",
        "extra": extra,
        "extra_per_rank": {**(settings.get("extra_per_rank") or {}), STATE: state},
    }
    return ddp_ckpt.Checkpointer(trainer.strategy.model, trainer.optimizers, **given)


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = callback_base()


NO_FIT = (
    "checkpointer of a TierCheckpoint in a process in which fit() has not started. With the "
    "strategies ddp_spawn and ddp_fork only the processes that Lightning starts have one"
)

NONE = (
    "no checkpoints are taken: this is a fast_dev_run, a Tuner's search, or a copy of a Trainer "
    "that was made during a fit"
)


@with_settings
class TierCheckpoint(Callback):  # type: ignore[misc]
    """Takes checkpoints of a fit after each optimizer step, and restores the newest one when a fit
    starts, bit for bit, also in the middle of an epoch.

    Works with the strategies of a single device and of DDP. It saves the Trainer's loops, loaders,
    logged values and metrics, schedulers, precision, callbacks, datamodule, and what
    `on_save_checkpoint` adds. ModelCheckpoint works beside it.

    Args:
        monitor: name of a logged metric, for `best` in `local_keep` and `persistent_keep`; as in
            ModelCheckpoint.
        generators: random generators that the training data draw from, if they are not found; as in
            `tierckpt.ResumableLoader`.
        settings: the keyword arguments of `ddp_ckpt.Checkpointer`, except `boundary`.

    Errors of the settings, of an unsupported strategy, and of a restore are raised when
    the fit starts.
    """

    def __new__(cls, *_: Any, **__: Any) -> TierCheckpoint:
        """Make a callback for the Lightning that the script has imported."""
        made: TierCheckpoint = super().__new__(for_every_package(cls))
        return made

    def __init__(
        self,
        *,
        monitor: str | None = None,
        generators: Iterable[Generator] = (),
        **settings: Unpack[Arguments],
    ) -> None:
        super().__init__()
        self._monitor, self._settings, self._generators = monitor, settings, [*generators]
        self._is_automatic = self._is_copy = False
        self._fit: Fit | None = None

    @classmethod
    def automatic(cls) -> TierCheckpoint:
        """A callback with the settings of the environment, for Lightning's entry points. It does
        nothing in a Trainer that has another one."""
        made = cls()
        made._is_automatic = True
        return made

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer of the current fit. Raises TierckptError before the first one starts."""
        if self._fit is None:
            raise TierckptError(NO_FIT)
        return self._fit.checkpointer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Move to the front: other callbacks find their restored state in `on_fit_start`."""
        others = [each for each in trainer.callbacks if each is not self]
        if stage == "fit":
            trainer.callbacks = [self, *others]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, and restore. Collective."""
        ours = [each for each in trainer.callbacks if isinstance(each, TierCheckpoint)]
        given = [each for each in ours if not each._is_automatic]
        # Lightning calls an entry point once for each copy of the package's metadata that it finds.
        if self._is_automatic and self is not (given or ours)[0]:
            return
        self._fit = None
        if trainer.fast_dev_run or searches(trainer) or self._is_copy:
            logger.info(NONE)
            return
        self._fit = Fit(trainer, self._monitor, self._settings, self._generators)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take signals back from Lightning."""
        if self._fit is not None:
            self._fit.take_signals()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach: the restart finds all versions."""
        if self._fit is not None and not self._fit.checkpointer.closed:
            self._fit.leave(exception)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the fit out, for launchers that pickle the Trainer, and for copies: one made during
        a fit takes no checkpoints, which would be the fit's own."""
        is_fitting = self._fit is not None and not self._fit.checkpointer.closed
        return {**vars(self), "_fit": None, "_is_copy": self._is_copy or is_fitting}
