"""One call of `Trainer.fit` with checkpoints: attach, restore, boundaries, end."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Sequence
from typing import Any

import ddp_ckpt
from tierckpt._text import some
from tierckpt.errors import RestoreError
from tierckpt.halt.signals import Signals
from tierckpt.integrations.early_end import end_if_interrupted
from tierckpt.integrations.kept_gradients import KeptGradients
from tierckpt.integrations.notices import Notices
from tierckpt.settings import Arguments
from tierckpt.state import rng
from tierckpt.state.extras import Generator

from . import hook_states
from .loop_hooks import LoopHooks
from .package import check
from .slurm import requeue_if_announced
from .trainer_state import TrainerState, scaler_of
from .training_data import TrainingData

STATE = "lightning"
"""Name of the Trainer's state in `extra_per_rank`."""
OTHER_RANKS = (
    "v{version} is of another number of ranks: the epoch goes on with its next samples. Metrics "
    "and logged means of this epoch have its later batches only"
)
IMPORTED = (
    "v{version} was imported from {source}, and has no state of Lightning's loops. Give Lightning "
    "the file itself, fit(ckpt_path=...), and TierCheckpoint an empty path: the job goes on from "
    "the file, and takes its versions there (`tierckpt export` makes a .ckpt)"
)
LEFT_OUT = (
    "on_train_epoch_start of {names} is not called in this epoch, which had begun before the "
    "restart. If it makes more than a restart restores (the epoch's number of a data set, a list), "
    "do that in on_train_start, too: every run calls it"
)
NOT_LOADED = (
    "ckpt_path {given!r} is not loaded: the job goes on from {version}. To begin with this file, "
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
        # A further fit() of one Trainer goes on; it makes new optimizers.
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
        self._streams = rng.pack_rng(trainer.strategy.root_device)
        if trainer.ckpt_path:
            version = restored.forked_from or f"its own v{restored.version}"
            text = NOT_LOADED.format(given=trainer.ckpt_path, version=version)
            self._say(text, logging.WARNING)
        trainer._checkpoint_connector._loaded_checkpoint = {}
        self._state.load_at_start()
        self._steps = trainer.global_step
        # A sanity check would move what was restored; the job has made it already.
        trainer.num_sanity_val_steps = 0
        amid_epoch = self._state.is_amid_epoch
        if amid_epoch and (names := hook_states.owners(trainer, "on_train_epoch_start")):
            self._say(LEFT_OUT.format(names=some(names)), logging.WARNING)
        self._data.waits = amid_epoch
        self._max_steps = self._loop.epoch_loop.max_steps
        if amid_epoch and self._max_steps != -1:
            # The end of the epoch is still to come, after the last step.
            self._loop.epoch_loop.max_steps = max(self._max_steps, self._steps + 1)
        self._hooks.resume(amid_epoch, self._resume)

    def _resume(self) -> None:
        """Set the state of the boundary again, last before the next batch."""
        self._loop.epoch_loop.max_steps = self._max_steps
        self._state.load_at_resumption()
        rng.load_rng(self._streams, self._trainer.strategy.root_device)
        state, saved = self._state, self._state.loaded
        if saved is not None and saved["data"] is not None:
            if state.is_amid_epoch:
                state.check_loaders()
                self._data.set_epoch(self._loop.epoch_progress.current.processed)
                others = state.is_of_other_ranks
                self._data.resume(saved["data"], state.batches, state.factor, others)
            else:
                self._data.begin_next(saved["data"])
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
        """Let go after an exception: versions stay for a restart. Not collective."""
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
    extra: dict[str, Any] = {**(settings.get("extra") or {}), **hook_states.averages(trainer)}
    if scaler := scaler_of(trainer):
        extra["scaler"] = scaler
    given: Arguments = {
        **settings,
        "boundary": "explicit",
        "extra": extra,
        "extra_per_rank": {**(settings.get("extra_per_rank") or {}), STATE: state},
    }
    return ddp_ckpt.Checkpointer(trainer.strategy.model, trainer.optimizers, **given)


__all__ = ["Fit"]
