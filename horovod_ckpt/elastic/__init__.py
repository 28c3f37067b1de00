"""Elastic Horovod: a state object whose commits go through our levels.

import horovod.torch as hvd
import horovod_ckpt.elastic

state = horovod_ckpt.elastic.TorchState(model, optimizer, batch=0, tierckpt={"path": "ckpts"})

@hvd.elastic.run
def train(state):
    while state.batch < batches:
        ...
        state.batch += 1
        state.commit()

Horovod's own makes a full copy of model and optimizer in every process, with training stopped, and
loses it with the process. Ours copies while the next gradients are being reduced, each rank its
share, and is found again after every process was lost.

Values are committed as they are: with `for state.batch in range(state.batch, batches)` a restart
would make the last batch again.
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
    "no level has a complete version that the ranks that are left can reach: training goes on from "
    "what one of them has in its models, and sends to all. Weights and optimizer are those of the "
    "last step; generators and buffers have seen some of the iteration that was cut short"
)
UNSOUND = (
    "a rank was lost while a version was being loaded, or after restore() was called, so no model "
    "holds a whole state any more, and no level has a complete version that the ranks that are "
    "left can reach. Nothing was trained on that. Start the job again where the memory, the disks "
    "or the persistent level of the lost nodes can be reached, or it begins afresh; "
    "peer_redundancy or persistent_path would have kept a version elsewhere"
)
GOES_ON_ALIKE = (
    "replicas differed when hosts came or went (see the event `drifted`; its ranks are numbered as "
    "they were then). All ranks go on from what rank {rank} has: one of the majority, where more "
    "than half of the ranks were alike. Versions from here on are no suspects"
)
NO_COMMIT = (
    "TorchState.restore(): nothing was committed yet, so there is nothing to go back to, and "
    "nothing was changed. Call commit() before the first batch that restore() may have to undo"
)


class TorchState(State):  # type: ignore[misc]
    """Drop-in for `hvd.elastic.TorchState`.

    Args:
        model: the module that is trained.
        optimizer: what `hvd.DistributedOptimizer` returned.
        tierckpt: settings of the Checkpointer, as in `tierckpt.Checkpointer`.
        kwargs: further modules and optimizers, or all of them, under any names that are not
            TorchState's own; objects with `state_dict`/`load_state_dict` (an ElasticSampler, a
            schedule); a `tierckpt.ResumableSampler`, which is then dealt to the ranks that there
            are; and plain values (`epoch=0`): all become attributes. Values must be what JSON or a
            tensor can hold; nothing is pickled.

    A commit is complete before the next step changes anything. Where a loop changes a module's
    parameters between a commit and that step, it calls `checkpointer.complete()` first. The first
    commits are complete when they return; a later one whose weights were changed is lost, which is
    noticed but for a write through `.data`: an error event says so, `restore()` goes back to the
    one before, and commits are complete when they return from then on.

    Each commit takes a version of its own, also when only values changed since the last; but for
    one between the backward passes of a step (`backward_passes_per_step`), which is passed over:
    the gradients so far are in no checkpoint.

    The attribute `checkpointer` is the Checkpointer over the ranks that are there now; `restored`
    is what the last `sync()` or `restore()` brought back.

    Raises ConfigError without a module and an optimizer, or for a name that is its own,
    UnsupportedStateError for a value that cannot be stored. One that becomes so later costs the
    commits, with an event each, not the job.
    All methods are for the training thread, and all ranks call them alike.
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
        """What is in the models while there is no checkpointer; None before training began."""
        self._was_reset = False
        """Reset callbacks are still to be called."""
        refuse_names(kwargs, {*dir(TorchState), *vars(self), "_attributes", "_close"})
        self.model, self.optimizer = model, optimizer
        usual = {"model": model, "optimizer": optimizer}
        given = {name: value for name, value in usual.items() if value is not None}
        self._attributes = Attributes(self, {**given, **kwargs})
        _refuse_plain_ones(self._attributes.optimizers)
        _refuse_process_sets(self._attributes.optimizers)
        self._close = close_at_exit(lambda: self.checkpointer)

    # --- what scripts and Horovod call ---------------------------------------------------------

    def save(self) -> None:
        """A boundary: take the state as it is now, while the next iteration runs."""
        if self.checkpointer is not None:
            self.checkpointer.adapter.commit(self.checkpointer.step)

    def restore(self) -> None:
        """Go back to the last commit; collective, at any place of an iteration.

        Models, optimizers, objects, values and generators are then those of the newest version,
        and the job goes on committing. Raises RestoreError, with nothing changed, where nothing
        was committed yet, or no level has a complete version any more.

        Horovod calls it, too, when a rank failed. There nobody can be asked for a shard: this only
        lets go, and the state comes back with the `sync()` that follows.
        """
        if isinstance(sys.exc_info()[1], HorovodInternalError):
            self._let_go(Condition.INEXACT)
        elif self.checkpointer is None:
            raise RestoreError(NO_COMMIT)
        else:
            self._roll_back(self.checkpointer)

    def commit(self) -> None:
        """Take a version, and interrupt all ranks alike if hosts come or go.

        Horovod asks for that by a broadcast at each commit, and all ranks wait for it. Here the
        question goes with the checkpointer's own agreement: a broadcast follows only when some rank
        has heard of something, one commit later, or where commits are rare. Between the backward
        passes of a step nobody asks: an interrupt there would throw their work away.
        """
        self.save()
        adapter = None if self.checkpointer is None else self.checkpointer.adapter
        if adapter is not None and adapter.passed_over:
            return
        if adapter is None or adapter.agreed_vote != NOTHING_HEARD:
            self.check_host_updates()

    def check_host_updates(self) -> None:
        """See Horovod. Ranks come or go and nobody failed: what is live is newer than any copy."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            whole = self.checkpointer is not None and not self.checkpointer.adapter.half_way
            if self.checkpointer is not None:
                self.checkpointer.adapter.compare_replicas()
            self._let_go(Condition.EXACT if whole else Condition.INEXACT)
            # Horovod would not call sync() when ranks only leave; our ranks are numbered anew.
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    def add_callbacks(self, callbacks: Callbacks) -> None:
        """Have these called from now on, by whatever Checkpointer there is; see `Callbacks`."""
        self._callbacks += check_callbacks([callbacks])
        if self.checkpointer is not None:
            self.checkpointer.add_callbacks(callbacks)

    def on_reset(self) -> None:
        """See Horovod; but reset callbacks are called by the `sync()` that follows, behind what it
        brings back: what they set (a learning rate for the new number of ranks) would be undone."""
        callbacks, self._reset_callbacks = self._reset_callbacks, []
        try:
            super().on_reset()
        finally:
            self._reset_callbacks = callbacks
        self._was_reset = True

    def sync(self) -> None:
        """Bring all ranks to the same state.

        That is a live one if ranks came or went and nobody failed; else the newest version, from
        the cheapest level; and where no level has one, rank 0's at a fresh start, or what the
        ranks that are left have in their models, and an event says that it is not exact.

        Raises RestoreError, on all ranks, where none of that is sound, and what
        `tierckpt.Checkpointer.restore` raises where there is nothing live to go on from.
        """
        self._let_go(Condition.INEXACT)
        atexit.unregister(self._close)  # Horovod, started again, registered its end behind ours
        atexit.register(self._close)
        ckpt = self._attach()
        try:
            self.restored = self._bring_together(ckpt)
            ckpt.adapter.handle.state.drop_gradients()  # a rank that is new has none
            self._attributes.deal_anew()
            self._call_back(ckpt)
        except BaseException:  # another rank is gone, for one, and Horovod calls this again
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
        # Behind the checks of what can be stored: a value that cannot be any more was told of at
        # each commit, and what comes back is sound.
        checkpointer.register(PLAIN_VALUES, held.values)
        return checkpointer

    def _call_back(self, ckpt: _Checkpointer) -> None:
        """The reset callbacks. New ranks, whose processes were never reset, get what they set."""
        calls = self._was_reset and bool(self._reset_callbacks)
        if calls:
            for callback in self._reset_callbacks:
                callback()
        self._was_reset = False
        everyone = ckpt.group.all_gather_object(calls)
        if any(everyone) and not all(everyone):
            self._attributes.broadcast_settings(everyone.index(True))

    def _bring_together(self, ckpt: _Checkpointer) -> Restored | None:
        """See `sync`; returns what a restore brought, None where it is a live state."""
        everyone: list[Survivors | None] = ckpt.group.all_gather_object(self._live)
        root, live = best_of(everyone) or (0, None)
        if live is None or live.condition is not Condition.EXACT:
            restored = self._from_levels(ckpt, live)
            if restored.levels:
                return restored
            if live is None:
                self._attributes.broadcast(0)
                return restored
        all_have_it = all(other == live for other in everyone)
        # What is not exact need not be alike: of two optimizers only one may have made its step.
        drifted = any(other is not None and other.drifted for other in everyone)
        exact = live.condition is Condition.EXACT and not drifted
        if not (exact and all_have_it):
            if ckpt.group.rank != root and not (exact and self._live == live):
                self._live = NOT_SOUND  # until all of it has come
            self._attributes.broadcast(root, buffers=not all_have_it)
            self._live = live
        ckpt.adapter.handle.carry_on(live.version, live.iteration, live.lineage)
        if drifted and ckpt.group.rank == 0:
            text = GOES_ON_ALIKE.format(rank=root)
            ckpt.adapter.handle.notice(text, logging.ERROR, live.version)
        return None

    def _from_levels(self, ckpt: _Checkpointer, live: Survivors | None) -> Restored:
        """What the levels have, loaded; if that is nothing, `live` is what the ranks go on from."""
        if live is None:
            return ckpt.restore()
        sound, why = live.condition is not Condition.UNSOUND, ""
        try:
            restored = ckpt.restore()
        except RestoreError as error:
            if not sound:
                raise
            # Nothing was changed, on any rank. What could not be seen just now may come back; what
            # is in the models would be gone for good if the job ended here.
            restored, why = Restored(0), f". A restore was tried first: {error.reason}"
        if not restored.levels:
            if not sound:
                raise RestoreError(UNSOUND)
            text = INEXACT + why
            ckpt.adapter.handle.notice(text, logging.ERROR, live.version)
        else:
            self._tell_how_far_back(ckpt, restored, live)
        return restored

    def _tell_how_far_back(self, ckpt: _Checkpointer, restored: Restored, live: Survivors) -> None:
        """What the ranks that are left had in their models may be newer than what came back."""
        if ckpt.group.rank or restored.version >= live.version:
            return
        text = f"this goes back to v{restored.version} from v{live.version}"
        if lost := restored.version < live.committed:
            text += (
                f": the commits behind it, to v{live.committed}, were skipped, were not due "
                "(memory_every_steps), or are gone with a lost rank (under way, or in its memory "
                "only). peer_redundancy, or shorter local "
                "intervals, bound that"
            )
        severity = logging.WARNING if lost else logging.INFO
        ckpt.adapter.handle.notice(text, severity, restored.version)

    def _roll_back(self, ckpt: _Checkpointer) -> None:
        newest = ckpt.version
        try:
            restored = ckpt.restore()
        except HorovodInternalError:
            self._let_go(Condition.UNSOUND)  # the script has given up what is in the models
            raise
        if not restored.levels:
            raise RestoreError(NO_COMMIT)
        if restored.version < newest:
            text = (
                f"this goes back to v{restored.version}: the last commit, v{newest}, was skipped "
                "(something was busy), was not due (memory_every_steps) or lost, see the events"
            )
            ckpt.adapter.handle.notice(text, logging.WARNING, restored.version)
        self.restored = restored

    def _let_go(self, condition: Condition) -> None:
        """Leave the ranks there were, and remember what this one has in its models."""
        ckpt, self.checkpointer = self.checkpointer, None
        if ckpt is None:
            return
        self._live = left_by(ckpt.adapter.handle, condition)
        ckpt.abandon()  # not without the copy under way, which is still good


class _Checkpointer(Checkpointer):
    """The Checkpointer over the ranks that there are now."""

    adapter: ElasticAdapter


def _defaults() -> dict[str, Any]:
    """Ours for an elastic job, where the environment says nothing else.

    SIGTERM to one worker (its node is taken away) is to end that worker, as in Horovod without us,
    and not the job: one that ends as it should is not started again. And a third slot, so that
    commits are taken also while one is written to disk.
    """
    defaults = {"halt_signals": "", "slots": 3}
    return {n: v for n, v in defaults.items() if f"TIERCKPT_{n.upper()}" not in os.environ}


def _refuse_plain_ones(optimizers: Mapping[str, Any]) -> None:
    for name, each in optimizers.items():
        if not is_horovod(each):
            raise ConfigError(
                f"{is_plain(name, each)}. Beside one of these, a plain one steps "
                "what is each rank's own, which an elastic job, whose ranks come and go, cannot "
                "give to those that come. Give it to hvd.DistributedOptimizer, and the state what "
                "that returns (Horovod's does not share its state with the one it was made from)"
            )


def _refuse_process_sets(optimizers: Mapping[str, Any]) -> None:
    for name, each in optimizers.items():
        chosen = getattr(each, "process_set", hvd.global_process_set)
        if chosen is not hvd.global_process_set:
            raise ConfigError(
                f"the process set of optimizer {name!r} is {chosen.ranks}, and an elastic state is "
                "of all ranks: Horovod makes no process set again when ranks come and go. Use "
                "horovod_ckpt.Checkpointer in a job that is not elastic, or leave process_set out"
            )


def _check(settings: Mapping[str, Any]) -> None:
    if settings.get("boundary", "explicit") != "explicit":
        raise ConfigError(
            f"tierckpt={{'boundary': {settings['boundary']!r}}}: the boundary of an elastic job is "
            "its commit(), and no other; leave this setting out"
        )
    if "extra" in settings:
        raise ConfigError(
            "tierckpt={'extra': ...}: give TorchState these objects by name instead "
            "(TorchState(model, optimizer, schedule=schedule)), so that new ranks get them, too"
        )
