"""The state of a Trainer that is neither model, optimizer, scheduler nor place in the data."""

from __future__ import annotations

import json
from typing import Any

import torch

from tierckpt.integrations.other_ranks import StepSize, order_batch_of
from tierckpt.interchange.log_history import entries_of, lines_of, plain
from tierckpt.proof import WALL_CLOCK

PROGRESS = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""Fields of the TrainerState. The others are the script's arguments."""
INTERVALS = ("logging_steps", "eval_steps", "save_steps", "num_train_epochs")
"""Fields that are not restored: `tierckpt export` needs them, as a Trainer takes them from a folder
that it resumes from."""
COUNTS = (
    *("_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen"),
    *("_total_loss_scalar", "current_flos"),
)
"""Attributes of the Trainer, most of which it makes when the training starts."""
FLAGS = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)
"""Attributes of the TrainerControl."""
SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Arguments that decide, with the number of ranks, which samples belong to a step."""


class TrainingState:
    """One of the `extra_per_rank` objects: the running loss differs between ranks. Training
    thread."""

    is_place = True
    """See `state.extras.is_place`."""

    def __init__(self, trainer: Any, loader: Any) -> None:
        self._trainer, self._order = trainer, order_batch_of(loader)
        self.loaded: dict[str, Any] | None = None
        """The restored state; None if nothing was restored."""
        self.epoch_is_over = False
        """The work at the end of the current epoch is done."""
        self.grad_norm: Any = None
        self.learning_rate: Any = None
        """What the newest step logs; also logged at the end of its epoch."""
        self._history, self._times, self._known = "", "", 0
        self._last: list[Any] = []
        """The log history as text (see `log_history`), its length, and its last entry."""

    def state_dict(self) -> dict[str, Any]:
        """The state as text and tensors: a version packs values one by one."""
        trainer, norm = self._trainer, self.grad_norm
        loss = getattr(trainer, "_tr_loss", torch.tensor(0.0))
        numbers = {
            "state": {name: getattr(trainer.state, name) for name in PROGRESS},
            "counts": {name: getattr(trainer, name, 0) for name in COUNTS},
            "flags": {name: getattr(trainer.control, name) for name in FLAGS},
            "step": self.step_size.as_dict(),
            "max_steps": trainer.state.max_steps,
            "intervals": {name: getattr(trainer.state, name) for name in INTERVALS},
            "callbacks": [[type(each).__name__, each.state()] for each in _exportable(trainer)],
            "epoch_is_over": self.epoch_is_over,
            "learning_rate": self.learning_rate,
            "grad_norm": None if isinstance(norm, torch.Tensor) else norm,
        }
        return {
            "numbers": json.dumps(numbers, default=plain),
            **self._text_of_history(),
            "loss": loss.detach().clone(),
            "grad_norm": norm.detach().clone() if isinstance(norm, torch.Tensor) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for `load` and `load_late`."""
        self.loaded = {**state, **json.loads(state["numbers"]), "norm": state["grad_norm"]}

    def load_of_other_ranks(self, state: dict[str, Any], ranks: int) -> None:
        """Keep the state of one of `ranks` ranks. The running loss since the last log differs
        between ranks: it goes into the mean of the whole training alone, and the next log has the
        mean of later steps."""
        self.load_state_dict(state)
        assert self.loaded is not None
        counts = self.loaded["counts"]
        counts["_total_loss_scalar"] += self.loaded["loss"].item()
        counts["_globalstep_last_logged"] = self.loaded["state"]["global_step"]
        self.loaded["loss"] = torch.tensor(0.0)

    def load(self) -> None:
        """Set the TrainerState and the callbacks, before `on_train_begin`."""
        assert self.loaded is not None
        trainer = self._trainer
        vars(trainer.state).update(self.loaded["state"])
        trainer.state.log_history = entries_of(self.loaded["history"], self.loaded[WALL_CLOCK])
        self.epoch_is_over = self.loaded["epoch_is_over"]
        saved = list(self.loaded["callbacks"])
        for callback in _exportable(trainer):
            found = next((each for each in saved if each[0] == type(callback).__name__), None)
            if found is not None:
                saved.remove(found)
                vars(callback).update(found[1]["attributes"])

    def load_late(self) -> None:
        """Set the rest, which `train()` resets: before the first batch."""
        assert self.loaded is not None
        trainer, loss, norm = self._trainer, self.loaded["loss"], self.loaded["norm"]
        vars(trainer).update(self.loaded["counts"])
        trainer._tr_loss = loss.to(trainer.args.device)
        self.learning_rate = self.loaded["learning_rate"]
        self.grad_norm = self.loaded["grad_norm"] if norm is None else norm.to(trainer.args.device)

    def load_flags(self) -> None:
        """Set the TrainerControl to its state at the boundary."""
        assert self.loaded is not None
        vars(self._trainer.control).update(self.loaded["flags"])

    @property
    def stops(self) -> bool:
        """Whether the restored training ends without a further step: it has made all steps, or a
        callback has ended it."""
        assert self.loaded is not None
        steps = self.loaded["state"]["global_step"]
        ended = self.loaded["flags"]["should_training_stop"]
        return bool(
            steps >= self._trainer.state.max_steps or (ended and steps < self.loaded["max_steps"])
        )

    @property
    def stops_epoch(self) -> bool:
        """Whether a callback has ended the restored epoch."""
        assert self.loaded is not None
        return bool(self.loaded["flags"]["should_epoch_stop"])

    @property
    def step_size(self) -> StepSize:
        """The samples of one step in this job."""
        args, ranks = self._trainer.args, self._trainer.args.world_size
        batch, accumulation = (getattr(args, name) for name in SIZES)
        if self._trainer.accelerator.split_batches:
            batch //= ranks
        return StepSize(ranks, batch, accumulation, self._order)

    @property
    def saved_step_size(self) -> StepSize:
        """The samples of one step in the restored job."""
        assert self.loaded is not None
        return StepSize(**self.loaded["step"])

    def _text_of_history(self) -> dict[str, str]:
        """The log history and its times. Only new entries are converted: a long training has
        thousands."""
        history = self._trainer.state.log_history
        known = self._known if history[: self._known][-1:] == self._last else 0
        new, times = lines_of(history[known:])
        self._history = self._history + new if known else new
        self._times = self._times + times if known else times
        self._known, self._last = len(history), history[-1:]
        return {"history": self._history, WALL_CLOCK: self._times}


def _exportable(trainer: Any) -> list[Any]:
    """The callbacks that have a state by the Trainer's protocol (`ExportableState`)."""
    return [
        each
        for each in trainer.callback_handler.callbacks
        if callable(getattr(each, "state", None))
    ]


__all__ = ["TrainingState"]
