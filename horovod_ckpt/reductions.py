"""The gradient reductions of one Horovod optimizer: their launches, and their end after a failure.

Horovod matches the operations of all ranks by name. One that a rank leaves out waits on the others
for ever, and Horovod refuses the next one of its name; so after an iteration that was cut short,
all ranks first come to have launched the same.
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
    """What was reduced at once, told so that another rank can launch its part of it."""

    names: tuple[str, ...]
    """Horovod's, of the parameters."""
    grouped: bool
    sparse_dims: int = 0
    """Of a sparse gradient that is reduced as such, by gathering its indices and its values: the
    dimensions that indices count. 0: a dense one."""

    def zeros(self, param: torch.Tensor) -> torch.Tensor:
        """A gradient of the parameter that adds nothing, and is reduced in the same way."""
        if not self.sparse_dims:
            return torch.zeros_like(param)
        indices = param.new_empty((self.sparse_dims, 0), dtype=torch.int64)
        values = param.new_empty((0, *param.shape[self.sparse_dims :]))
        return torch.sparse_coo_tensor(indices, values, param.shape)


_launches: weakref.WeakKeyDictionary[Any, tuple[Any, Counter[Launch]]] = weakref.WeakKeyDictionary()
"""Of each optimizer: how often what was launched, and in which run of Horovod. Kept when nobody
watches any more: another checkpointer may bring an iteration to its end that ended the first."""


def _launches_of(optimizer: Any) -> Counter[Launch]:
    """Those since Horovod was started: where it was shut down in between, by an elastic job or by
    the script, all that ranks had in common is gone."""
    run_id = mpi_ops._handle_map  # made by `hvd.init()`, and kept here, so no other one is it
    told = _launches.get(optimizer)
    if told is None or told[0] is not run_id:
        told = _launches[optimizer] = run_id, Counter()
    return told[1]


