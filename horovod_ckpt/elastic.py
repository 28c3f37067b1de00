"""Elastic Horovod: a state object whose commits go through our levels.

import horovod.torch as hvd
import horovod_ckpt.elastic

state = horovod_ckpt.elastic.TorchState(model, optimizer, batch=0, tierckpt={"path": "ckpts"})

@hvd.elastic.run
def train(state):
    for state.batch in range(state.batch, batches):
        ...
        state.commit()

Horovod's own makes a full copy of model and optimizer in every process, with training stopped, and
loses it with the process. Ours copies while the next gradients are being reduced, each rank its
share, and is found again after every process was lost.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.elastic import State
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic import ElasticSampler, run

from tierckpt import ConfigError, Restored, tree
from tierckpt.naming import Lineage
from tierckpt.scripts import close_at_exit

from .checkpointer import Checkpointer

__all__ = ["ElasticSampler", "TorchState", "run"]

logger = logging.getLogger("tierckpt")

NOTHING_HEARD = 1
RARE_SECONDS = 1.0
"""Commits that are further apart ask for new hosts at once: a broadcast is nothing to them, and an
answer one commit later would be late."""

INEXACT = (
    "no level has a complete version that the ranks that are left can reach: training goes on from "
    "what they have in their models. Weights and optimizer are those of the last step; generators "
    "and buffers have seen some of the iteration that was cut short"
)


class TorchState(State):  # type: ignore[misc]
    """Drop-in for `hvd.elastic.TorchState`.

    Args:
        model: the module that is trained.
        optimizer: what `hvd.DistributedOptimizer` returned.
        tierckpt: settings of the Checkpointer, as in `tierckpt.Checkpointer`.
        kwargs: further optimizers, objects with `state_dict`/`load_state_dict` (an ElasticSampler,
            a schedule), and plain values (`epoch=0`): all become attributes. Values must be what
            JSON or a tensor can hold; nothing is pickled.

    A commit is complete before the next step changes anything. Each takes a version of its own,
    also when only values changed since the last; but for one between the backward passes of a step
    (`backward_passes_per_step`), which is passed over: the gradients so far are in no checkpoint.

    The attribute `checkpointer` is the Checkpointer over the ranks that are there now; `restored`
    is what the last `sync()` brought back.

    Raises ConfigError without a model and an optimizer, UnsupportedStateError for a value that
    cannot be stored. One that becomes so later costs the commits, with an event each, not the job.
    All methods are for the training thread, and all ranks call them alike.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        tierckpt: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _check(model, optimizer, tierckpt or {})
        assert model is not None
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
        self.model = model
        self.optimizer = optimizer
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._settings = dict(tierckpt or {})
        self._optimizers = ["optimizer"]
        self._optimizers += [n for n, v in kwargs.items() if isinstance(v, torch.optim.Optimizer)]
        rest = {n: v for n, v in kwargs.items() if n not in self._optimizers}
        self._objects = [n for n, v in rest.items() if hasattr(v, "load_state_dict")]
        self._values = _Values(self, [n for n in rest if n not in self._objects])
        self._values.check()
        self.checkpointer: _Checkpointer | None = None
        self.restored: Restored | None = None
        self._live: _Live | None = None
        self._close = close_at_exit(lambda: self.checkpointer)

    # --- what Horovod calls --------------------------------------------------------------------

    def save(self) -> None:
        """A boundary: take the state as it is now, while the next iteration runs."""
        if self.checkpointer is not None:
            self.checkpointer.step()

    def restore(self) -> None:
        """A rank failed: let go. The state comes back with the `sync()` that follows."""
        self._let_go(exact=False)

    def commit(self) -> None:
        """Take a version, and interrupt all ranks alike if hosts come or go.

        Horovod asks for that by a broadcast at each commit, and all ranks wait for it. Here the
        question goes with the checkpointer's own agreement: a broadcast follows only when some rank
        has heard of something, one commit later, or where commits are rare.
        """
        self.save()
        if self.checkpointer is None or self.checkpointer.agreed_vote != NOTHING_HEARD:
            self.check_host_updates()

    def check_host_updates(self) -> None:
        """See Horovod. Ranks come or go and nobody failed: what is live is newer than any copy."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            self._let_go(exact=self.checkpointer is not None and not self.checkpointer.half_way)
            # Horovod would not call sync() when ranks only leave; our ranks are numbered anew.
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    def sync(self) -> None:
        """Bring all ranks to the same state.

        That is a live one if ranks came or went and nobody failed; else the newest version, from
        the cheapest level; and where no level has one, rank 0's at a fresh start, or what the
        ranks that are left have in their models, and an event says that it is not exact.
        """
        self._let_go(exact=False)
        atexit.unregister(self._close)  # Horovod, started again, registered its end behind ours
        atexit.register(self._close)
        ckpt = self.checkpointer = self._attach()
        everyone: list[_Live | None] = ckpt.group.all_gather_object(self._live)
        newest = max(filter(None, everyone), default=None)
        self.restored = None
        if newest is None or not newest.exact:
            self._live = None  # loading may stop half-way
            self.restored = ckpt.restore()
            if self.restored.levels:
                return
        if newest is None:
            self._broadcast(0)
            return
        if not newest.exact:
            ckpt.log.emit("notice", version=newest.version, severity=logging.ERROR, message=INEXACT)
        if any(live != newest for live in everyone):
            self._broadcast(everyone.index(newest))
        for sampler in filter(_is_sampler, map(self.__getattribute__, self._objects)):
            sampler.reset()  # deals out what is left among the ranks that are there now
        ckpt.carry_on(newest.version, newest.iteration, newest.lineage)
        self._live = None

    # --- details -------------------------------------------------------------------------------

    def _attach(self) -> _Checkpointer:
        optimizers = {n: getattr(self, n) for n in self._optimizers}
        extra = {n: getattr(self, n) for n in self._objects}
        checkpointer = _Checkpointer(
            self.model,
            optimizers if len(optimizers) > 1 else self.optimizer,
            extra={**extra, "attributes": self._values},
            **{"boundary": "explicit", **self._settings},
        )
        checkpointer.quiet = self._host_messages.empty
        return checkpointer

    def _let_go(self, exact: bool) -> None:
        """Leave the ranks there were, and remember what this one has in its model."""
        ckpt, self.checkpointer = self.checkpointer, None
        if ckpt is None:
            return
        if ckpt.lineage:
            self._live = _Live(exact, ckpt.steps_made, ckpt.iteration, ckpt.lineage)
        elif self._live is not None:  # the sync() that this checkpointer was made for failed
            self._live = replace(self._live, exact=False)
        # The copy under way is still good: nothing changed yet. Its slot may need another rank's
        # word, and that rank may be the one that is gone.
        try:
            ckpt.complete()
        except Exception as error:
            logger.info("the newest version could not be completed: %s", error)
        ckpt.abandon()

    def _broadcast(self, root: int) -> None:
        """Horovod's way to one state: `root` sends everything."""
        # Before the parameters: an optimizer without state is made to have some by a step with
        # zero gradients, and weight decay moves parameters in that, too.
        for name in self._optimizers:
            hvd.broadcast_optimizer_state(getattr(self, name), root_rank=root)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=root)
        for name in self._objects:
            value = getattr(self, name)
            value.load_state_dict(hvd.broadcast_object(value.state_dict(), root, name))
        self._values.load_state_dict(hvd.broadcast_object(self._values.state_dict(), root))


