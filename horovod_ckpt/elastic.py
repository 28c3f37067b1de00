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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.elastic import State
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic import ElasticSampler, run

from tierckpt import ConfigError, Restored
from tierckpt.naming import Lineage
from tierckpt.scripts import close_at_exit

from .checkpointer import Checkpointer

__all__ = ["ElasticSampler", "TorchState", "run"]

logger = logging.getLogger("tierckpt")


class TorchState(State):  # type: ignore[misc]
    """Drop-in for `hvd.elastic.TorchState`.

    Args:
        model: the module that is trained.
        optimizer: what `hvd.DistributedOptimizer` returned.
        tierckpt: settings of the Checkpointer, as in `tierckpt.Checkpointer`.
        kwargs: further optimizers, objects with `state_dict`/`load_state_dict` (an ElasticSampler,
            a schedule), and plain values (`epoch=0`): all become attributes. Values must be what
            JSON or a tensor can hold; nothing is pickled.

    A commit is complete when the next iteration's reductions are. The attribute `checkpointer`
    is the Checkpointer over the ranks that are there now; `restored` is what the last `sync()`
    brought back.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        tierckpt: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _check(model, optimizer)
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
        self.checkpointer: Checkpointer | None = None
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
        self._live = None
        self._let_go()

    def check_host_updates(self) -> None:
        """See Horovod. Ranks come or go and nobody failed: what is live is newer than any copy."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            if self.checkpointer is not None:
                self._live = _Live.of(self.checkpointer)
            self._let_go()
            # Horovod would not call sync() when ranks only leave; our ranks are numbered anew.
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    def sync(self) -> None:
        """Bring all ranks to the same state: a live one if there is, else the newest version from
        the cheapest level, else rank 0's."""
        self._let_go()
        atexit.unregister(self._close)  # Horovod, started again, registered its end behind ours
        atexit.register(self._close)
        ckpt = self.checkpointer = self._attach()
        everyone = ckpt.group.all_gather_object(self._live)
        lives = [live for live in everyone if live is not None]
        self._live, self.restored = None, None
        if lives:
            newest = max(lives)
            if any(live != newest for live in everyone):
                self._broadcast(everyone.index(newest))
            for sampler in filter(_is_sampler, map(self.__getattribute__, self._objects)):
                sampler.reset()  # deals out what is left among the ranks that are there now
            ckpt.carry_on(newest.version, newest.iteration, newest.lineage)
            return
        self.restored = ckpt.restore()
        if not self.restored.levels:
            self._broadcast(0)

    # --- details -------------------------------------------------------------------------------

    def _attach(self) -> Checkpointer:
        optimizers = {n: getattr(self, n) for n in self._optimizers}
        extra = {n: getattr(self, n) for n in self._objects}
        settings = {"boundary": "explicit", **self._settings}
        return Checkpointer(
            self.model,
            optimizers if len(optimizers) > 1 else self.optimizer,
            extra={**extra, "attributes": self._values, **settings.pop("extra", {})},
            **settings,
        )

    def _let_go(self) -> None:
        ckpt, self.checkpointer = self.checkpointer, None
        if ckpt is None:
            return
        # The copy under way is still good: nothing changed yet. Its slot may need another rank's
        # word, and that rank may be the one that is gone.
        try:
            ckpt.complete()
        except Exception as error:
            logger.info("the newest version could not be completed: %s", error)
        ckpt.abandon()

    def _broadcast(self, root: int) -> None:
        """Horovod's way to one state: `root` sends everything."""
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=root)
        for name in self._optimizers:
            hvd.broadcast_optimizer_state(getattr(self, name), root_rank=root)
        for name in self._objects:
            value = getattr(self, name)
            value.load_state_dict(hvd.broadcast_object(value.state_dict(), root, name))
        self._values.load_state_dict(hvd.broadcast_object(self._values.state_dict(), root))


@dataclass(frozen=True, order=True)
class _Live:
    """A state that is in the model and the optimizer, alike on all ranks that have it."""

    version: int
    iteration: int
    lineage: Lineage

    @staticmethod
    def of(ckpt: Checkpointer) -> _Live:
        return _Live(ckpt.steps_made, ckpt.iteration, ckpt.lineage)


class _Values:
    """The plain values among the state's attributes, as one object of the checkpoint."""

    def __init__(self, owner: TorchState, names: Sequence[str]) -> None:
        self._owner = owner
        self._names = names

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._owner, name, value)


def _is_sampler(value: Any) -> bool:
    return isinstance(value, ElasticSampler)


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"TorchState needs a model and an optimizer, and got {type(model).__name__} and "
            f"{type(optimizer).__name__}; for a job without them use hvd.elastic.ObjectState"
        )
