"""The adapter of Horovod: it watches the launches of reductions, and the optimizers' steps.

The optimizers that a script gives, and their process set, are checked here.

Reductions: their launches, and their end after a failure.

Horovod matches the operations of all ranks by name. If one rank leaves an operation out, it never
ends on the others, and Horovod refuses the next operation of this name. So after an interrupted
iteration each rank first launches the operations that only other ranks have launched.

Pending gradients: gradients that exist at a boundary and that no step has used yet.

With several backward passes per step, a boundary of one optimizer may lie between the passes of
another one. A version contains no gradients, so a run resumed from there would continue without
them. So no rank takes a version at a boundary where some rank has pending gradients.

But some loops drop such gradients before a step could use them: if a GAN's generator is trained
through the discriminator, `netD.zero_grad()` comes before the discriminator's next pass. The
boundary does not show that. The next step of the optimizer does: the gradients of the boundary
still exist, or not. After an optimizer's gradients were dropped LEARNT times in a row, they are
assumed to be dropped, until a step uses them.

The Checkpointer of Horovod jobs that are not elastic, and its entry points.

These are a drop-in for `hvd.DistributedOptimizer`, and `install` for its results.

A rank outside its optimizer's process set takes no checkpoints.

Horovod lets every rank make the optimizer, and ranks outside the set step without reductions. So
one script runs on all ranks: on such a rank these methods do nothing, and no checkpoint contains
the rank's state.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import operator
import os
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from msgspec import Struct

import tierckpt
from tierckpt._text import some
from tierckpt.checkpointer.adapter import VOID, Handle, PlainAdapter
from tierckpt.checkpointer.checkpointer import attach_to_script, give_attribute
from tierckpt.config import load_config
from tierckpt.group import Group
from tierckpt.hooks.optimizer_steps import others_come_first
from tierckpt.settings import Arguments, with_settings
from tierckpt.state.names import named_buffers, named_parameters
from tierckpt.state.optimizers import refuse_model
from tierckpt.state.training_state import label_optimizers

from .horovod_group import current_group

__all__ = [
    "Checkpointer",
    "HorovodAdapter",
    "Outside",
    "PendingGradients",
    "check_optimizer",
    "common_process_set",
    "held",
    "in_elastic_job",
    "is_horovod",
    "is_plain",
    "refuse_elastic_job",
    "stands_outside",
    "untrained",
]


def is_horovod(optimizer: Any) -> bool:
    """True for a result of `hvd.DistributedOptimizer`, which makes a class for each result."""
    return type(optimizer).__module__ == "horovod.torch.optimizer"


def is_plain(label: str, optimizer: Any) -> str:
    """Describe an optimizer not of Horovod, for error messages."""
    kind = type(optimizer)
    return (
        f"optimizer {label!r} is a {kind.__name__} of {kind.__module__}, not a result of "
        "hvd.DistributedOptimizer"
    )


def in_elastic_job() -> bool:
    """True if Horovod's launcher lets ranks join and leave the job."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def refuse_elastic_job() -> None:
    if in_elastic_job():
        raise tierckpt.ConfigError(
            "this is an elastic job (HOROVOD_ELASTIC=1): its ranks join and leave, but a "
            "Checkpointer serves a fixed set of ranks, and would wait for ever after the first "
            "loss. Give the model and hvd.DistributedOptimizer's optimizer to "
            "horovod_ckpt.elastic.TorchState, which makes a new Checkpointer each time; or start "
            "the job without --min-np, --max-np and --host-discovery-script"
        )


