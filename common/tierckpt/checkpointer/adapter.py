"""The seam between a Checkpointer and the library that reduces gradients and makes steps.

A Checkpointer calls the methods of `Adapter`. `PlainAdapter` has them for a loop without such a
library. An adapter calls the methods of `Handle`. A new adapter derives from `PlainAdapter`,
overrides the methods that its library needs, and is passed as `Checkpointer(..., adapter=...)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from tierckpt.core.decisions import VOID, Reason
from tierckpt.core.parts import call
from tierckpt.format.ids import Lineage
from tierckpt.group import Group
from tierckpt.hooks.iterations import NO_CALLS
from tierckpt.restored import Restored
from tierckpt.state.training_state import TrainingState

if TYPE_CHECKING:
    from .loop import CheckpointerCore


class Handle:
    """The part of one Checkpointer for its adapter. Training thread, but for `release`."""

    def __init__(self, checkpointer: CheckpointerCore) -> None:
        self._checkpointer = checkpointer

    # --- the training --------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The job's ranks. Its collectives are for calls that are collective themselves."""
        return self._checkpointer.group

    @property
    def state(self) -> TrainingState:
        """The names of parameters, and the optimizers; the checkpointer's own."""
        return self._checkpointer._state

    @property
    def version(self) -> int:
        """Completed optimizer steps, up to the last boundary."""
        return self._checkpointer.version

    @property
    def steps_since_boundary(self) -> int:
        """Completed optimizer steps after the last boundary."""
        return self._checkpointer._iterations.steps

    @property
    def steps_made(self) -> int:
        """Completed optimizer steps; the sum of the two."""
        return self._checkpointer._live.steps_made

    @property
    def iteration(self) -> int:
        """The number that `restore()` returns for the live state in a loop that calls `step()`."""
        return self._checkpointer._live.iteration

    @property
    def restored(self) -> Restored:
        """The result of the last `restore()`."""
        return self._checkpointer.restored

    @property
    def unregistered_optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers that step parameters of the model, but were not given to the checkpointer."""
        return self._checkpointer._own_hooks.unregistered

    # --- the version of the last boundary -------------------------------------------------------

    def release(
        self,
        params: Iterable[torch.Tensor],
        reduction: torch.futures.Future[Any] | None = None,
        launched_seconds: float | None = None,
    ) -> None:
        """The reduction of these parameters' gradients was launched: their layer may be copied.

        On the training thread, or on autograd's while the training thread is in `backward()`.

        Args:
            params: parameters that no optimizer changes before `Adapter.before_step`.
            reduction: for the trace: completes when the gradients are reduced.
            launched_seconds: for the trace: the time of the launch by `time.perf_counter()`;
                None: now.
        """
        self._checkpointer._release(params, reduction, launched_seconds)

    def give_up(self, why: str) -> None:
        """Fail the version being copied, if any; an event gives the reason."""
        self._checkpointer._active.give_up(why)

    def complete(self) -> None:
        """See `Checkpointer.complete`."""
        self._checkpointer.complete()

    @property
    def overwritten(self) -> bool:
        """Whether a version was lost because the loop changed tensors that were being copied."""
        return self._checkpointer._active.overwritten

    @property
    def has_version(self) -> bool:
        """Whether the memory level has a version complete on all ranks."""
        return self._checkpointer._agreement.memory.safe is not None

    # --- notices -------------------------------------------------------------------------------

    def notice(self, text: str, severity: int, version: int | None = None) -> None:
        """Emit an event of this rank about `version`; None: the newest."""
        about = self.version if version is None else version
        self._checkpointer._reports.emit("notice", version=about, severity=severity, message=text)

    def notice_of_all(self, text: str, severity: int) -> None:
        """Emit one event of all ranks: rank 0 at `severity`, others at DEBUG."""
        self._checkpointer._reports.notice_of_all(text, severity)

    @property
    def traces(self) -> bool:
        """True if the run is traced."""
        return bool(self._checkpointer._parts.name_reductions)

    def name_reductions(self, names: Mapping[str, Sequence[str]]) -> None:
        """Record the parameters of each reduction in a library's own timeline.

        `names`: for each reduction the names of its parameters. Empty: this rank has none in it.
        """
        call(self._checkpointer._parts.name_reductions, names)

    # --- a job that ends, or changes its ranks ------------------------------------------------

    @property
    def ends_early(self) -> bool:
        """True if this rank knows a reason to end the job before its loop ends."""
        return self._checkpointer._halt.reason < Reason.NONE

    def count_step(self) -> None:
        """Count as an optimizer step a change of the state that no optimizer made."""
        self._checkpointer._iterations.count_one()

    def count_call(self) -> None:
        """Count a call of the loop's boundary that takes no version."""
        self._checkpointer._iterations.called()

    def compare_replicas(self, whole: bool) -> None:
        """Compare the complete state of all ranks; collective. `whole`: this rank's state is not
        torn.

        Raises ReplicaError, on all ranks, if replicas differ and `replicas` says `stop`.
        """
        parts = self._checkpointer._parts
        version = self.version if whole else None
        digests = [last_digest(version) for last_digest in parts.last_digest]
        gathered = self.group.all_gather_object(digests)
        for number, compare_last in enumerate(parts.compare_last):
            compare_last([each[number] for each in gathered])
        if failure := parts.first_failure():
            raise failure

    @property
    def drifted(self) -> Sequence[int] | None:
        """The ranks in the minority while replicas differ, see `Part.drifted`."""
        found = [drifted() for drifted in self._checkpointer._parts.drifted]
        return next((ranks for ranks in found if ranks is not None), None)

    @property
    def lineage(self) -> Lineage:
        """The runs that the live state comes from."""
        return self._checkpointer._history.lineage

    def carry_on(self, version: int, iteration: int, lineage: Lineage) -> None:
        """Continue from the live state, in place of `restore()`; all ranks with the same arguments.

        For ranks that form a new group and have lost no state.

        Args:
            version: completed optimizer steps of the live state, on every rank.
            iteration: calls of `step()` before this one.
            lineage: `Handle.lineage` of the previous checkpointer.
        """
        self._checkpointer._restart.carry_on(version, iteration, lineage)