class Reductions:
    """The gradient reductions of one Horovod optimizer. Training thread.

    Horovod's step is a step within a step: its own `step` synchronizes and then calls the wrapped
    optimizer's, and torch's hooks fire for both. Only the inner one changes weights, so only there
    copies must be complete; and only both together are a step of the training.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._release: Callable[[Iterable[torch.Tensor]], None] | None = None
        self._entered = 0
        """Pre-hooks seen since the last whole step."""
        self._launchers: list[_Launcher] = []
        self.known_before_step = bool(optimizer._grad_accs)
        """Horovod registers no hooks in a job of one."""

    def watch(self, release: Callable[[Iterable[torch.Tensor]], None]) -> None:
        """Call `release(parameters)` whenever a reduction was launched."""
        self._release = release
        self._launchers = [_Launcher.of(self._optimizer, name) for name in LAUNCHERS]
        for launcher in self._launchers:
            launcher.watching.append(self._saw)

    def unwatch(self) -> None:
        """The inverse of `watch`. Others that watch the optimizer go on."""
        for launcher in self._launchers:
            launcher.watching.remove(self._saw)
            launcher.end_if_idle()
        self._launchers = []
        self._release = None

    def _saw(self, what: Any) -> None:
        if self._release is not None:
            self._release(what if isinstance(what, tuple) else (what,))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every name that a reduction can have in Horovod's timeline, and its parameter.

        A group's tensors are called after its first one; those that have no gradient in an
        iteration are reduced alone. A sparse gradient is gathered, in two parts.
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
        """Backward passes a step."""
        return int(self._optimizer.backward_passes_per_step)

    @property
    def accumulating(self) -> bool:
        """True between the backward passes of a step.

        Reductions under way would be no sign of it: one model's backward pass may launch those of
        another one. Nor is each parameter: a rank may not have used it in every pass.
        """
        if self.passes == 1:
            return False
        left = self._optimizer._allreduce_delay.values()
        return 0 < min(left, default=self.passes) < self.passes

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters that have one, and it."""
        params = self._optimizer._allreduce_delay
        return [(param, param.grad) for param in params if param.grad is not None]

    def step_begins(self) -> bool:
        """A pre-hook fired; True when weights are not changed before the next one fires."""
        self._entered += 1
        optimizer = self._optimizer
        # With reductions under way, a step that synchronizes will first wait for them. Hooks of
        # others are called before that, and may change weights (`step_hook`).
        # And where the backward pass is the step's closure, the inner step has reductions, too.
        first = self._entered == 1
        waits = bool(first and optimizer._should_synchronize and optimizer._handles)
        return waits and not others_come_first(optimizer)

    def step_ended(self) -> bool:
        """A post-hook fired; True when that was a step of the training.

        None is the inner step that `hvd.broadcast_optimizer_state` makes alone to have optimizer
        state.
        """
        whole = self._entered >= 2
        self._entered = 0
        return whole

    # --- after an iteration that was cut short -------------------------------------------------

    def settle(self, group: Group) -> None:
        """Bring to an end what was launched, not at the same point on all ranks; collective.

        Each rank launches, with zeros, what others have launched and it has not. Then all
        reductions end, and they are waited for: until then Horovod may write into gradients, and
        until somebody asks for the results it holds on to them.
        """
        launched = _launches_of(self._optimizer)
        everyone: list[Counter[Launch]] = group.all_gather_object(launched)
        missing = functools.reduce(operator.or_, everyone) - launched
        # Handles are numbers, and Horovod begins anew with them when it is started again: one that
        # an elastic job's run before left behind may be somebody else's now.
        ours = {launch.names for launch in launched}
        under_way = self._optimizer._handles.items()
        handles = [h for what, (h, _) in under_way if _names(self._optimizer, what) in ours]
        handles += [self._launch_zeros(launch) for launch in missing]
        for handle in handles:
            _drain(handle)
        self._forget()

    def _launch_zeros(self, launch: Launch) -> Any:
        """This rank's part of it; the parameters keep the gradients they have. Returns the
        handle."""
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
        """Begin a new iteration, as Horovod itself does when an optimizer's state is loaded."""
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
    """In the place of a method of one optimizer: launches, and tells everyone who watches."""

    def __init__(self, optimizer: Any, name: str) -> None:
        self._optimizer, self._name = optimizer, name
        self._before = vars(optimizer).get(name)
        """What a script had put there."""
        self._launch: Callable[[Any], Any] = getattr(optimizer, name)
        self.watching: list[Callable[[Any], None]] = []
        setattr(optimizer, name, self)

    @classmethod
    def of(cls, optimizer: Any, name: str) -> _Launcher:
        """The one that is there, else a new one."""
        found = getattr(optimizer, name)
        return found if isinstance(found, cls) else cls(optimizer, name)

    def __call__(self, what: Any) -> Any:
        handle = self._launch(what)
        _launches_of(self._optimizer)[_told(self._optimizer, what)] += 1
        for tell in tuple(self.watching):
            tell(what)
        return handle

    def end_if_idle(self) -> None:
        """Put back what was there before, unless somebody watches, or put a launcher on top."""
        if self.watching or vars(self._optimizer).get(self._name) is not self:
            return
        if self._before is None:
            delattr(self._optimizer, self._name)
        else:
            setattr(self._optimizer, self._name, self._before)


def _told(optimizer: Any, what: Any) -> Launch:
    """A launch of just now: of a group, which is a tuple, or of one parameter."""
    grouped = isinstance(what, tuple)
    sparse = not grouped and what.grad.is_sparse and not optimizer.sparse_as_dense
    return Launch(_names(optimizer, what), grouped, what.grad.sparse_dim() if sparse else 0)


def _names(optimizer: Any, what: Any) -> tuple[str, ...]:
    names = optimizer._parameter_names
    return tuple(names[p] for p in (what if isinstance(what, tuple) else (what,)))


def _drain(handle: Any) -> None:
    """Wait for a reduction and drop its result. None: the parameter's turn had not come."""
    if handle is None:
        return
    # One may have failed, and be why the iteration was cut short, or its result may have been
    # taken. A rank that is gone is noticed by the collectives of the restore that follows.
    with contextlib.suppress(Exception):
        handle() if callable(handle) else hvd.synchronize(handle)
