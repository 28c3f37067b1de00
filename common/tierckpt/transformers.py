"""Checkpoints for jobs of Hugging Face's Trainer.

::

    from tierckpt.transformers import TierTrainer

    TierTrainer(model, args, train_dataset=data, tierckpt={"path": "ckpts"}).train()

A restart resumes at the next optimizer step, in the middle of an epoch, bit for bit. A trainer of
your own gets the same: `class MyTrainer(TierTrainerMixin, Seq2SeqTrainer)`.

`Fit` is one call of `Trainer.train` with checkpoints: attach, restore, boundaries, end. The place
in the data is a recipe (`ResumableLoader`): the random states at the start of the epoch, and the
number of batches. A resumed epoch starts from these states and skips the batches. Accelerate's
loader fetches one batch ahead, in the same call that yields the one before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import transformers
import transformers.trainer
from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import IterableDataset

import ddp_ckpt
from tierckpt import _version
from tierckpt.checkpointer.checkpointer import Checkpointer
from tierckpt.errors import RestoreError, TierckptError, UnsupportedStateError
from tierckpt.integrations import (
    Framework,
    Notices,
    Pass,
    Passes,
    PlaceOfAnyRanks,
    Say,
    StepSize,
    end_if_interrupted,
    order_batch_of,
)
from tierckpt.interchange.log_history import entries_of, lines_of, plain
from tierckpt.proof import WALL_CLOCK
from tierckpt.resumable_loader import samplers_of
from tierckpt.settings import Arguments
from tierckpt.state.extras import Generator
from tierckpt.state.witness import Ways

__all__ = ["TierTrainer", "TierTrainerMixin"]


TRANSFORMERS = Framework(*_version.TRANSFORMERS)
PRIVATE = (
    *("_evaluate", "_finalize_training", "_init_training_state", "_inner_training_loop"),
    *("_load_rng_state", "_maybe_log_save_evaluate", "_prepare_for_training", "_run_epoch"),
    *("callback_handler.callbacks", "control", "current_flos", "state.log_history"),
)
"""The private attributes of a Trainer that this package uses."""
MARK = "the version of Tierckpt"
"""Passed to the Trainer as `resume_from_checkpoint` in a resumed epoch."""
SHARDS = (
    "{name}: Tierckpt stores states that are the same on all ranks. Train with plain DDP (launch "
    "with torchrun, without {name}), or use the Trainer without TierTrainerMixin"
)
ONE_PROCESS = (
    "several GPUs in one process (DataParallel) are not supported: launch one process for each "
    "GPU, with torchrun --nproc-per-node {count}"
)
BATCH_SIZE = (
    "auto_find_batch_size=True: each restart would start with the first batch size. Set "
    "per_device_train_batch_size to the size that it found, and auto_find_batch_size=False"
)
SIGNAL = (
    "enable_jit_checkpoint=True: Tierckpt handles SIGTERM, and stores the job's last version then. "
    "Set enable_jit_checkpoint=False"
)
STREAM = (
    "the training data set, a {kind}, is iterable: it has no place from which a restart could go "
    "on. Use a data set with indices (__getitem__ and __len__); datasets.load_dataset without "
    "streaming=True makes one"
)


def check(trainer: Any, say: Say) -> None:
    """Warn of an untested version. Raises ConfigError for one without the private names, and
    UnsupportedStateError for a job that cannot be resumed exactly."""
    TRANSFORMERS.require(transformers.__version__, trainer, PRIVATE)
    TRANSFORMERS.require(transformers.__version__, transformers.trainer, ["skip_first_batches"])
    TRANSFORMERS.warn_if_unknown(transformers.__version__, say)
    for refusal in _refusals(trainer):
        raise UnsupportedStateError(refusal)


def _refusals(trainer: Any) -> Iterator[str]:
    args, data = trainer.args, trainer.train_dataset
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    shards = {
        "FSDP": trainer.is_fsdp_enabled or args.fsdp,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "a model that from_pretrained has sharded": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        "a ParallelismConfig": parallel is not None,
    }
    for name, is_used in shards.items():
        if is_used:
            yield SHARDS.format(name=name)
    if args.n_gpu > 1:
        yield ONE_PROCESS.format(count=args.n_gpu)
    if args.auto_find_batch_size:
        yield BATCH_SIZE
    if getattr(args, "enable_jit_checkpoint", False):
        yield SIGNAL
    if isinstance(data, IterableDataset):
        yield STREAM.format(kind=type(data).__name__)


@contextlib.contextmanager
def skipping(skipped: Callable[[Any, int], Any]) -> Iterator[None]:
    """Let `skipped` replace the next call of Accelerate's function by which a Trainer makes a
    loader for the rest of an epoch."""
    module = transformers.trainer
    original = module.skip_first_batches

    def once(loader: Any, num_batches: int = 0) -> Any:
        module.skip_first_batches = original
        return skipped(loader, num_batches)

    module.skip_first_batches = once
    try:
        yield
    finally:
        module.skip_first_batches = original


WAYS = Ways(
    give="tierckpt={'generators': [...]}",
    set_epoch="call it in on_epoch_begin of a callback, with state.epoch",
    count="set its count from state.epoch in on_epoch_begin of a callback",
    start="start a new job at another path",
)


class TrainingData:
    """Takes the loader's place in the Trainer's loop. Training thread."""

    def __init__(self, loader: Any, evaluated: Any, generators: Iterable[Generator]) -> None:
        """`evaluated`: the data sets of evaluations."""
        self.loader = loader
        self.resumable = PlaceOfAnyRanks[Any](
            Passes(loader, _Pass, evaluated), of=[loader], generators=generators
        )
        """The place; an object for `extra_per_rank`."""
        self.resumable.ways = WAYS
        self._skip = 0
        self.is_over = False
        """True: the next pass has no batches."""

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    @property
    def batches(self) -> int:
        """Batches of the current epoch that were trained on."""
        place = self.resumable.state_dict()["place"]
        return int(place["batches"]) if place["begun"] else 0

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch, or continue it if it is the current one."""
        self.resumable.set_epoch(epoch)
        for owner in (self.loader, *samplers_of(self.loader)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)

    def skip(self, batches: int) -> None:
        """Load and drop so many batches at the start of the next pass, for a start from a
        checkpoint of the Trainer's."""
        self._skip = batches

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        batches = iter(self.resumable)
        if self.is_over:
            self.is_over = False
            return iter(())
        next(itertools.islice(batches, skip, skip), None)
        return batches


