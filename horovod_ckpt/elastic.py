"""Elastic Horovod: a state object with commits through our levels.

::

    import horovod.torch as hvd
    import horovod_ckpt.elastic

    state = horovod_ckpt.elastic.TorchState(model, optimizer, batch=0, tierckpt={"path": "ckpts"})

    @hvd.elastic.run
    def train(state):
        while state.batch < batches:
            ...
            state.batch += 1
            state.commit()

Horovod's own state makes a full copy of model and optimizer in every process while training waits,
and loses it with the process. Ours copies during the next gradient reductions, each rank its
share, and the versions survive the loss of all processes.

Values are committed as they are: with `for state.batch in range(state.batch, batches)` a restart
would repeat the last batch.

The adapter takes a version at every commit, even without a step.

There may be any number of modules and optimizers, with any names. Other objects with a
`state_dict` (a schedule, Horovod's sampler) are saved by it, and a `ResumableSampler` by its
position; all else is a plain value. This module keeps only the names, and the objects are
attributes of the state: if a script replaces one, the new object counts from the next `sync()` on.

Survivors: the live states of the remaining ranks after others were lost.

An elastic job's processes outlive its checkpointers. Between two checkpointers each rank remembers
the facts of its live state; then the ranks compare them, and continue from the best one if no
level has a version. Pure.
"""

from __future__ import annotations

import atexit
import enum
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.elastic import State
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.elastic import ElasticSampler, run

from horovod_ckpt.adapter import HorovodAdapter, is_horovod, is_plain
from tierckpt import Callbacks, Checkpointer, ConfigError, Restored, RestoreError, ResumableSampler
from tierckpt.callbacks import check_callbacks
from tierckpt.checkpointer.adapter import Handle
from tierckpt.checkpointer.checkpointer import close_at_exit
from tierckpt.events import check_receiver
from tierckpt.format.ids import Lineage
from tierckpt.hooks.iterations import STEPS_UNTIL_CALL
from tierckpt.settings import Arguments
from tierckpt.state.extras import EXTRA_STATES, PLAIN_VALUES, PlainValues
from tierckpt.state.module_states import MODULE_STATES
from tierckpt.state.training_state import TrainingState, label_optimizers

from .broadcast import send_loose_parameters, send_model, send_optimizer_state, send_remainders

__all__ = ["ElasticSampler", "TorchState", "run"]


NO_NEWS = 1
RARE_SECONDS = 1.0
"""If commits are further apart than this, each asks for new hosts at once: a broadcast costs little
compared with the interval, and the next commit would be too late."""
NO_COMMITS = (
    f"the optimizer made {STEPS_UNTIL_CALL} steps, and commit() of the state was not called: no "
    "checkpoint is taken until it is. Call state.commit() after optimizer.step(). If your loop "
    f"commits only every N iterations, and N is more than {STEPS_UNTIL_CALL}, ignore this"
)
OVERWRITTEN = (
    "a commit was lost, because weights were changed after commit() and before an optimizer's step "
    "(another event names them). Commits copy weights during the next iteration; Horovod's own "
    "state copies them inside commit(). From now on this rank's commits also copy inside commit(), "
    "and training waits for that. A write through .data is not noticed: if your loop makes one "
    "after commit(), call state.checkpointer.complete() before it"
)