@runtime_checkable
class Adapter(Protocol):
    """The part of a Checkpointer that knows how a library reduces gradients and makes steps.

    Every method is called on the training thread, on every rank at the same point of the job.
    Methods that are marked *collective* may use `Handle.group`'s collectives; all others return
    without waiting for another rank. An adapter serves one Checkpointer. Exceptions reach the
    training loop, unless a method's docstring says otherwise.

    The calls, in order:

    1.  While the Checkpointer is made: the attributes are read, then `reduced_parameters` and
        `untrained_parameters`, then `attached`.
    2.  In an iteration, the adapter calls `Handle.release` whenever the library has launched the
        reduction of some gradients.
    3.  Before an optimizer's step: `before_step`, and with a journal `reads_gradients`; after it
        `step_completed`. `step_class` comes before a step with a closure.
    4.  At a boundary (a call of `Checkpointer.step` after an optimizer's step; or the next forward
        pass): `boundary_begins`; `vote`; if a version is taken `resume_iteration`,
        `newly_unreduced` (if there are untrained parameters) and `pack`; `boundary_passed`.
    5.  In `save(now=True)` and `close()`: `inconsistent`; if a version can be taken, in the context
        of `saving_now`: if the last version is complete `keeps_boundary`,
        `resume_iteration`, `newly_unreduced` and `pack`, to compare the live state with it; and a
        boundary (4) unless they are the same.
    6.  In `restore()`: `restore_begins`; `load` for a version that was loaded; `resumed`.
    7.  At the end of the Checkpointer: `closed`, once. After it nothing is called.
    """

    releases_by_layer: bool
    """True if the adapter calls `Handle.release`; if not, layers are copied from the boundary
    on."""
    repeats_steps: bool
    """True if a restart can make the steps of `step_class` again from a journal."""
    extra_syntax: str
    """A script's way to add an object to the checkpoint, for notices, with `{name}` (or
    `{name!r}`) and `{it}`."""
    no_calls_notice: str
    """The error if the loop makes steps and never calls the boundary."""
    newly_unreduced_notice: str
    """The warning about `newly_unreduced`, with `{names}`."""

    def reduced_parameters(self) -> Sequence[torch.Tensor] | None:
        """The parameters that are equal on all ranks: they start equal, and their gradients are
        reduced, or they have none. All other parameters are stored whole by every rank. None: all
        parameters are equal on all ranks."""
        ...

    def untrained_parameters(self) -> Sequence[torch.Tensor]:
        """Those of `reduced_parameters` that have no gradients now, and so are equal until they are
        trained; see `newly_unreduced`."""
        ...

    def attached(self, handle: Handle) -> None:
        """The Checkpointer is complete: register with the library here, not earlier.

        May raise: then `closed` is called, and the Checkpointer's constructor raises the error.
        """
        ...

    def step_class(self, optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
        """The class with the `step` that changes the optimizer's parameters, and does nothing
        else."""
        ...

    def before_step(self, label: str) -> bool:
        """The step of the optimizer with this label starts (with a closure: after its first call).

        True: the Checkpointer waits here until everything that the step may change is copied.
        False: nothing changes before the next call of this method (a step within a step).
        """
        ...

    def reads_gradients(self, label: str) -> bool:
        """After `before_step`: whether this is the step of `step_class`, and the gradients are
        those that it reads."""
        ...

    def step_completed(self, label: str) -> bool:
        """The step has ended. False if it was not a step of the training."""
        ...

    def boundary_begins(self, forced: bool) -> None:
        """An iteration has ended. `forced`: called in `saving_now`, at any point of the loop."""
        ...

    def vote(self) -> int:
        """A number, 0 or more; all ranks receive the smallest one at the next boundary. Or `VOID`:
        the state of this rank is no version, so that no rank has a version of this boundary."""
        ...

    def newly_unreduced(self) -> Iterable[torch.Tensor]:
        """Those of `untrained_parameters` that are trained now but not reduced: from now on they
        are each rank's own. Other parameters in the result are ignored. Also called at a replica
        check.

        May raise: the version of this boundary is lost then.
        """
        ...

    def pack(self) -> Any:
        """This rank's values for `load`, of JSON's types. May raise: the version is lost then. The
        Checkpointer keeps them: the same object, if returned again, must have the same contents."""
        ...

    def boundary_passed(self, agreed_vote: int) -> None:
        """The next iteration starts; `agreed_vote`: the smallest `vote` of all ranks at the
        previous boundary, 0 if there was none."""
        ...

    def inconsistent(self) -> str:
        """The reason why the live state, between two steps, is no version; empty if it is one.
        Collective; the same on all ranks. Not called if the Checkpointer knows a reason itself."""
        ...

    def saving_now(self) -> contextlib.AbstractContextManager[None]:
        """The context of a version taken now, at any point of the loop. Entering is collective."""
        ...

    def keeps_boundary(self) -> bool:
        """In `saving_now`: True if the version of the last boundary is to be stored in place of the
        live state."""
        ...

    def resume_iteration(self, iteration: int) -> int:
        """The iteration with which a restart from the live state continues, in a loop that calls
        `step()`: `iteration`, or an earlier one to repeat."""
        ...

    def restore_begins(self) -> None:
        """A restore starts, perhaps after an interrupted iteration: end the library's operations in
        progress. Collective."""
        ...

    def load(self, value: Any) -> None:
        """A version was loaded; `value`: the result of `pack` on this rank, None if there was none
        or the number of ranks has changed. May raise: the version counts as damaged on all ranks
        then."""
        ...

    def resumed(self, iteration: int) -> None:
        """The live state is now that of a version, or of another group: the loop continues with
        this iteration."""
        ...

    def closed(self) -> None:
        """Undo `attached`, also a partial one. An exception becomes an event."""
        ...


class PlainAdapter:
    """The adapter of a single process, and of every loop without a library that needs its own.

    Parameters are equal on all ranks, layers are copied from the boundary on, and every step of an
    optimizer counts. See `Adapter` for the methods.
    """

    releases_by_layer = False
    repeats_steps = True
    extra_syntax = "extra={{{name!r}: {it}}}"
    no_calls_notice = NO_CALLS
    newly_unreduced_notice = (
        "{names}: trained now, and not reduced. From now on each rank stores its own values of them"
    )
    handle: Handle
    """Set by `attached`."""

    def reduced_parameters(self) -> Sequence[torch.Tensor] | None:
        """None: all are equal on all ranks."""
        return None

    def untrained_parameters(self) -> Sequence[torch.Tensor]:
        """None of them."""
        return ()

    def attached(self, handle: Handle) -> None:
        """Keep the handle."""
        self.handle = handle

    def step_class(self, optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
        """The optimizer's class."""
        return type(optimizer)

    def before_step(self, label: str) -> bool:
        """True."""
        return True

    def reads_gradients(self, label: str) -> bool:
        """True."""
        return True

    def step_completed(self, label: str) -> bool:
        """True."""
        return True

    def boundary_begins(self, forced: bool) -> None:
        """Nothing."""

    def vote(self) -> int:
        """0."""
        return 0

    def newly_unreduced(self) -> Iterable[torch.Tensor]:
        """None of them."""
        return ()

    def pack(self) -> Any:
        """None."""
        return None

    def boundary_passed(self, agreed_vote: int) -> None:
        """Nothing."""

    def inconsistent(self) -> str:
        """Empty: the live state is a version."""
        return ""

    def saving_now(self) -> contextlib.AbstractContextManager[None]:
        """A context without effect."""
        return contextlib.nullcontext()

    def keeps_boundary(self) -> bool:
        """False."""
        return False

    def resume_iteration(self, iteration: int) -> int:
        """The same iteration."""
        return iteration

    def restore_begins(self) -> None:
        """Nothing."""

    def load(self, value: Any) -> None:
        """Nothing."""

    def resumed(self, iteration: int) -> None:
        """Nothing."""

    def closed(self) -> None:
        """Nothing."""


def own_method(adapter: Adapter, name: str) -> Any:
    """The adapter's method of this name; None if it is `PlainAdapter`'s, which does nothing."""
    plain = getattr(PlainAdapter, name)
    is_plain = getattr(type(adapter), name, None) is plain and name not in vars(adapter)
    return None if is_plain else getattr(adapter, name)


def check_adapter(adapter: Any) -> Adapter:
    """Return the given adapter, or a plain one for None. Raises TypeError for anything else."""
    if adapter is None:
        return PlainAdapter()
    if isinstance(adapter, type):
        raise TypeError(f"adapter={adapter.__name__} is a class; give an instance of it")
    names = sorted(name for name in vars(PlainAdapter) if not name.startswith("_"))
    missing = [name for name in names if not hasattr(adapter, name)]
    if missing:
        raise TypeError(
            f"adapter is a {type(adapter).__name__}, which lacks {', '.join(missing)}; derive it "
            "from tierckpt.checkpointer.adapter.PlainAdapter, which has them"
        )
    checked: Adapter = adapter
    return checked


__all__ = ["VOID", "Adapter", "Handle", "PlainAdapter", "check_adapter", "own_method"]