class _Pass(Pass):
    def skip(self, count: int) -> int:
        """Skip batches by drawing only their indices; returns how many, 0 where that would not be
        exact: worker processes draw random numbers of their own."""
        if type(self._loader) is not DataLoaderShard or self._loader.num_workers or count < 2:
            return 0
        # The last one is requested, as it loads the one after it, too.
        self._batches = iter(skip_first_batches(self._loader, count - 1))
        next(self._batches)
        return count


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


STATE, DATA = "transformers", "transformers data"
"""Names of the Trainer's state and place in `extra_per_rank`."""
IMPORTED = (
    "v{version} was imported from {source}, and has no state of a Trainer. Give train() the folder "
    "itself, resume_from_checkpoint=..., and TierTrainer an empty path: the job continues from the "
    "folder, and takes its versions there (`tierckpt export --format transformers` makes a folder)"
)
NOT_LOADED = (
    "resume_from_checkpoint is not used: the job continues from {version}. To start with that "
    "checkpoint, use another path for TierTrainer, and no fork_from"
)


class TrainerArguments(Arguments, total=False):
    """The argument `tierckpt` of a Trainer."""

    generators: Iterable[Generator]


class Fit:
    """Belongs to the Trainer, from the start of `train()` to the next. Training thread."""

    def __init__(self, trainer: Any, first_epoch: int, asks: bool) -> None:
        """`first_epoch`: where the Trainer would start. `asks`: it is to resume. Raises the errors
        of `check`."""
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

    def start(self, model: Any, loader: Any, settings: TrainerArguments) -> TrainingData:
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
        finished.parts = (self,)  # a further train() of a Trainer starts again
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
        batches, within_epoch = data.batches, self.resumes and data.batches > 0
        if self._version:
            if self.resumes and arguments["resume_from_checkpoint"] is not None:
                forked_from = self.checkpointer.restored.forked_from
                version = forked_from or f"its own v{self._version}"
                self._say(NOT_LOADED.format(version=version), logging.WARNING)
            arguments["resume_from_checkpoint"] = MARK if within_epoch else None
        self._load_late()
        self._state.epoch_is_over = False
        if within_epoch:
            arguments["epochs_trained"] = arguments["epoch"]
            arguments["steps_trained_in_current_epoch"] = batches
            if data.is_over:
                self._state.load_flags()
        ignores = trainer.args.ignore_data_skip
        trainer.args.ignore_data_skip = ignores and not within_epoch
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
        """Keep the metric by which the Trainer chooses its best model, for `best`
        in `local_keep`."""
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
        """Detach after an exception: versions stay for a restart. Not collective."""
        if hasattr(self, "checkpointer") and not self.checkpointer.closed:
            self.checkpointer.__exit__(type(error), error, None)


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

    `train()` raises, before the first step, the errors of the settings, of an unsupported job, and
    of a restore.
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
            loader = self._tier_fit.start(model, loader, self._tier_settings)
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
