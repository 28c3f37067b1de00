"""The adapter proper: what happens where Horovod launches reductions and makes steps."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import horovod.torch as hvd
import torch

import tierckpt
from tierckpt._text import some
from tierckpt.config import load_config
from tierckpt.core.halt_conditions import Reason
from tierckpt.core.votes import VOID
from tierckpt.format.ids import Lineage
from tierckpt.state.training_state import label_optimizers
from tierckpt.state.validate import refuse_model

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
FOLDERS = ("events_dir", "trace_dir")
"""Settings that name a folder where each rank has a file."""


class Checkpointer(tierckpt.Checkpointer):
    """Checkpoints a model that Horovod trains; see `tierckpt.Checkpointer` for the rest.

    Args:
        model: the module that is trained.
        optimizer: what `hvd.DistributedOptimizer` returned: one, a sequence, or a dict. Beside
            these there may be plain ones, whose parameters are each rank's own.
        settings: as in `tierckpt.Checkpointer`.

    Its ranks are those of the optimizer's process set, numbered within it. Several process sets are
    several jobs: each needs a `path` of its own. Where `events_dir` or `trace_dir` is set, each has
    a folder in there, `process-set-<id>`.

    Raises ConfigError in an elastic job, which is for `horovod_ckpt.elastic.TorchState`.
    """

    _stepped_at = 0
    """Calls of `step()` behind the newest boundary."""
    _cut = ""
    """While a version is taken between the backward passes of a step: ACCUMULATED or CUT."""
    _between = False
    """This boundary is between those passes on this rank: no rank has a version of it."""
    _misplaced = 0
    """Boundaries in a row that were so, though there was something new."""
    _is_elastic = False
    """True where somebody makes another one whenever ranks come or go."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, **settings: Any) -> None:
        if not hvd.is_initialized():
            raise tierckpt.ConfigError("call hvd.init() before making a Checkpointer")
        if not self._is_elastic:
            _refuse_elastic_job()
        refuse_model(model)
        optimizers = label_optimizers(optimizer)
        horovods: dict[str, Any] = {n: o for n, o in optimizers.items() if is_horovod(o)}
        for label, each in optimizers.items():
            _check_optimizer(label, each, horovods.values())
        process_set = _common_process_set(horovods.values())
        self._reductions = {name: Reductions(each) for name, each in horovods.items()}
        self._pending_gradients = PendingGradients(self._reductions)
        self._untrained: Sequence[torch.Tensor] = ()
        if process_set.size() > 1:
            self._untrained = _untrained(model, optimizers.values())
            reduced = [p for each in horovods.values() for p in each._requires_update]
            self.reduced = [*reduced, *self._untrained]
        self.releases_by_layer = all(r.known_before_step for r in self._reductions.values())
        settings = _with_folders_apart(settings, process_set)
        super().__init__(model, optimizer, group=current_group(process_set), **settings)
        self.state.assumed_alike = {id(param) for param in self._untrained}
        self._name_reductions(process_set)
        for reductions in self._reductions.values():
            reductions.watch(self.release)

    def _name_reductions(self, process_set: Any) -> None:
        """Tell the trace what Horovod's timeline, which rank 0 writes, will call them."""
        if self._trace is None:
            return
        names: dict[str, list[str]] = {}
        if process_set is hvd.global_process_set or 0 in process_set.ranks:
            for reductions in self._reductions.values():
                for tensor, param in reductions.tensors():
                    names.setdefault(tensor, []).append(self.state.name_of(param))
        self._trace.know(names)

    def restore(
        self,
        version: SupportsIndex | None = None,
        strict: bool = True,
        progress: bool | None = None,
    ) -> tierckpt.Restored:
        """See `tierckpt.Checkpointer`; what an iteration cut short launched is dropped."""
        for reductions in self._reductions.values():
            reductions.settle(self.group)
        self._pending_gradients.forget()
        return super().restore(version, strict, progress)

    def pack_adapter(self) -> Any:
        """Nothing; but the last moment to see what is each rank's own."""
        self._find_apart()

    def _find_apart(self) -> None:
        """Of what was frozen, or in none of the optimizers, and is not reduced now either."""
        thawed = [p for p in self._untrained if p.requires_grad]
        if not thawed:
            return
        held = _held([*self.state.optimizers.values(), *self._own_hooks.unregistered])
        self._keep_apart((p for p in thawed if id(p) in held), APART)

    def own_vote(self) -> int:
        """Whether there is a version of this boundary, as far as this rank knows."""
        return VOID if self._between else 0

    def _boundary(self, force: bool = False) -> None:
        left = self._pending_gradients.at_boundary()
        self._between = left and not (force or self._is_elastic)
        if self._between:
            self._count_misplaced()
        else:
            self._misplaced = 0
        if self._cut:
            self._tell_of_cut()
        if self._iterations.steps:
            self._stepped_at = self.iteration
        super()._boundary(force)

    def _count_misplaced(self) -> None:
        """The gradients so far would be in no version."""
        self._misplaced += self._iterations.steps > 0
        if self._misplaced == MISPLACED_BOUNDARIES:
            names = some(self._pending_gradients.names) or "an optimizer"  # another rank's
            self._reports.notice(MISPLACED.format(names=names), logging.WARNING)

    def _tell_of_cut(self) -> None:
        names = some(self._pending_gradients.names) or "an optimizer"  # another rank's
        version = self.steps_made
        self._say(self._cut.format(version=version, at=self._at(), names=names), logging.WARNING)

    def _save_now(self, end: float = math.inf) -> None:
        self._cut = self._what_is_cut()
        try:
            super()._save_now(end)
        finally:
            self._cut = ""

    def _keeps_boundary(self) -> bool:
        """The passes since are made again, and from there that is exact."""
        return self._cut is ACCUMULATED

    def _what_is_cut(self) -> str:
        """Passes since the last boundary are made again, unless it was between passes itself, or
        a step came in between. Alike on all ranks."""
        if not self._between_passes():
            return ""
        through = bool(self._iterations.steps) or self._between
        return CUT if any(self.group.all_gather_object(through)) else ACCUMULATED

    def _no_moment(self) -> str:
        """Nor is it one where a job that is to come back would come back without gradients."""
        why = super()._no_moment()
        if why or all(each.passes == 1 for each in self._reductions.values()):
            return why
        early, safe = self._halt.reason < Reason.NONE, self._agreement.memory.safe is not None
        ends, there = zip(*self.group.all_gather_object((early, safe)), strict=True)
        if any(ends) and all(there) and self._what_is_cut() is CUT:
            return ENDS_BETWEEN
        return ""

    def _go_on_from(self, lineage: Lineage, result: tierckpt.Restored) -> None:
        super()._go_on_from(lineage, result)
        self._stepped_at = self.iteration
        self._between, self._misplaced = False, 0

    def _at(self) -> int:
        """Passes whose gradients no step has used yet are made again."""
        at = super()._at()
        made_again = self._cut is ACCUMULATED and self._iterations.explicit
        return min(at, self._stepped_at) if made_again else at

    def report_overwritten(self, by_rank: Mapping[int, Sequence[str]]) -> None:
        """Names of what was restored and the script has changed since, by the ranks on which."""
        names = dict.fromkeys(name for each in by_rank.values() for name in each)
        ranks = f"rank{'s' if len(by_rank) > 1 else ''} {some(list(by_rank))}"
        text = OVERWRITTEN.format(names=some(names), version=self.restored.version, ranks=ranks)
        self._reports.notice(text, logging.WARNING if self.group.rank == 0 else logging.DEBUG)

    def _between_passes(self) -> bool:
        """Whether any rank is: collective, where any of the optimizers makes several passes a
        step. A rank may have had no batch for one that others made."""
        if all(each.passes == 1 for each in self._reductions.values()):
            return False
        return any(self.group.all_gather_object(bool(self._pending_gradients.names)))

    def _before_step(self, label: str) -> None:
        if self._pending_gradients.step_begins(label):
            text = USED.format(name=label, version=self.version)
            self._active.give_up(text)
            self._reports.notice(text, logging.WARNING)
        reductions = self._reductions.get(label)
        if reductions is None or not reductions.step_begins():
            super()._before_step(label)

    def _step_of(self, optimizer: torch.optim.Optimizer) -> Any:
        """Horovod's own ends in that of the class it is made of."""
        kind = type(optimizer).__mro__[1 if is_horovod(optimizer) else 0]
        return kind.step  # type: ignore[attr-defined]

    def _made_step(self, label: str) -> bool:
        reductions = self._reductions.get(label)
        return reductions is None or reductions.step_ended()

    def _shut_down(self, remove: bool, abandoned: bool = False) -> None:
        for reductions in self._reductions.values():
            reductions.unwatch()
        super()._shut_down(remove, abandoned)


