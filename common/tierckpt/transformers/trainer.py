"""The mixin for subclasses of Hugging Face's Trainer, and a Trainer that has it."""

from __future__ import annotations

import logging
import operator
from typing import Any

import transformers

from tierckpt.checkpointer.checkpointer import Checkpointer
from tierckpt.errors import TierckptError
from tierckpt.integrations.early_end import end_if_interrupted

from .fit import Fit, TrainerArguments
from .framework import MARK

logger = logging.getLogger("tierckpt")


class TierTrainerMixin:
    """Takes checkpoints of `train()` after each optimizer step, and restores the newest one when it
    starts, bit for bit, also in the middle of an epoch.

    Goes before the Trainer: `class MyTrainer(TierTrainerMixin, Trainer)`. A version is taken after
    the step's logging, evaluation and saving. It has model, optimizer, scheduler, scaler, the
    TrainerState with its log history, the running loss, the states of callbacks, the place in the
    data and the random generators. The Trainer's own checkpoints work beside it.

    Args:
        tierckpt: the keyword arguments of `ddp_ckpt.Checkpointer`, except `boundary`, and
            `generators` as in `tierckpt.ResumableLoader`. Default: the settings of the environment
            (`TIERCKPT_PATH`).
        args, kwargs: the arguments of the Trainer.

    `train()` raises, before the first step, the errors of the settings, of a job that is not
    supported, and of a restore.
    """

    def __init__(self, *args: Any, tierckpt: TrainerArguments | None = None, **kwargs: Any) -> None:
        self._tier_settings: TrainerArguments = {**(tierckpt or {})}
        self._tier_fit: Fit | None = None
        super().__init__(*args, **kwargs)

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer of the current `train()`. Raises TierckptError before it has started."""
        if self._tier_fit is None:
            raise TierckptError("checkpointer of a TierTrainer before train() has started")
        return self._tier_fit.checkpointer

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._tier_fit = None
        self._tier_asks = kwargs.get("resume_from_checkpoint") is not None
        try:
            result = super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self._leave_fit(error)
            raise
        self._end_if_interrupted()
        return result

    def _end_if_interrupted(self) -> None:
        if self._tier_fit is not None:
            end_if_interrupted(self._tier_fit.checkpointer)

    def _leave_fit(self, error: BaseException) -> None:
        if self._tier_fit is not None:
            self._tier_fit.leave(error)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        epochs, batches = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        if self.state.is_hyper_param_search:  # type: ignore[attr-defined]
            logger.info("no checkpoints are taken: this is a trial of a hyperparameter search")
            return epochs, batches
        self._tier_fit = Fit(self, epochs, self._tier_asks)
        return _FirstEpoch(self._tier_fit), batches

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model, loader = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        if self._tier_fit is not None:
            loader = self._tier_fit.begin(model, loader, self._tier_settings)
        return model, loader

    def _run_epoch(self, **arguments: Any) -> None:
        run = super()._run_epoch  # type: ignore[misc]
        if self._tier_fit is None:
            run(**arguments)
        else:
            arguments["epochs_trained"] = operator.index(arguments["epochs_trained"])
            self._tier_fit.run_epoch(run, arguments)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *args: Any, learning_rate: Any = None
    ) -> None:
        fit = self._tier_fit
        if fit is not None:
            if fit.interrupted:
                return
            grad_norm, learning_rate = fit.step_facts(grad_norm, learning_rate)
        super()._maybe_log_save_evaluate(  # type: ignore[misc]
            tr_loss, grad_norm, *args, learning_rate=learning_rate
        )
        if fit is not None:
            fit.step_ended()

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        fit = self._tier_fit
        if fit is not None and fit.resumes:
            return {}  # eval_on_start: the job has made it already
        metrics = super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        if fit is not None:
            fit.evaluated(metrics)
        return metrics

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != MARK:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._tier_fit is not None:
            self._tier_fit.finish()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]


class _FirstEpoch:
    """The number of the first epoch, which is known after the restore: the Trainer asks for it
    before it makes the optimizer."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    def __index__(self) -> int:
        return self._fit.first_epoch

    def __repr__(self) -> str:
        return str(self._fit.first_epoch)


class TierTrainer(TierTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer with checkpoints; see `TierTrainerMixin`."""


__all__ = ["TierTrainer", "TierTrainerMixin"]