def held(optimizers: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The parameters of these optimizers, by `id()`."""
    groups = [group for each in optimizers for group in each.param_groups]
    return {id(p): p for group in groups for p in group["params"]}


def untrained(model: torch.nn.Module, optimizers: Iterable[Any]) -> list[torch.Tensor]:
    """The parameters that are frozen, or in no optimizer."""
    stepped = held(optimizers)
    every = {id(p): p for p in model.parameters()} | stepped
    return [p for i, p in every.items() if not p.requires_grad or i not in stepped]


def check_optimizer(label: str, optimizer: Any, horovods: Iterable[Any]) -> None:
    """Raise ConfigError for an unsupported optimizer. A plain one is allowed beside `horovods`."""
    if not is_horovod(optimizer):
        if horovods and held(horovods).keys().isdisjoint(held([optimizer])):
            return
        raise tierckpt.ConfigError(
            f"{is_plain(label, optimizer)}. Horovod's optimizer does not share its state with the "
            "one it was made from, so pass the one that the loop steps"
        )
    if hasattr(optimizer, "_starting_models"):
        raise tierckpt.ConfigError(
            "op=hvd.Adasum is not supported: with it each rank's optimizer uses the rank's own "
            "gradients, so momentum and similar state differ between ranks, but a checkpoint has "
            "one copy of the state, and every rank stores a part of it. Use hvd.Average or hvd.Sum"
        )


def common_process_set(optimizers: Iterable[Any]) -> Any:
    sets = [getattr(o, "process_set", hvd.global_process_set) for o in optimizers]
    if any(s is not sets[0] for s in sets):
        raise tierckpt.ConfigError(
            "the optimizers have different process sets; make a Checkpointer for each, with a path "
            "of its own"
        )
    if not sets[0].included():
        raise tierckpt.ConfigError(
            f"rank {hvd.rank()} is not in the optimizer's process set {sets[0].ranks}; make the "
            "Checkpointer on the ranks of the set, and one with another path on the other ranks; "
            "or call horovod_ckpt.install, which takes no checkpoints on other ranks"
        )
    return sets[0]


LAUNCHERS = ("_allreduce_grad_async", "_grouped_allreduce_grad_async")
"""Methods that Horovod's backward hooks and `synchronize` look up at each call."""


class Launch(Struct, frozen=True):
    """The description of one launched reduction, from which another rank can launch its part."""

    names: tuple[str, ...]
    """Horovod's names of the parameters."""
    grouped: bool
    sparse_dims: int = 0
    """Number of dimensions with indices, for a sparse gradient reduced by a gather of its indices
    and its values. 0: a dense gradient."""

    def zeros(self, param: torch.Tensor) -> torch.Tensor:
        """A zero gradient of the parameter, reduced in the same way."""
        if not self.sparse_dims:
            return torch.zeros_like(param)
        indices = param.new_empty((self.sparse_dims, 0), dtype=torch.int64)
        values = param.new_empty((0, *param.shape[self.sparse_dims :]))
        return torch.sparse_coo_tensor(indices, values, param.shape)


_launches: weakref.WeakKeyDictionary[Any, tuple[Any, Counter[Launch]]] = weakref.WeakKeyDictionary()
"""For each optimizer: the run of Horovod, and the number of launches of each reduction in it. Kept
after `unwatch`: a later checkpointer may have to settle an iteration that ended an earlier one."""


def _launches_of(optimizer: Any) -> Counter[Launch]:
    """The launches since the last start of Horovod: a shutdown, by an elastic job or by the script,
    ends all operations that ranks had in common."""
    run_id = mpi_ops._handle_map  # made by `hvd.init()`; the reference here keeps it unique
    known = _launches.get(optimizer)
    if known is None or known[0] is not run_id:
        known = _launches[optimizer] = run_id, Counter()
    return known[1]


class Reductions:
    """The gradient reductions of one Horovod optimizer. Training thread.

    Horovod's step contains another step: its own `step` synchronizes and then calls the wrapped
    optimizer's `step`, and torch's hooks run for both. Only the inner step changes weights, so
    copies must be complete there; both together are one step of the training.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._release: Callable[[Iterable[torch.Tensor]], None] | None = None
        self._entered = 0
        """Number of pre-hooks that ran since the last whole step."""
        self._launchers: list[_Launcher] = []
        self.known_before_step = bool(optimizer._grad_accs)
        """True if reductions are launched in the backward pass. In a job with one rank Horovod
        registers no hooks for that."""

    def watch(self, release: Callable[[Iterable[torch.Tensor]], None]) -> None:
        """Call `release(parameters)` after each launch of a reduction."""
        self._release = release
        self._launchers = [_Launcher.of(self._optimizer, name) for name in LAUNCHERS]
        for launcher in self._launchers:
            launcher.watching.append(self._saw)

    def unwatch(self) -> None:
        """Undo `watch`. Other watchers of the optimizer stay."""
        for launcher in self._launchers:
            launcher.watching.remove(self._saw)
            launcher.end_if_idle()
        self._launchers = []
        self._release = None

    def _saw(self, launched: Any) -> None:
        if self._release is not None:
            self._release(launched if isinstance(launched, tuple) else (launched,))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every name that a reduction can have in Horovod's timeline, and its parameter.

        A group's tensors are named after its first one; tensors without a gradient in an iteration
        are reduced alone. A sparse gradient is gathered, in two parts.
        """
        optimizer = self._optimizer
        names = optimizer._parameter_names
        for param, name in names.items():
            if param in optimizer._requires_update:
                yield f"allreduce.{name}", param
                yield f"allgather.{name}.indices", param
                yield f"allgather.{name}.values", param
        for group in optimizer._group_counts:
            for number, param in enumerate(group, 1):
                yield f"grouped_allreduce.{names[group[0]]}_{number}of{len(group)}", param

    # --- steps ---------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        """Number of backward passes per step."""
        return int(self._optimizer.backward_passes_per_step)

    @property
    def accumulating(self) -> bool:
        """True between the backward passes of a step.

        Reductions in progress do not show it: one model's backward pass may launch those of another
        model. Nor does a single parameter: a rank may not have used it in every pass.
        """
        if self.passes == 1:
            return False
        left = self._optimizer._allreduce_delay.values()
        return 0 < min(left, default=self.passes) < self.passes

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters with a gradient, and their gradients."""
        params = self._optimizer._allreduce_delay
        return [(param, param.grad) for param in params if param.grad is not None]

    def step_starts(self) -> bool:
        """Note that a pre-hook runs; True if no weights change before the next pre-hook."""
        self._entered += 1
        optimizer = self._optimizer
        # With reductions in progress, a step that synchronizes first waits for them. Other hooks
        # run before that, and may change weights (`GlobalStepHook`).
        # If the backward pass is the step's closure, the inner step has reductions, too.
        first = self._entered == 1
        waits = bool(first and optimizer._should_synchronize and optimizer._handles)
        return waits and not others_come_first(optimizer)

    @property
    def in_inner_step(self) -> bool:
        """True after the second pre-hook of a step."""
        return self._entered >= 2

    def step_ended(self) -> bool:
        """Note that a post-hook runs; True if it ends a step of the training.

        False for an inner step alone: `hvd.broadcast_optimizer_state` makes one to create optimizer
        state.
        """
        whole = self._entered >= 2
        self._entered = 0
        return whole

    # --- after an interrupted iteration --------------------------------------------------------

    def settle(self, group: Group) -> None:
        """End all launched reductions, after an iteration that ended at different points of ranks.
        Collective.

        Each rank launches, with zeros, the reductions that only others have launched. Then all
        reductions end, and this waits for them: before that Horovod may write into gradients, and
        it keeps the results until they are taken.
        """
        launched = _launches_of(self._optimizer)
        gathered: list[Counter[Launch]] = group.all_gather_object(launched)
        missing = functools.reduce(operator.or_, gathered) - launched
        # Handles are numbers, which Horovod reuses after a new start: a handle left from an earlier
        # run of an elastic job may belong to another operation now.
        names_here = {launch.names for launch in launched}
        open_handles = self._optimizer._handles.items()
        handles = [h for key, (h, _) in open_handles if _names(self._optimizer, key) in names_here]
        handles += [self._launch_zeros(launch) for launch in missing]
        for handle in handles:
            _drain(handle)
        self._forget()

    def _launch_zeros(self, launch: Launch) -> Any:
        """Launch this rank's part with zeros; returns the handle. The parameters keep their
        gradients."""
        optimizer = self._optimizer
        param_of = {name: p for p, name in optimizer._parameter_names.items()}
        params = tuple(param_of[name] for name in launch.names)
        before = [p.grad for p in params]
        for param in params:
            param.grad = launch.zeros(param)
        try:
            if launch.grouped:
                handle, _ = optimizer._grouped_allreduce_grad_async(params)
            else:
                handle, _ = optimizer._allreduce_grad_async(params[0])
        finally:
            for param, gradient in zip(params, before, strict=True):
                param.grad = gradient
        return handle

    def _forget(self) -> None:
        """Start a new iteration, as Horovod does when an optimizer's state is loaded."""
        optimizer = self._optimizer
        optimizer._handles = {}
        optimizer._synchronized = False
        optimizer._should_synchronize = True
        for param in optimizer._allreduce_delay:
            optimizer._allreduce_delay[param] = optimizer.backward_passes_per_step
        for group in optimizer._group_counts:
            optimizer._group_counts[group] = 0
        self._entered = 0


class _Launcher:
    """Replaces a method of one optimizer: launches the reduction, then calls all watchers."""

    def __init__(self, optimizer: Any, name: str) -> None:
        self._optimizer, self._name = optimizer, name
        self._before = vars(optimizer).get(name)
        """The attribute that a script had set in the place of the method, if any."""
        self._launch: Callable[[Any], Any] = getattr(optimizer, name)
        self.watching: list[Callable[[Any], None]] = []
        setattr(optimizer, name, self)

    @classmethod
    def of(cls, optimizer: Any, name: str) -> _Launcher:
        """The existing launcher of this method, else a new one."""
        found = getattr(optimizer, name)
        return found if isinstance(found, cls) else cls(optimizer, name)

    def __call__(self, launched: Any) -> Any:
        handle = self._launch(launched)
        _launches_of(self._optimizer)[_description(self._optimizer, launched)] += 1
        for callback in tuple(self.watching):
            callback(launched)
        return handle

    def end_if_idle(self) -> None:
        """Restore the original method, unless there are watchers, or the script has replaced the
        launcher."""
        if self.watching or vars(self._optimizer).get(self._name) is not self:
            return
        if self._before is None:
            delattr(self._optimizer, self._name)
        else:
            setattr(self._optimizer, self._name, self._before)


def _description(optimizer: Any, launched: Any) -> Launch:
    """The description of a launch of this moment: of a group (a tuple), or of one parameter."""
    grouped = isinstance(launched, tuple)
    sparse = not grouped and launched.grad.is_sparse and not optimizer.sparse_as_dense
    return Launch(_names(optimizer, launched), grouped, launched.grad.sparse_dim() if sparse else 0)


def _names(optimizer: Any, launched: Any) -> tuple[str, ...]:
    names = optimizer._parameter_names
    return tuple(names[p] for p in (launched if isinstance(launched, tuple) else (launched,)))


def _drain(handle: Any) -> None:
    """Wait for a reduction and drop its result. None: it was not launched yet."""
    if handle is None:
        return
    # It may have failed, which interrupted the iteration, or its result may have been taken. If a
    # rank was lost, the collectives of the restore that follows notice it.
    with contextlib.suppress(Exception):
        handle() if callable(handle) else hvd.synchronize(handle)


LEARNT = 3
Gradients = list[tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]]
"""Parameters and their gradients at the boundary."""