def is_horovod(optimizer: Any) -> bool:
    """True for what `hvd.DistributedOptimizer` returns: an instance of a class made on the spot."""
    return type(optimizer).__module__ == "horovod.torch.optimizer"


def is_plain(label: str, optimizer: Any) -> str:
    """In words, of one that is not Horovod's."""
    kind = type(optimizer)
    return (
        f"optimizer {label!r} is a {kind.__name__} of {kind.__module__}, not what "
        "hvd.DistributedOptimizer returned"
    )


def in_elastic_job() -> bool:
    """Whether Horovod's launcher lets ranks come and go."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def _refuse_elastic_job() -> None:
    if in_elastic_job():
        raise tierckpt.ConfigError(
            "this is an elastic job (HOROVOD_ELASTIC=1), whose ranks come and go, and a "
            "Checkpointer is for those that there are when it is made: after the first loss it "
            "would wait for ever. Give the model and hvd.DistributedOptimizer's optimizer to "
            "horovod_ckpt.elastic.TorchState, which makes a new one each time; or start the job "
            "without --min-np, --max-np and --host-discovery-script"
        )


def _held(optimizers: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The parameters that these step, by `id()`."""
    groups = [group for each in optimizers for group in each.param_groups]
    return {id(p): p for group in groups for p in group["params"]}