class ElasticAdapter(HorovodAdapter):
    """The adapter of a checkpointer over the current ranks of an elastic job."""

    is_elastic = True
    repeats_steps = False
    extra_syntax = "TorchState(..., {name}={it})"
    no_calls_notice = NO_COMMITS

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, is_quiet: Callable[[], bool]
    ) -> None:
        """`is_quiet()`: True if this rank was not notified of a host that joins or leaves."""
        super().__init__(model, optimizer)
        self._is_quiet = is_quiet
        self.agreed_vote = 0
        """NO_NEWS if all ranks voted so at the previous boundary."""
        self.passed_over = False
        """The last commit was no boundary."""
        self._voted_seconds = float("-inf")
        self._copies_at_once = False
        """True if the loop changes weights after commits: each commit returns after the copy."""

    def vote(self) -> int:
        """NO_NEWS, or 0 if commits are rare or a host joins or leaves."""
        now, before = time.monotonic(), self._voted_seconds
        self._voted_seconds = now
        return NO_NEWS if self._is_quiet() and now - before < RARE_SECONDS else 0

    def boundary_passed(self, agreed_vote: int) -> None:
        """Keep the smallest vote of all ranks."""
        self.agreed_vote = agreed_vote

    @property
    def half_way(self) -> bool:
        """True in the middle of an iteration: reductions were launched, and no step used them."""
        return any(each._handles for each in self.handle.state.given.values())  # type: ignore[attr-defined]

    def compare_replicas(self) -> None:
        """Compare the complete state before the group of ranks changes: a later group could not
        find out which ranks differ and since when. Collective. Raises ReplicaError, on all ranks,
        with `replicas="stop"`."""
        self.handle.compare_replicas(not (self.half_way or self.handle.state.torn))

    def commit(self, step: Callable[[], None]) -> None:
        """Take a version by `step` (`Checkpointer.step`), also without an optimizer's step since
        the last one: values may have changed. Not between the backward passes of a step.
        Collective with several backward passes per step."""
        self.passed_over = self._between_passes()
        if self.passed_over:
            self.handle.count_call()
            self._count_misplaced()
            return
        handle = self.handle
        if not handle.steps_since_boundary and not self.half_way:
            handle.count_step()
        step()
        if handle.overwritten and not self._copies_at_once:
            self._copies_at_once = True
            handle.notice(OVERWRITTEN, logging.ERROR)
        # So a restore finds a version, even if the loop changes the weights after the commit.
        if self._copies_at_once or not handle.has_version:
            handle.complete()


class Condition(enum.IntEnum):
    """The condition of a rank's live state."""

    UNSOUND = 0
    """Partly loaded, or rejected by the script."""
    INEXACT = 1
    """An iteration was interrupted: its forward pass has changed generators and buffers."""
    EXACT = 2


@dataclass(frozen=True, order=True)
class Survivors:
    """The facts of a live state, of models and optimizers; the largest one is the best state to
    continue from.

    A rank that never trained has none.
    """

    condition: Condition
    version: int
    iteration: int
    lineage: Lineage
    committed: int = field(default=0, compare=False)
    """The version of the last boundary that the rank passed."""
    drifted: bool = field(default=False, compare=False)
    """The replicas of the ranks with this state differed; set on all of these ranks."""
    odd: bool = field(default=False, compare=False)
    """More than half of these ranks were equal, and this rank differed."""


NOT_SOUND = Survivors(Condition.UNSOUND, 0, 0, ())


def left_by(handle: Handle, condition: Condition) -> Survivors:
    """The live state of a rank that trained with this checkpointer; UNSOUND if a restore was
    interrupted."""
    condition = Condition.UNSOUND if handle.state.torn else condition
    drifted = handle.drifted
    odd = drifted is not None and handle.group.rank in drifted
    at = (handle.steps_made, handle.iteration, handle.lineage, handle.version)
    return Survivors(condition, *at, drifted is not None, odd)


def best_of(by_rank: Sequence[Survivors | None]) -> tuple[int, Survivors] | None:
    """The rank with the best live state, and that state; None if no rank has one. If several ranks
    have it, the first one not odd."""
    live = max(filter(None, by_rank), default=None)
    if live is None:
        return None
    ranks = [rank for rank, each in enumerate(by_rank) if each == live]
    return min(ranks, key=lambda rank: by_rank[rank].odd), live  # type: ignore[union-attr]


def left_half_way(handle: Handle, before: Survivors | None) -> Survivors | None:
    """The live state of a rank after a failure at the start of this checkpointer; `before`: its
    state before that start."""
    if handle.state.torn:
        return NOT_SOUND
    if handle.version:  # the whole state was received
        version = handle.version
        return Survivors(Condition.INEXACT, version, handle.iteration, handle.lineage, version)
    return before and replace(before, condition=min(before.condition, Condition.INEXACT))