class PendingGradients:
    """The pending gradients of one rank. Training thread; keeps no gradient alive."""

    def __init__(self, reductions: Mapping[str, Reductions]) -> None:
        """`reductions`: those of each optimizer; they stay their owner's."""
        self._reductions = reductions
        self._left: dict[str, Gradients] = {}
        """The gradients of the last boundary, for each optimizer without a step since then."""
        self._dropped: Counter[str] = Counter()
        """For each optimizer, how many times in a row its gradients were dropped."""

    @property
    def names(self) -> list[str]:
        """Optimizers that are between the passes of a step on this rank, with gradients that a step
        may use."""
        return [name for name in self._look() if not self._drops(name)]

    def at_boundary(self) -> bool:
        """Look at the gradients of a boundary; True if a step may use some of them."""
        for name, left in self._left.items():
            self._dropped[name] += not _are_there(left)
        self._left = self._look()
        return not all(map(self._drops, self._left))

    def step_starts(self, name: str) -> bool:
        """Note that an optimizer's step starts; True if it uses gradients that were assumed to be
        dropped."""
        left = self._left.pop(name, None)
        if left is None:
            return False
        trusted, used = self._drops(name), _are_there(left)
        self._dropped[name] = 0 if used else self._dropped[name] + 1
        return used and trusted

    def _drops(self, name: str) -> bool:
        return self._dropped[name] >= LEARNT

    def forget(self) -> None:
        """Forget the gradients of an interrupted iteration."""
        self._left = {}

    def _look(self) -> dict[str, Gradients]:
        found = {n: each.gradients() for n, each in self._reductions.items() if each.accumulating}
        return {
            name: [(weakref.ref(param), weakref.ref(gradient)) for param, gradient in gradients]
            for name, gradients in found.items()
            if gradients
        }