def _untrained(model: torch.nn.Module, optimizers: Iterable[Any]) -> list[torch.Tensor]:
    """Parameters that are frozen, or in none of the optimizers."""
    held = _held(optimizers)
    every = {id(p): p for p in model.parameters()} | held
    return [p for i, p in every.items() if not p.requires_grad or i not in held]


def _check_optimizer(label: str, optimizer: Any, horovods: Iterable[Any]) -> None:
    """Raise ConfigError for what cannot be given. A plain one may be beside `horovods`."""
    if not is_horovod(optimizer):
        if horovods and _held(horovods).keys().isdisjoint(_held([optimizer])):
            return
        raise tierckpt.ConfigError(
            f"{is_plain(label, optimizer)}. Horovod's does not share its state with the one "
            "it was made from, so pass the one whose step() is called"
        )
    if hasattr(optimizer, "_starting_models"):
        raise tierckpt.ConfigError(
            "op=hvd.Adasum is not supported: each rank's optimizer then steps on the rank's own "
            "gradients, so momentum and the like differ from rank to rank, and a checkpoint has "
            "one copy of them, of which every rank stores a part. Use hvd.Average or hvd.Sum"
        )


def _common_process_set(optimizers: Iterable[Any]) -> Any:
    sets = [getattr(o, "process_set", hvd.global_process_set) for o in optimizers]
    if any(s is not sets[0] for s in sets):
        raise tierckpt.ConfigError(
            "the optimizers have different process sets; make a Checkpointer for each, with a path "
            "of its own"
        )
    if not sets[0].included():
        raise tierckpt.ConfigError(
            f"rank {hvd.rank()} is not in the optimizer's process set {sets[0].ranks}; make the "
            "Checkpointer on the ranks that are, and one with another path for the others; or call "
            "horovod_ckpt.install, which takes nothing on those"
        )
    return sets[0]


def _with_folders_apart(settings: Mapping[str, Any], process_set: Any) -> dict[str, Any]:
    """A folder for each process set: files are named after ranks, which each set numbers from 0,
    and one environment may tell all sets the same place."""
    if process_set is hvd.global_process_set:
        return dict(settings)
    given = {name: settings.get(name) for name in FOLDERS}
    try:
        config = load_config(given, config_file=settings.get("config_file"))
    except tierckpt.ConfigError:
        return dict(settings)  # the Checkpointer will say so, on all ranks
    mine = f"process-set-{process_set.process_set_id}"
    found = {name: getattr(config, name) for name in FOLDERS}
    return {**settings, **{n: os.path.join(folder, mine) for n, folder in found.items() if folder}}
