"""Elastic Horovod: a state object whose commits go through our levels.

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
and loses it with the process. Ours copies during the next gradient reductions, each rank its share,
and the versions survive the loss of all processes.

Values are committed as they are: with `for state.batch in range(state.batch, batches)` a restart
would repeat the last batch.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.elastic import State
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.elastic import ElasticSampler, run

from horovod_ckpt.given_optimizers import is_horovod, is_plain
from tierckpt import Callbacks, Checkpointer, ConfigError, Restored, RestoreError
from tierckpt.callbacks import check_callbacks
from tierckpt.checkpointer.script_mode import close_at_exit
from tierckpt.events import check_receiver
from tierckpt.settings import Arguments
from tierckpt.state.extras import PLAIN_VALUES

from .adapter import NOTHING_HEARD, ElasticAdapter
from .attributes import Attributes, refuse_names
from .survivors import NOT_SOUND, Condition, Survivors, best_of, left_by, left_half_way

__all__ = ["ElasticSampler", "TorchState", "run"]

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
GOES_ON_ALIKE = (
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
        model: the module that is trained.
        optimizer: the result of `hvd.DistributedOptimizer`.
        tierckpt: settings of the Checkpointer, as in `tierckpt.Checkpointer`.
        kwargs: modules and optimizers (further ones, or all), under any names that are not
            TorchState's own; objects with `state_dict`/`load_state_dict` (an ElasticSampler, a
            schedule); a `tierckpt.ResumableSampler`, whose samples are dealt to the current ranks;
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

    Raises ConfigError without a module and an optimizer, or for a name that is TorchState's own,
    and UnsupportedStateError for a value that cannot be stored. If a value becomes unsupported
    later, commits fail, each with an event, and the job goes on.
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
        """The live state while there is no checkpointer; None before training began."""
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
            self._let_go(Condition.INEXACT)
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
        if adapter is None or adapter.agreed_vote != NOTHING_HEARD:
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
            self._let_go(Condition.EXACT if whole else Condition.INEXACT)
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

        If ranks joined or left without a failure, that is a live state; else the newest version,
        from the cheapest level. If no level has a version, it is the state of rank 0 at a fresh
        start, or the live state of a remaining rank, and an event reports that it is not exact.

        Raises RestoreError, on all ranks, if none of these is sound, and the errors of
        `tierckpt.Checkpointer.restore` if no rank has a live state.
        """
        self._let_go(Condition.INEXACT)
        atexit.unregister(self._close)  # a new start of Horovod registered its shutdown after ours
        atexit.register(self._close)
        ckpt = self._attach()
        try:
            self.restored = self._bring_together(ckpt)
            ckpt.adapter.handle.state.drop_gradients()  # a new rank has none
            self._attributes.deal_anew()
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
        # After the constructor's checks: a value that is unsupported now was reported at each
        # commit, and the restored values are sound.
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
            text = GOES_ON_ALIKE.format(rank=root)
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
            # Nothing was changed, on any rank. A version that is unreachable now may come back; the
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
            self._let_go(Condition.UNSOUND)  # the script has rejected the live state
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

    def _let_go(self, condition: Condition) -> None:
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