def _are_there(left: Gradients) -> bool:
    for param_of, gradient_of in left:
        param, gradient = param_of(), gradient_of()
        if param is not None and gradient is not None and param.grad is gradient:
            return True
    return False


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
        """The optimizer's own class: Horovod's step calls its `step` at the end."""
        return type(optimizer).__mro__[1 if is_horovod(optimizer) else 0]

    def before_step(self, label: str) -> bool:
        """False for Horovod's outer step, which first waits for reductions."""
        if self._pending_gradients.step_starts(label):
            text = USED.format(name=label, version=self.handle.version)
            self.handle.give_up(text)
            self.handle.notice(text, logging.WARNING)
        reductions = self._reductions.get(label)
        return reductions is None or not reductions.step_starts()

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
        """The optimizers between passes, as text; there may be none on this rank."""
        return some(self._pending_gradients.names) or "an optimizer"

    @contextlib.contextmanager
    def saving_now(self) -> Iterator[None]:
        """Note which gradients a version taken now does not have. Entering is collective."""
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


FOLDERS = ("events_dir", "trace_dir")
"""Settings that name a folder where each rank has a file."""


@with_settings
class Checkpointer(tierckpt.Checkpointer):
    """Checkpoints a model that Horovod trains; see `tierckpt.Checkpointer` for the rest.

    Args:
        model: the trained module.
        optimizer: the result of `hvd.DistributedOptimizer`: one, a sequence, or a dict. There may
            also be plain optimizers among them, for parameters that are each rank's own.
        settings: `extra` and the other arguments of `tierckpt.Checkpointer`, and all settings.

    Its ranks are those of the optimizer's process set, numbered within it. Several process sets are
    several jobs: each needs a `path` of its own. If `events_dir` or `trace_dir` is set, each set
    has a folder in it, `process-set-<id>`.

    Raises ConfigError in an elastic job: use `horovod_ckpt.elastic.TorchState` there.
    """

    adapter: HorovodAdapter

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, **settings: Unpack[Arguments]
    ) -> None:
        adapter = HorovodAdapter(model, optimizer)
        settings = _with_folders_apart(settings, adapter.process_set)
        super().__init__(model, optimizer, adapter=adapter, group=adapter.group, **settings)