class _Checkpointer(Checkpointer):
    """Takes a version at every commit: values may have changed without a step."""

    quiet: Callable[[], bool]
    """True while this rank has heard of no host that comes or goes."""
    _voted_seconds = float("-inf")

    def own_vote(self) -> int:
        """NOTHING_HEARD, or something smaller."""
        now, before = time.monotonic(), self._voted_seconds
        self._voted_seconds = now
        return NOTHING_HEARD if self.quiet() and now - before < RARE_SECONDS else 0

    @property
    def half_way(self) -> bool:
        """True while there are gradients that no step has used."""
        return any(optimizer._handles for optimizer in self.state.optimizers.values())  # type: ignore[attr-defined]

    def step(self, metric: float | None = None) -> None:
        """See `tierckpt.Checkpointer`; without a step since the last boundary, counts as one."""
        if not self._iterations.steps and not self.half_way:
            self._iterations.count_one()
        super().step(metric)


@dataclass(frozen=True, order=True)
class _Live:
    """A state that is in the model and the optimizer, alike on all ranks that have it."""

    exact: bool
    """False where an iteration was cut short: its forward pass has moved generators and buffers."""
    version: int
    iteration: int
    lineage: Lineage


class _Values:
    """The plain values among the state's attributes, as one object of the checkpoint."""

    def __init__(self, owner: TorchState, names: Sequence[str]) -> None:
        self._owner = owner
        self._names = names

    def check(self) -> None:
        """Raise UnsupportedStateError, with the attribute's name, for what cannot be stored."""
        for name in self._names:
            value = getattr(self._owner, name)
            tree.pack(value, f"TorchState's attribute {name!r}", tree.Arena().keep)

    def state_dict(self) -> dict[str, Any]:
        if self._owner.checkpointer is None:
            # It is being made, and looks whether all can be stored. What there is may have become
            # something that cannot: an event said so at each commit; what comes back is sound.
            return {}
        return {name: getattr(self._owner, name) for name in self._names}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._owner, name, value)


def _is_sampler(value: Any) -> bool:
    return isinstance(value, ElasticSampler)


def _check(model: Any, optimizer: Any, settings: Mapping[str, Any]) -> None:
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"TorchState needs a model and an optimizer, and got {type(model).__name__} and "
            f"{type(optimizer).__name__}; for a job without them use Horovod's own, "
            "horovod.torch.elastic.TorchState"
        )
    if "extra" in settings:
        raise ConfigError(
            "tierckpt={'extra': ...}: give TorchState these objects by name instead "
            "(TorchState(model, optimizer, schedule=schedule)), so that new ranks get them, too"
        )