class Attributes:
    """The models, optimizers, objects and values of one `TorchState`. Training thread."""

    def __init__(self, owner: object, given: Mapping[str, Any]) -> None:
        """Make all of `given` attributes of `owner`.

        Raises ConfigError without a module or without an optimizer, and for an object under a name
        that the checkpoint reserves; UnsupportedStateError, with the attribute's name, for a value
        that cannot be stored.
        """
        self._owner = owner
        for name, value in given.items():
            setattr(owner, name, value)
        self._models = [n for n, v in given.items() if isinstance(v, torch.nn.Module)]
        self._optimizers = [n for n, v in given.items() if isinstance(v, torch.optim.Optimizer)]
        rest = [n for n in given if n not in (*self._models, *self._optimizers)]
        self._objects = [n for n in rest if _is_object(given[n])]
        self.values = PlainValues(owner, [n for n in rest if n not in self._objects])
        if not self._models or not self._optimizers:
            raise ConfigError(_lacking(given, self._models))
        for name in {PLAIN_VALUES, EXTRA_STATES, MODULE_STATES} & set(self._objects):
            raise ConfigError(_taken(name, "the checkpoint"))
        label_optimizers(self.optimizers)
        self.values.check()

    @property
    def model(self) -> torch.nn.Module:
        """The only module, or a new module that contains all modules under their names."""
        models: dict[str, torch.nn.Module] = self._named(self._models)
        if len(models) == 1:
            return next(iter(models.values()))
        container = torch.nn.Module()
        container._modules.update(models)  # add_module would refuse names such as `type`
        return container

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name; a single one is `optimizer`, as outside of elastic jobs."""
        named = self._named(self._optimizers)
        return named if len(named) > 1 else dict.fromkeys(["optimizer"], *named.values())

    @property
    def objects(self) -> dict[str, Any]:
        """The objects with `state_dict` and `load_state_dict`, by name."""
        named = self._named(self._objects)
        return {n: v.position if isinstance(v, ResumableSampler) else v for n, v in named.items()}

    def deal_again(self) -> None:
        """Have samplers deal the rest of the epoch to the current ranks."""
        for sampler in self._named(self._objects).values():
            if isinstance(sampler, ElasticSampler):
                sampler.reset()
            elif isinstance(sampler, ResumableSampler):
                sampler.deal_to(hvd.rank(), hvd.size())

    def broadcast(self, root: int, buffers: bool = True) -> None:
        """Send the whole state of `root` to all ranks; nothing of `root` changes. Collective.

        Without `buffers` each rank keeps its own buffers, as after any step.
        """
        state = TrainingState(self.model, self.optimizers)
        for label, optimizer in state.optimizers.items():
            send_optimizer_state(label, optimizer, root)
        send_model(self.model, root, buffers)
        send_loose_parameters(state.optimizers, self.model, root)
        self.broadcast_settings(root)
        send_remainders(state, root)

    def broadcast_settings(self, root: int) -> None:
        """Send the settings of `root` that reset callbacks may change: options of parameter groups,
        objects (a schedule computes the next rates from its state), and plain values. Collective.
        State of each rank's own (buffers, random streams) stays."""
        for name, optimizer in self.optimizers.items():
            groups = [_options(group) for group in optimizer.param_groups]
            for group, options in zip(
                optimizer.param_groups, hvd.broadcast_object(groups, root, name), strict=True
            ):
                for key, value in options.items():
                    if isinstance(group.get(key), torch.Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = value
        for name, value in self.objects.items():
            value.load_state_dict(hvd.broadcast_object(value.state_dict(), root, name))
        self.values.load_state_dict(hvd.broadcast_object(self.values.state_dict(), root))

    def _named(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in names}


def refuse_names(given: Iterable[str], own: Iterable[str]) -> None:
    """Raise ConfigError for a name among TorchState's `own`."""
    for name in given:
        if name in own:
            raise ConfigError(_taken(name, "TorchState"))


def _taken(name: str, owner: str) -> str:
    return (
        f"TorchState was given {name}=..., but {owner} uses this name; choose another one "
        f"(my_{name}=...)"
    )


def _is_object(value: Any) -> bool:
    return hasattr(value, "load_state_dict") or isinstance(value, ResumableSampler)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _lacking(given: Mapping[str, Any], models: Iterable[str]) -> str:
    found = ", ".join(f"{name}: {type(value).__name__}" for name, value in given.items())
    lacking = "torch.optim.Optimizer" if models else "torch.nn.Module"
    return (
        f"TorchState found no {lacking} among its arguments ({found or 'nothing'}). It copies "
        "modules while their gradients are reduced, so it needs at least one module and one "
        "result of hvd.DistributedOptimizer, under any names. For a job without them use "
        "Horovod's own state, horovod.torch.elastic.TorchState"
    )


logger = logging.getLogger("tierckpt")

INEXACT = (
    "no level has a complete version that the remaining ranks can reach: training continues from "
    "the live state of one of them, which all ranks receive. Weights and optimizer are those of "
    "the last step; generators and buffers have changed in the interrupted iteration"
)
UNSOUND = (
    "a rank was lost while a version was being loaded, or after restore() was called, so no rank "
    "has a whole state any more, and no level has a complete version that the remaining ranks can "
    "reach. No step was made from that state. Start the job again where it can reach the memory, "
    "the disks or the persistent level of the lost nodes; otherwise it starts afresh. With "
    "peer_redundancy or persistent_path a version would exist elsewhere"
)
CONTINUES_EQUAL = (
    "replicas differed when hosts joined or left (see the event `drifted`, which has the old rank "
    "numbers). All ranks continue from the state of rank {rank}, which is one of the majority if "
    "more than half of the ranks were equal. Versions from here on are not suspect"
)
NO_COMMIT = (
    "TorchState.restore(): nothing was committed yet, so there is no version to go back to, and "
    "nothing was changed. Call commit() before the first batch that restore() may have to undo"
)


class TorchState(State):  # type: ignore[misc]
    """Drop-in for `hvd.elastic.TorchState`.

    Args:
        model: the trained module.
        optimizer: the result of `hvd.DistributedOptimizer`.
        tierckpt: settings of the Checkpointer, as in `tierckpt.Checkpointer`.
        kwargs: modules and optimizers (further ones, or all), under any names that are not
            TorchState's own; objects with `state_dict`/`load_state_dict` (an ElasticSampler, a
            schedule); a `tierckpt.ResumableSampler`, with its samples dealt to the current ranks;
            and plain values (`epoch=0`). All become attributes. Values must be of JSON's types or
            tensors; nothing is pickled.

    A commit is complete before the next step changes anything. If a loop changes a module's
    parameters between a commit and that step, it must call `checkpointer.complete()` first. The
    first commits are complete when they return. A later commit is lost if its weights are changed
    too early: an error event reports that (except for a write through `.data`), `restore()` goes
    back to the commit before, and from then on commits are complete when they return.

    Each commit takes a version of its own, also if only values changed since the last one. A commit
    between the backward passes of a step (`backward_passes_per_step`) takes none: checkpoints do
    not contain the gradients so far.

    The attribute `checkpointer` is the Checkpointer over the current ranks; `restored` is the
    result of the last `sync()` or `restore()`.

    Raises ConfigError without a module and an optimizer, or for a name of TorchState's own,
    and UnsupportedStateError for a value that cannot be stored. If a value becomes unsupported
    later, commits fail, each with an event, and the job continues.
    All methods are for the training thread, and all ranks make the same calls.
    """

    _reset_callbacks: list[Callable[[], None]]

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        tierckpt: Arguments | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _check(tierckpt or {})
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
        self._settings = dict(tierckpt or {})
        self._callbacks = check_callbacks(self._settings.pop("callbacks", ()))
        check_receiver(self._settings.get("on_event"))
        self.checkpointer: _Checkpointer | None = None
        self.restored: Restored | None = None
        self._live: Survivors | None = None
        """The live state while there is no checkpointer; None before training started."""
        self._was_reset = False
        """True if reset callbacks are still to be called."""
        refuse_names(kwargs, {*dir(TorchState), *vars(self), "_attributes", "_close"})
        self.model, self.optimizer = model, optimizer
        usual = {"model": model, "optimizer": optimizer}
        given = {name: value for name, value in usual.items() if value is not None}
        self._attributes = Attributes(self, {**given, **kwargs})
        _refuse_plain_ones(self._attributes.optimizers)
        _refuse_process_sets(self._attributes.optimizers)
        self._close = close_at_exit(lambda: self.checkpointer)

    # --- methods for scripts and Horovod -------------------------------------------------------

    def save(self) -> None:
        """Take a version of the current state, while the next iteration runs."""
        if self.checkpointer is not None:
            self.checkpointer.adapter.commit(self.checkpointer.step)

    def restore(self) -> None:
        """Go back to the last commit; collective, at any point of an iteration.

        Afterwards models, optimizers, objects, values and generators are those of the newest
        version, and the job can commit again. Raises RestoreError, with nothing changed, if nothing
        was committed yet, or no level has a complete version any more.

        Horovod also calls it after the failure of a rank. Then other ranks cannot send shards: this
        only abandons the checkpointer, and the `sync()` that follows restores the state.
        """
        if isinstance(sys.exc_info()[1], HorovodInternalError):
            self._abandon_checkpointer(Condition.INEXACT)
        elif self.checkpointer is None:
            raise RestoreError(NO_COMMIT)
        else:
            self._roll_back(self.checkpointer)

    def commit(self) -> None:
        """Take a version, and interrupt all ranks at the same commit if hosts join or leave.

        Horovod checks for that by a broadcast at each commit, and all ranks wait for it. Here the
        question is a part of the checkpointer's votes: a broadcast follows only if some rank was
        notified of a change, one commit later, or if commits are rare. Between the backward passes
        of a step there is no check: an interrupt would discard their work.
        """
        self.save()
        adapter = None if self.checkpointer is None else self.checkpointer.adapter
        if adapter is not None and adapter.passed_over:
            return
        if adapter is None or adapter.agreed_vote != NO_NEWS:
            self.check_host_updates()

    def check_host_updates(self) -> None:
        """See Horovod. If it interrupts, no rank has failed: the live state is newer than any
        version, and the job continues from it."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            whole = self.checkpointer is not None and not self.checkpointer.adapter.half_way
            if self.checkpointer is not None:
                self.checkpointer.adapter.compare_replicas()
            self._abandon_checkpointer(Condition.EXACT if whole else Condition.INEXACT)
            # If ranks only leave, Horovod would not call sync(), but our ranks get new numbers.
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    def add_callbacks(self, callbacks: Callbacks) -> None:
        """Call these callbacks from now on, also from later Checkpointers; see `Callbacks`."""
        self._callbacks += check_callbacks([callbacks])
        if self.checkpointer is not None:
            self.checkpointer.add_callbacks(callbacks)

    def on_reset(self) -> None:
        """See Horovod. The reset callbacks are called later, at the end of the `sync()` that
        follows: its restore would undo their changes (a learning rate for the new number of
        ranks)."""
        callbacks, self._reset_callbacks = self._reset_callbacks, []
        try:
            super().on_reset()
        finally:
            self._reset_callbacks = callbacks
        self._was_reset = True

    def sync(self) -> None:
        """Bring all ranks to the same state. Collective.

        If ranks joined or left without a failure, it is a live state; else the newest version,
        from the cheapest level. If no level has a version, it is the state of rank 0 at a fresh
        start, or the live state of a remaining rank, and an event reports that it is not exact.

        Raises RestoreError, on all ranks, if none of these is sound, and the errors of
        `tierckpt.Checkpointer.restore` if no rank has a live state.
        """
        self._abandon_checkpointer(Condition.INEXACT)
        atexit.unregister(self._close)  # a new start of Horovod registered its shutdown after ours
        atexit.register(self._close)
        ckpt = self._attach()
        try:
            self.restored = self._bring_together(ckpt)
            ckpt.adapter.handle.state.drop_gradients()  # a new rank has none
            self._attributes.deal_again()
            self._call_back(ckpt)
        except BaseException:  # for example another rank was lost; Horovod calls this again
            self._live = left_half_way(ckpt.adapter.handle, self._live)
            ckpt.abandon()
            raise
        self.checkpointer, self._live = ckpt, None

    # --- details -------------------------------------------------------------------------------

    def _attach(self) -> _Checkpointer:
        held = self._attributes
        adapter = ElasticAdapter(held.model, held.optimizers, self._host_messages.empty)
        checkpointer = _Checkpointer(
            held.model,
            held.optimizers,
            adapter=adapter,
            group=adapter.group,
            extra=held.objects,
            callbacks=self._callbacks,
            **{"boundary": "explicit", **_defaults(), **self._settings},
        )
        # After the constructor's checks: a value unsupported now was reported at each commit, and
        # the restored values are sound.
        checkpointer.register(PLAIN_VALUES, held.values)
        return checkpointer

    def _call_back(self, ckpt: _Checkpointer) -> None:
        """Call the reset callbacks. New ranks, which do not call them, receive the results.
        Collective."""
        calls = self._was_reset and bool(self._reset_callbacks)
        if calls:
            for callback in self._reset_callbacks:
                callback()
        self._was_reset = False
        gathered = ckpt.group.all_gather_object(calls)
        if any(gathered) and not all(gathered):
            self._attributes.broadcast_settings(gathered.index(True))

    def _bring_together(self, ckpt: _Checkpointer) -> Restored | None:
        """Do the work of `sync`; returns the result of a restore, None for a live state."""
        survivors: list[Survivors | None] = ckpt.group.all_gather_object(self._live)
        root, live = best_of(survivors) or (0, None)
        if live is None or live.condition is not Condition.EXACT:
            restored = self._from_levels(ckpt, live)
            if restored.levels:
                return restored
            if live is None:
                self._attributes.broadcast(0)
                return restored
        all_have_it = all(other == live for other in survivors)
        # Inexact states may differ: of two optimizers perhaps only one has made its step.
        drifted = any(other is not None and other.drifted for other in survivors)
        exact = live.condition is Condition.EXACT and not drifted
        if not (exact and all_have_it):
            if ckpt.group.rank != root and not (exact and self._live == live):
                self._live = NOT_SOUND  # until the whole state is received
            self._attributes.broadcast(root, buffers=not all_have_it)
            self._live = live
        ckpt.adapter.handle.carry_on(live.version, live.iteration, live.lineage)
        if drifted and ckpt.group.rank == 0:
            text = CONTINUES_EQUAL.format(rank=root)
            ckpt.adapter.handle.notice(text, logging.ERROR, live.version)
        return None

    def _from_levels(self, ckpt: _Checkpointer, live: Survivors | None) -> Restored:
        """Restore the newest version; without one, the ranks continue from `live`, which an event
        reports. Raises RestoreError if `live` is unsound, too."""
        if live is None:
            return ckpt.restore()
        sound, why = live.condition is not Condition.UNSOUND, ""
        try:
            restored = ckpt.restore()
        except RestoreError as error:
            if not sound:
                raise
            # Nothing was changed, on any rank. A version unreachable now may come back; the
            # live state would be lost if the job ended here.
            restored, why = Restored(0), f". A restore was tried first: {error.reason}"
        if not restored.levels:
            if not sound:
                raise RestoreError(UNSOUND)
            text = INEXACT + why
            ckpt.adapter.handle.notice(text, logging.ERROR, live.version)
        else:
            self._report_lost_steps(ckpt, restored, live)
        return restored

    def _report_lost_steps(self, ckpt: _Checkpointer, restored: Restored, live: Survivors) -> None:
        """Report if the restored version is older than the live state of the remaining ranks."""
        if ckpt.group.rank or restored.version >= live.version:
            return
        text = f"the job goes back to v{restored.version} from v{live.version}"
        if lost := restored.version < live.committed:
            text += (
                f": later commits, up to v{live.committed}, were skipped, were not due "
                "(memory_every_steps), or were lost with a rank (in progress, or only in its "
                "memory). With peer_redundancy, or shorter local "
                "intervals, fewer commits are lost"
            )
        severity = logging.WARNING if lost else logging.INFO
        ckpt.adapter.handle.notice(text, severity, restored.version)

    def _roll_back(self, ckpt: _Checkpointer) -> None:
        newest = ckpt.version
        try:
            restored = ckpt.restore()
        except HorovodInternalError:
            self._abandon_checkpointer(Condition.UNSOUND)  # the script has rejected the live state
            raise
        if not restored.levels:
            raise RestoreError(NO_COMMIT)
        if restored.version < newest:
            text = (
                f"the job goes back to v{restored.version}: the last commit, v{newest}, was "
                "skipped (a level was busy), was not due (memory_every_steps), or was lost; see "
                "the events"
            )
            ckpt.adapter.handle.notice(text, logging.WARNING, restored.version)
        self.restored = restored

    def _abandon_checkpointer(self, condition: Condition) -> None:
        """Abandon the checkpointer over the previous ranks, and note the condition of this rank's
        live state."""
        ckpt, self.checkpointer = self.checkpointer, None
        if ckpt is None:
            return
        self._live = left_by(ckpt.adapter.handle, condition)
        ckpt.abandon()  # completes the copy in progress, which is still valid


class _Checkpointer(Checkpointer):
    """The Checkpointer over the current ranks."""

    adapter: ElasticAdapter


def _defaults() -> dict[str, Any]:
    """The defaults for an elastic job, unless the environment sets other values.

    SIGTERM to one worker (its node is taken away) ends only that worker, as in Horovod without
    Tierckpt, and not the job: a job that ends normally is not started again. A third slot allows
    commits while an earlier one is written to disk.
    """
    defaults = {"halt_signals": "", "slots": 3}
    return {n: v for n, v in defaults.items() if f"TIERCKPT_{n.upper()}" not in os.environ}


def _refuse_plain_ones(optimizers: Mapping[str, Any]) -> None:
    for name, each in optimizers.items():
        if not is_horovod(each):
            raise ConfigError(
                f"{is_plain(name, each)}. The parameters of a plain optimizer are each rank's own, "
                "and ranks that join an elastic job could not receive them. Pass the optimizer to "
                "hvd.DistributedOptimizer, and the result to TorchState (it does not share its "
                "state with the optimizer it was made from)"
            )


def _refuse_process_sets(optimizers: Mapping[str, Any]) -> None:
    for name, each in optimizers.items():
        chosen = getattr(each, "process_set", hvd.global_process_set)
        if chosen is not hvd.global_process_set:
            raise ConfigError(
                f"the process set of optimizer {name!r} is {chosen.ranks}, but an elastic state is "
                "for all ranks: Horovod does not make process sets again when ranks join or leave. "
                "Use horovod_ckpt.Checkpointer in a job that is not elastic, or leave process_set "
                "out"
            )


def _check(settings: Mapping[str, Any]) -> None:
    if settings.get("boundary", "explicit") != "explicit":
        raise ConfigError(
            f"tierckpt={{'boundary': {settings['boundary']!r}}}: the boundary of an elastic job is "
            "always its commit(); leave this setting out"
        )
    if "extra" in settings:
        raise ConfigError(
            "tierckpt={'extra': ...}: give TorchState these objects by name instead "
            "(TorchState(model, optimizer, schedule=schedule)), so that new ranks get them, too"
        )
