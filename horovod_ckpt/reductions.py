"""The gradient reductions of one Horovod optimizer: their launches, and their end after a failure.

Horovod matches the operations of all ranks by name. If one rank leaves an operation out, it never
ends on the others, and Horovod refuses the next operation of this name. So after an interrupted
iteration each rank first launches the operations that only other ranks have launched.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from tierckpt.group import Group
from tierckpt.hooks.closures import others_come_first

LAUNCHERS = ("_allreduce_grad_async", "_grouped_allreduce_grad_async")
"""Methods that Horovod's backward hooks and `synchronize` look up at each call."""


@dataclass(frozen=True)
class Launch:
    """The description of one launched reduction, from which another rank can launch its part."""

    names: tuple[str, ...]
    """Horovod's names of the parameters."""
    grouped: bool
    sparse_dims: int = 0
    """Number of dimensions with indices, for a sparse gradient that is reduced by a gather of its
    indices and its values. 0: a dense gradient."""

    def zeros(self, param: torch.Tensor) -> torch.Tensor:
        """A zero gradient of the parameter that is reduced in the same way."""
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

    def step_begins(self) -> bool:
        """Note that a pre-hook runs; True if no weights change before the next pre-hook."""
        self._entered += 1
        optimizer = self._optimizer
        # With reductions in progress, a step that synchronizes first waits for them. Other hooks
        # run before that, and may change weights (`step_hook`).
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
        # Handles are numbers, which Horovod reuses after a new start: a handle that is left from an
        # earlier run of an elastic job may belong to another operation now.
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
