"""Horovod's adapter: what happens where Horovod launches reductions and makes steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

import tierckpt
from tierckpt._text import some
from tierckpt.checkpointer.adapter import VOID, Handle, PlainAdapter
from tierckpt.state.training_state import label_optimizers
from tierckpt.state.validate import refuse_model

from .given_optimizers import (
    check_optimizer,
    common_process_set,
    held,
    is_horovod,
    refuse_elastic_job,
    untrained,
)
from .horovod_group import current_group
from .pending_gradients import PendingGradients
from .reductions import Reductions

ACCUMULATED = (
    "v{version} has no gradients of the backward passes behind its step: restore() will return "
    "{at}, and they are made again. Random streams and buffers have seen them already, so call "
    "close() and save(now=True) behind a step where a resumed run is to be the same to the bit"
)
CUT = (
    "v{version} has no gradients of the backward passes that {names} made since its last step, and "
    "another optimizer has made a step since: if the loop is to use these gradients, a resumed run "
    "goes on without them. Call close() and save(now=True) where no optimizer is between its passes"
)
USED = (
    "{name} used gradients that were there at the boundary of v{version}, and that the loop had "
    "dropped at those before. Versions since its last step have no gradients: a run that is "
    "resumed from one of them goes on without these"
)
ENDS_BETWEEN = (
    "the job ends early, and an optimizer is between the backward passes of a step: the version "
    "before is exact, and a restart makes again what came behind it"
)
MISPLACED_BOUNDARIES = 8
"""So many in a row, each with new steps behind it, that were no version."""
MISPLACED = (
    f"the last {MISPLACED_BOUNDARIES} boundaries came between the backward passes of a step of "
    "{names} (backward_passes_per_step), where no version is taken, as the gradients so far would "
    "be in no checkpoint. Call step() or commit() behind optimizer.step(), and with several "
    "optimizers where none is between its passes. Gradients that no step is to use (a "
    "generator's pass through the discriminator leaves some) are dropped by "
    "model.zero_grad(set_to_none=True) before the boundary, or are never made under "
    "requires_grad_(False)"
)
APART = (
    "{names}: trained now, and not reduced by Horovod, which knows of what there was to train when "
    "hvd.DistributedOptimizer was made. From now on they are kept for each rank. Where the loop "
    "does not reduce them by hand, ranks differ: start the script again, and make "
    "hvd.DistributedOptimizer when all that it is to train is; restore(strict=False) where the "
    "parameter groups are then others"
)
OVERWRITTEN = (
    "{names} changed after the restore of v{version}, on {ranks}: hvd.broadcast_parameters or "
    "hvd.broadcast_optimizer_state gives all ranks what the root has now, in place of what was "
    "restored. A script that has checkpoints of its own loads them before "
    "hvd.DistributedOptimizer if what is newer here is to win"
)


class HorovodAdapter(PlainAdapter):
    """The adapter of a model that Horovod trains. See `Adapter` for the methods."""

    newly_unreduced_notice = APART
    is_elastic = False
    """Whether somebody makes another one whenever ranks come or go."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Arguments of `horovod_ckpt.Checkpointer`. Raises ConfigError and
        UnsupportedStateError."""
        if not hvd.is_initialized():
            raise tierckpt.ConfigError("call hvd.init() before making a Checkpointer")
        if not self.is_elastic:
            refuse_elastic_job()
        refuse_model(model)
        optimizers = label_optimizers(optimizer)
        horovods: dict[str, Any] = {n: o for n, o in optimizers.items() if is_horovod(o)}
        for label, each in optimizers.items():
            check_optimizer(label, each, horovods.values())
        self.process_set = common_process_set(horovods.values())
        self.group = current_group(self.process_set)
        """The ranks of the process set."""
        self._reductions = {name: Reductions(each) for name, each in horovods.items()}
        self._pending_gradients = PendingGradients(self._reductions)
        self._untrained: Sequence[torch.Tensor] = ()
        self._reduced: list[torch.Tensor] | None = None
        if self.process_set.size() > 1:
            self._untrained = untrained(model, optimizers.values())
            reduced = [p for each in horovods.values() for p in each._requires_update]
            self._reduced = [*reduced, *self._untrained]
        self.releases_by_layer = all(r.known_before_step for r in self._reductions.values())
        self._stepped_at = 0
        """Calls of `step()` before the newest boundary with a step."""
        self._cut = ""
        """While a version is taken between the backward passes of a step: ACCUMULATED or CUT."""
        self._between = False
        """This boundary is between those passes on this rank: no rank has a version of it."""
        self._misplaced = 0
        """Boundaries in a row that were so, though there was something new."""

    def reduced_parameters(self) -> Sequence[torch.Tensor] | None:
        """The parameters of Horovod's optimizers, and those that nobody trains."""
        return self._reduced

    def untrained_parameters(self) -> Sequence[torch.Tensor]:
        """Those that were frozen, or in no optimizer, when the Checkpointer was made."""
        return self._untrained

    def attached(self, handle: Handle) -> None:
        """Watch the reductions."""
        super().attached(handle)
        self._name_reductions(handle)
        for reductions in self._reductions.values():
            reductions.watch(handle.release)

    def _name_reductions(self, handle: Handle) -> None:
        """For the trace: their names in Horovod's timeline, which its rank 0 writes."""
        if not handle.traces:
            return
        names: dict[str, list[str]] = {}
        if self.process_set is hvd.global_process_set or 0 in self.process_set.ranks:
            for reductions in self._reductions.values():
                for tensor, param in reductions.tensors():
                    names.setdefault(tensor, []).append(handle.state.name_of(param))
        handle.name_reductions(names)

    def closed(self) -> None:
        """Watch them no more."""
        for reductions in self._reductions.values():
            reductions.unwatch()

    # --- steps ---------------------------------------------------------------------------------

    def step_function(self, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        """Horovod's own ends in that of the class it is made of."""
        kind = type(optimizer).__mro__[1 if is_horovod(optimizer) else 0]
        return kind.step  # type: ignore[attr-defined,no-any-return]

    def before_step(self, label: str) -> bool:
        """False for Horovod's outer step, which waits for reductions first."""
        if self._pending_gradients.step_begins(label):
            text = USED.format(name=label, version=self.handle.version)
            self.handle.give_up(text)
            self.handle.notice(text, logging.WARNING)
        reductions = self._reductions.get(label)
        return reductions is None or not reductions.step_begins()

    def step_completed(self, label: str) -> bool:
        """False for an inner step alone."""
        reductions = self._reductions.get(label)
        return reductions is None or reductions.step_ended()

    # --- versions ------------------------------------------------------------------------------

    def boundary_begins(self, forced: bool) -> None:
        """See whether it is between the backward passes of a step."""
        left = self._pending_gradients.at_boundary()
        self._between = left and not (forced or self.is_elastic)
        if self._between:
            self._count_misplaced()
        else:
            self._misplaced = 0
        if self._cut:
            self._warn_of_cut()
        if self.handle.steps_since_boundary:
            self._stepped_at = self.handle.iteration

    def vote(self) -> int:
        """Whether there is a version of this boundary, as far as this rank knows."""
        return VOID if self._between else 0

    def newly_unreduced(self) -> Iterable[torch.Tensor]:
        """Of what was frozen, or in none of the optimizers, what is trained and not reduced now."""
        thawed = [p for p in self._untrained if p.requires_grad]
        if not thawed:
            return ()
        handle = self.handle
        stepped = held([*handle.state.optimizers.values(), *handle.unregistered_optimizers])
        return [p for p in thawed if id(p) in stepped]

    def _count_misplaced(self) -> None:
        """The gradients so far would be in no version."""
        self._misplaced += self.handle.steps_since_boundary > 0
        if self._misplaced == MISPLACED_BOUNDARIES:
            self.handle.notice(MISPLACED.format(names=self._names()), logging.WARNING)

    def _warn_of_cut(self) -> None:
        at = self.resume_iteration(self.handle.iteration)
        version = self.handle.steps_made
        text = self._cut.format(version=version, at=at, names=self._names())
        self.handle.notice_once(text, logging.WARNING)

    def _names(self) -> str:
        """The optimizers between passes, in words; another rank's may be."""
        return some(self._pending_gradients.names) or "an optimizer"

    @contextlib.contextmanager
    def saving_now(self) -> Iterator[None]:
        """Know what the version that is taken now does not have."""
        self._cut = self._what_is_cut()
        try:
            yield
        finally:
            self._cut = ""

    def keeps_boundary(self) -> bool:
        """Where the passes since are made again: from there that is exact."""
        return self._cut is ACCUMULATED

    def resume_iteration(self, iteration: int) -> int:
        """Passes whose gradients no step has used yet are made again."""
        return min(iteration, self._stepped_at) if self._cut is ACCUMULATED else iteration

    def inconsistent(self) -> str:
        """Where a job that is to come back would come back without gradients."""
        if all(each.passes == 1 for each in self._reductions.values()):
            return ""
        mine = (self.handle.ends_early, self.handle.has_version)
        ends, there = zip(*self.group.all_gather_object(mine), strict=True)
        if any(ends) and all(there) and self._what_is_cut() is CUT:
            return ENDS_BETWEEN
        return ""

    def _what_is_cut(self) -> str:
        """Passes since the last boundary are made again, unless it was between passes itself, or
        a step came in between. Alike on all ranks; collective."""
        if not self._between_passes():
            return ""
        through = bool(self.handle.steps_since_boundary) or self._between
        return CUT if any(self.group.all_gather_object(through)) else ACCUMULATED

    def _between_passes(self) -> bool:
        """Whether any rank is: collective, where any of the optimizers makes several passes a
        step. A rank may have had no batch for one that others made."""
        if all(each.passes == 1 for each in self._reductions.values()):
            return False
        return any(self.group.all_gather_object(bool(self._pending_gradients.names)))

    # --- restores ------------------------------------------------------------------------------

    def restore_begins(self) -> None:
        """Drop what an iteration that was cut short has launched."""
        for reductions in self._reductions.values():
            reductions.settle(self.group)
        self._pending_gradients.forget()

    def resumed(self, iteration: int) -> None:
        """Behind a step, and between no passes."""
        self._stepped_at = iteration
        self._between, self._misplaced = False, 0

    def report_overwritten(self, by_rank: Mapping[int, Sequence[str]]) -> None:
        """Names of what was restored and the script has changed since, by the ranks on which."""
        names = dict.fromkeys(name for each in by_rank.values() for name in each)
        ranks = f"rank{'s' if len(by_rank) > 1 else ''} {some(list(by_rank))}"
        restored = self.handle.restored.version
        text = OVERWRITTEN.format(names=some(names), version=restored, ranks=ranks)
        self.handle.notice_once(text, logging.WARNING)


__all__ = ["HorovodAdapter"]
