"""The adapter of Horovod: it watches the launches of reductions, and the optimizers' steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    "v{version} has no gradients of the backward passes after its step: restore() will return "
    "{at}, and the passes are made again. They have changed random streams and buffers already: "
    "call close() and save(now=True) right after a step if a resumed run is to give the same bits"
)
CUT = (
    "v{version} has no gradients of the backward passes that {names} made since its last step, and "
    "another optimizer has made a step since: if the loop still needs these gradients, a resumed "
    "run continues without them. Call close() and save(now=True) when no optimizer is between the "
    "backward passes of its step"
)
USED = (
    "{name} used gradients that existed at the boundary of v{version}; at earlier boundaries the "
    "loop had dropped such gradients. Versions since its last step have no gradients: a run that "
    "is resumed from one of them continues without these"
)
ENDS_BETWEEN = (
    "the job ends early, and an optimizer is between the backward passes of a step: the previous "
    "version is exact, and a restart repeats the iterations after it"
)
MISPLACED_BOUNDARIES = 8
"""Number of boundaries in a row with new steps but without a version, after which a warning
follows."""
MISPLACED = (
    f"the last {MISPLACED_BOUNDARIES} boundaries came between the backward passes of a step of "
    "{names} (backward_passes_per_step). No version is taken there, because checkpoints do not "
    "contain the gradients so far. Call step() or commit() after optimizer.step(); with several "
    "optimizers, when none is between its passes. If no step uses these gradients (a generator's "
    "pass through the discriminator leaves some), drop them by model.zero_grad(set_to_none=True) "
    "before the boundary, or avoid them by requires_grad_(False)"
)
APART = (
    "{names}: trained now, and not reduced by Horovod, as they were not trained when "
    "hvd.DistributedOptimizer was made. From now on each rank stores its own values of them. If "
    "the loop does not reduce their gradients itself, ranks differ: start the script again, and "
    "make hvd.DistributedOptimizer after all parameters to train are unfrozen and in the "
    "optimizer; use restore(strict=False) if the parameter groups then differ"
)
OVERWRITTEN = (
    "{names} changed after the restore of v{version}, on {ranks}: hvd.broadcast_parameters or "
    "hvd.broadcast_optimizer_state replaces the restored values on all ranks by those of the root. "
    "If your script loads checkpoints of its own, and the restored version is to win, load them "
    "before hvd.DistributedOptimizer"
)


class HorovodAdapter(PlainAdapter):
    """The adapter of a model that Horovod trains. See `Adapter` for the methods."""

    newly_unreduced_notice = APART
    is_elastic = False
    """True if a new adapter is made whenever ranks join or leave."""

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
        """Number of boundaries in a row with new steps but between those passes."""

    def reduced_parameters(self) -> Sequence[torch.Tensor] | None:
        """The parameters of Horovod's optimizers, and those that are not trained."""
        return self._reduced

    def untrained_parameters(self) -> Sequence[torch.Tensor]:
        """The parameters that were frozen, or in no optimizer, when the Checkpointer was made."""
        return self._untrained

    def attached(self, handle: Handle) -> None:
        """Watch the reductions."""
        super().attached(handle)
        self._name_reductions(handle)
        for reductions in self._reductions.values():
            reductions.watch(handle.release)

    def _name_reductions(self, handle: Handle) -> None:
        """Give the trace the names of reductions in Horovod's timeline, which Horovod's rank 0
        writes."""
        if not handle.traces:
            return
        names: dict[str, list[str]] = {}
        if self.process_set is hvd.global_process_set or 0 in self.process_set.ranks:
            for reductions in self._reductions.values():
                for tensor, param in reductions.tensors():
                    names.setdefault(tensor, []).append(handle.state.name_of(param))
        handle.name_reductions(names)

    def closed(self) -> None:
        """Stop watching the reductions."""
        for reductions in self._reductions.values():
            reductions.unwatch()

    # --- steps ---------------------------------------------------------------------------------

    def step_class(self, optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
        """The optimizer's own class, whose `step` Horovod's calls at its end."""
        return type(optimizer).__mro__[1 if is_horovod(optimizer) else 0]

    def before_step(self, label: str) -> bool:
        """False for Horovod's outer step, which first waits for reductions."""
        if self._pending_gradients.step_begins(label):
            text = USED.format(name=label, version=self.handle.version)
            self.handle.give_up(text)
            self.handle.notice(text, logging.WARNING)
        reductions = self._reductions.get(label)
        return reductions is None or not reductions.step_begins()

    def reads_gradients(self, label: str) -> bool:
        """False for Horovod's outer step."""
        reductions = self._reductions.get(label)
        return reductions is None or reductions.in_inner_step

    def step_completed(self, label: str) -> bool:
        """False for an inner step alone."""
        reductions = self._reductions.get(label)
        return reductions is None or reductions.step_ended()

    # --- versions ------------------------------------------------------------------------------

    def boundary_begins(self, forced: bool) -> None:
        """Find out whether the boundary is between the backward passes of a step."""
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
        """VOID if this boundary is between backward passes on this rank, else 0."""
        return VOID if self._between else 0

    def newly_unreduced(self) -> Iterable[torch.Tensor]:
        """Those of `untrained_parameters` that are trained now; Horovod does not reduce them."""
        thawed = [p for p in self._untrained if p.requires_grad]
        if not thawed:
            return ()
        handle = self.handle
        stepped = held([*handle.state.optimizers.values(), *handle.unregistered_optimizers])
        return [p for p in thawed if id(p) in stepped]

    def _count_misplaced(self) -> None:
        """Count a boundary without a version, and warn after several in a row."""
        self._misplaced += self.handle.steps_since_boundary > 0
        if self._misplaced == MISPLACED_BOUNDARIES:
            self.handle.notice(MISPLACED.format(names=self._names()), logging.WARNING)

    def _warn_of_cut(self) -> None:
        at = self.resume_iteration(self.handle.iteration)
        version = self.handle.steps_made
        text = self._cut.format(version=version, at=at, names=self._names())
        self.handle.notice_of_all(text, logging.WARNING)

    def _names(self) -> str:
        """The optimizers between passes, in words; there may be none on this rank."""
        return some(self._pending_gradients.names) or "an optimizer"

    @contextlib.contextmanager
    def saving_now(self) -> Iterator[None]:
        """Note which gradients the version that is taken now does not have. Entering is
        collective."""
        self._cut = self._missing_gradients()
        try:
            yield
        finally:
            self._cut = ""

    def keeps_boundary(self) -> bool:
        """True if the passes since the boundary are made again: a restart from there is exact."""
        return self._cut is ACCUMULATED

    def resume_iteration(self, iteration: int) -> int:
        """The iteration to continue with: backward passes without a step yet are made again."""
        return min(iteration, self._stepped_at) if self._cut is ACCUMULATED else iteration

    def inconsistent(self) -> str:
        """ENDS_BETWEEN if the job ends early and its restart would lack gradients; else empty.
        Collective."""
        if not self._several_passes:
            return ""
        facts = (self.handle.ends_early, self.handle.has_version)
        ends, have_version = zip(*self.group.all_gather_object(facts), strict=True)
        if any(ends) and all(have_version) and self._missing_gradients() is CUT:
            return ENDS_BETWEEN
        return ""

    def _missing_gradients(self) -> str:
        """ACCUMULATED or CUT if a version taken now would lack gradients; else empty. Equal on all
        ranks; collective.

        The passes since the last boundary can be made again (ACCUMULATED), unless the boundary
        itself was between passes, or a step came after it (CUT)."""
        if not self._between_passes():
            return ""
        through = bool(self.handle.steps_since_boundary) or self._between
        return CUT if any(self.group.all_gather_object(through)) else ACCUMULATED

    @property
    def _several_passes(self) -> bool:
        """True if any optimizer makes several backward passes per step; equal on all ranks."""
        return any(each.passes != 1 for each in self._reductions.values())

    def _between_passes(self) -> bool:
        """True if any rank is between the passes of a step. Collective, if any optimizer makes
        several passes per step. Ranks may differ: one may have had no batch for a pass."""
        if not self._several_passes:
            return False
        return any(self.group.all_gather_object(bool(self._pending_gradients.names)))

    # --- restores ------------------------------------------------------------------------------

    def restore_begins(self) -> None:
        """Drop the reductions that an interrupted iteration has launched."""
        for reductions in self._reductions.values():
            reductions.settle(self.group)
        self._pending_gradients.forget()

    def resumed(self, iteration: int) -> None:
        """Start after a step, and not between passes."""
        self._stepped_at = iteration
        self._between, self._misplaced = False, 0

    def report_overwritten(self, by_rank: Mapping[int, Sequence[str]]) -> None:
        """Warn that the script has changed restored tensors: their names, by rank."""
        names = dict.fromkeys(name for each in by_rank.values() for name in each)
        ranks = f"rank{'s' if len(by_rank) > 1 else ''} {some(list(by_rank))}"
        restored = self.handle.restored.version
        text = OVERWRITTEN.format(names=some(names), version=restored, ranks=ranks)
        self.handle.notice_of_all(text, logging.WARNING)


__all__ = ["HorovodAdapter"]