def _with_folders_apart(settings: Arguments, process_set: Any) -> Arguments:
    """Give each process set its own folder in `events_dir` and `trace_dir`: files are named after
    ranks, each set numbers its ranks from 0, and all sets may have the same setting."""
    if process_set is hvd.global_process_set:
        return settings
    given = {name: settings.get(name) for name in FOLDERS}
    try:
        config = load_config(given, config_file=settings.get("config_file"))
    except tierckpt.ConfigError:
        return settings  # the Checkpointer raises it again, on all ranks
    folder = f"process-set-{process_set.process_set_id}"
    apart = settings.copy()
    if config.events_dir:
        apart["events_dir"] = os.path.join(config.events_dir, folder)
    if config.trace_dir:
        apart["trace_dir"] = os.path.join(config.trace_dir, folder)
    return apart


OUTSIDE = (
    "rank %d is not in the optimizer's process set %s: its state is in no checkpoint, its "
    "restore() returns 0, and Horovod does not reduce its gradients. If it is to follow the other "
    "ranks, broadcast the result of their restore() to it"
)


class Outside:
    """The methods of a Checkpointer that loops call. None of them waits for another rank."""

    version = iteration = 0
    metric: float | None = None
    exit_reason = ""
    interrupted = False
    end: tierckpt.JobEnd | None = None

    def __init__(self) -> None:
        self.restored = tierckpt.Restored(0)
        self.closed = False

    def restore(self, *_: Any, **__: Any) -> tierckpt.Restored:
        """Restore nothing; returns 0."""
        return self.restored

    def should_exit(self) -> bool:
        """False."""
        return False

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """True: there is nothing to wait for."""
        return True

    def pin(self, version: int) -> tuple[str, ...]:
        """Nothing."""
        return ()

    unpin = pin

    def step(self, metric: float | None = None) -> None:
        """Nothing."""

    def save(self, now: bool = False) -> None:
        """Nothing."""

    def register(self, name: str, obj: Any, per_rank: bool = False) -> None:
        """Nothing."""

    def add_callbacks(self, callbacks: tierckpt.Callbacks) -> None:
        """Nothing: they would never be called."""

    def complete(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Only set `closed`."""
        self.closed = True

    abandon = close_or_abandon = close

    def __enter__(self) -> Outside:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stands_outside(optimizers: Iterable[Any]) -> bool:
    """True if all optimizers have one process set, and this rank is not in it. Logs a warning."""
    sets = [getattr(each, "process_set", hvd.global_process_set) for each in optimizers]
    if not sets or any(each is not sets[0] for each in sets) or sets[0].included():
        return False
    logging.getLogger("tierckpt").warning(OUTSIDE, hvd.rank(), sets[0].ranks)
    return True


class DistributedArguments(Arguments, total=False):
    """The arguments of `hvd.DistributedOptimizer` and of a Checkpointer."""

    named_parameters: Any
    compression: Any
    backward_passes_per_step: int
    op: Any
    gradient_predivide_factor: float
    num_groups: int
    groups: Any
    sparse_as_dense: bool
    process_set: Any


HOROVODS = tuple(inspect.signature(hvd.DistributedOptimizer).parameters)
"""Names of Horovod's own arguments, in order."""


@with_settings
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    *args: Any,
    model: torch.nn.Module | None = None,
    restore: bool = False,
    close_at_exit: bool = False,
    **settings: Unpack[DistributedArguments],
) -> Any:
    """Make a `hvd.DistributedOptimizer` and its checkpointer in one call.

    Takes every argument of Horovod's function, by name or position, and all of
    `tierckpt.Checkpointer` (`path`, `extra`, ...) by name. Returns Horovod's optimizer, which has
    the `Checkpointer` as its attribute `checkpointer`.

    Args:
        optimizer: the optimizer to distribute.
        args: Horovod's positional arguments.
        model: the trained module. May be left out if `named_parameters` comes directly
            from the whole module's `named_parameters()`.
        restore: restore the newest version at once.
        close_at_exit: take a final checkpoint when the script ends without an exception.
        settings: keyword arguments of Horovod and of a Checkpointer.

    Raises ConfigError if the model is not known, and the errors of Horovod and of Checkpointer.
    """
    if model is None:
        model = find_model(args, settings)
    ours: dict[str, Any] = {**settings}
    horovods = {n: ours.pop(n) for n in HOROVODS if n in ours}
    distributed = hvd.DistributedOptimizer(optimizer, *args, **horovods)
    checkpointer = install(distributed, model, **ours)
    if not isinstance(checkpointer, Outside):
        attach_to_script(checkpointer, restore, close_at_exit)
    return distributed


@with_settings
def install(
    optimizer: Any | Mapping[str, Any], model: torch.nn.Module, **settings: Unpack[Arguments]
) -> Checkpointer | Outside:
    """Add checkpoints to optimizers that `hvd.DistributedOptimizer` has returned.

    Returns the Checkpointer, which is also the attribute `checkpointer` of each optimizer. On a
    rank outside the optimizer's process set it is an `Outside`, which takes no checkpoints.
    """
    optimizers = label_optimizers(optimizer)
    if hvd.is_initialized() and stands_outside(optimizers.values()):
        outside = Outside()
        for each in optimizers.values():
            each.checkpointer = outside  # type: ignore[attr-defined]
        return outside
    made = Checkpointer(model, optimizer, **settings)
    give_attribute(made)
    return made


def find_model(args: Sequence[Any], settings: Mapping[str, Any]) -> torch.nn.Module:
    """Find the model in the arguments after the optimizer of a `DistributedOptimizer` call without
    `model`. Raises ConfigError if it is not known."""
    known = dict(zip(HOROVODS[1:], args, strict=False))
    return _model_of(known.get("named_parameters", settings.get("named_parameters")))


def _model_of(named: Any) -> torch.nn.Module:
    """The module of the `named_parameters()` that returned this unused generator.

    A checkpoint needs the module's buffers, but Horovod receives only parameters. The generator has
    a reference to the module. Raises ConfigError for anything else, and for a part of a model.
    """
    if isinstance(named, types.GeneratorType) and named.gi_frame is not None:
        owner = named.gi_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            _refuse_a_part(owner)
            return owner
    raise tierckpt.ConfigError(
        "the model is needed, for its buffers: pass model=..., or named_parameters directly from "
        "model.named_parameters()"
    )


def _refuse_a_part(module: torch.nn.Module) -> None:
    """Raise ConfigError for a part of a larger module that has more state.

    A script that trains only a new head gives Horovod only the head's parameters; without this
    check no checkpoint would contain the statistics of the rest.
    """
    if not _wholes(module):
        return
    gc.collect()  # a larger module may be unused, and not be freed on every rank yet
    for whole in _wholes(module):
        left_out = _left_out(whole, module)
        raise tierckpt.ConfigError(
            f"named_parameters is that of a part ({type(module).__name__}) of a larger model "
            f"({type(whole).__name__}), and the checkpoint would be without the rest: "
            f"{', '.join(left_out[:3])}{', ...' if left_out[3:] else ''}. Pass the larger model "
            "as model=..., or the part if the checkpoint is to have only that"
        )


def _wholes(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules that contain `module`, and that have parameters or buffers beyond it."""
    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
    # Others have not run torch.nn.Module's __init__, and have no list of parts.
    modules = [m for m in modules if "_modules" in vars(m)]
    holding = [m for m in modules if any(part is module for part in m.modules())]
    return [m for m in holding if _left_out(m, module)]


def _left_out(whole: torch.nn.Module, part: torch.nn.Module) -> list[str]:
    """Names of parameters and buffers that `whole` has and `part` does not have."""
    known = {id(t) for _, t in named_parameters(part) + named_buffers(part)}
    return [n for n, t in named_parameters(whole) + named_buffers(whole) if id(t) not in known]
