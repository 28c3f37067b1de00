"""The release of a DDP module's layers while it reduces their gradients.

Usually DDP reduces them itself, and hooks on a few parameters release layers (`GradientGroups`).
A communication hook in Python costs 0.4 ms of CPU time a pass, so DDP gets one only if it is
needed: for a hook of the user's, for a trace, and where a restart would change sums without it.

Without a hook of ours, groups of parameters are released together. The hooks on parameters run
after a gradient is accumulated, right before DDP's own hooks. `GradientOrder` is the order in
which gradients arrive in the first backward pass of a module, and `GradientMean` the reduction of
DDP without a communication hook, with the same bits. `HookState` is the state of a hook, as a part
of the checkpoint. With DDP's `join()` ranks make different numbers of steps, which checkpoints do
not support.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tierckpt.state.process_state import load_rng, pack_rng

from .torch_group import reduced_by

__all__ = ["CommHook", "GradientGroups", "ReleaseHook", "UnevenInputs"]


_NOT_SAVED = ("process_group",)


class HookState:
    """Makes the state of a communication hook an object for `extra_per_rank`.

    ::

        state = powerSGD_hook.PowerSGDState(...)
        ddp_ckpt.Checkpointer(model, optimizer, comm_hook=(state, powerSGD_hook.powerSGD_hook),
                              extra_per_rank={"hook": ddp_ckpt.HookState(state)})

    A hook with error feedback adds the compression error of the last gradients to the next ones. A
    resumed run without this state gives different results. The state differs between ranks and is
    as large as the gradients: each rank stores all of its own, and the training thread copies it at
    the boundary.

    Works for objects with attributes that are tensors, numbers, text, NumPy generators, or lists
    and dicts of these; process groups are not saved and stay as they are. A restart with another
    number of ranks leaves the state as it is, like everything in `extra_per_rank`.
    """

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """The attributes, and the type of device of their tensors."""
        fields = {name: getattr(self.state, name) for name in _names(self.state)}
        device = next((t.device.type for t in _tensors(list(fields.values()))), "cpu")
        packed = {name: _packed(value) for name, value in fields.items()}
        return {"fields": packed, "device": device}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Set all attributes again; generators are changed in place."""
        for name, value in saved["fields"].items():
            now = getattr(self.state, name, None)
            if isinstance(now, np.random.RandomState):
                now.set_state(value)
            else:
                setattr(self.state, name, _on(value, saved["device"]))


def _names(state: Any) -> list[str]:
    slots = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*slots, *getattr(state, "__dict__", {})]
    return [name for name in names if name not in _NOT_SAVED and hasattr(state, name)]


def _packed(value: Any) -> Any:
    return value.get_state() if isinstance(value, np.random.RandomState) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _on(value: Any, device: str) -> Any:
    """Copy the value with its tensors on this process's device of that type."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on(each, device) for each in value)
    return value


def watch_gradients(
    params: Iterable[torch.nn.Parameter], on_gradient: Callable[[torch.Tensor], None]
) -> list[Any]:
    """Call `on_gradient`, a bound method, with each trained parameter after its gradient is
    accumulated, on autograd's thread; returns the hooks, for the caller to remove.

    The hooks keep no reference to the method's object: Python's garbage collector does not see
    references from a parameter, so the object would never be freed.
    """
    weak = weakref.WeakMethod(on_gradient)

    def accumulated(param: torch.Tensor) -> None:
        method = weak()
        if method is not None:
            method(param)

    trained = [param for param in params if param.requires_grad]
    return [param.register_post_accumulate_grad_hook(accumulated) for param in trained]


FIRST_BYTES = 1 << 20
"""Size of the first group, as of DDP's first bucket."""


class GradientGroups:
    """Calls `on_group` in each backward pass that DDP reduces, once per group.

    A group is about as large as one of DDP's buckets, and has neighbours in the order of the
    parameters. One hook is on its first parameter: its gradient usually comes last, right before
    DDP's own hooks launch the reduction. A hook in the place of DDP's reduction would take 0.4 ms
    of CPU time a pass: the lock of the interpreter goes to a thread of gloo and back for every
    bucket.

    Groups depend on nothing but the module, so all ranks have the same number of them.

    Threads: the hooks run on autograd's threads.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        params: Sequence[torch.nn.Parameter],
        on_group: Callable[[list[torch.nn.Parameter]], None],
    ) -> None:
        """`params`: those that DDP reduces, in the module's order."""
        self._ddp, self._on_group = ddp, on_group
        self._groups = _groups(params, ddp.bucket_bytes_cap)
        # Python's garbage collector does not see references from a parameter.
        weak = weakref.ref(self)

        def hook_of(number: int) -> Callable[[torch.Tensor], None]:
            def accumulated(_: torch.Tensor) -> None:
                us = weak()
                # DDP's mark of the newest forward pass: false under no_sync().
                if us is not None and us._ddp.require_forward_param_sync:
                    us._on_group(us._groups[number])

            return accumulated

        self._hooks: list[Any] = [
            group[-1].register_post_accumulate_grad_hook(hook_of(number))
            for number, group in enumerate(self._groups)
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _groups(params: Sequence[torch.nn.Parameter], bytes_cap: int) -> list[list[torch.nn.Parameter]]:
    """Return the last parameters first, as DDP does; the first group is small, as its is."""
    groups: list[list[torch.nn.Parameter]] = []
    left = 0
    for param in reversed(params):
        if left <= 0:
            left = bytes_cap if groups else min(bytes_cap, FIRST_BYTES)
            groups.append([])
        groups[-1].append(param)
        left -= param.nbytes
    return groups


class GradientOrder:
    """Records the order. DDP makes its final buckets in this order, after that pass.

    Threads: `note` runs on autograd's threads.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        params: list[torch.nn.Parameter],
        number: Mapping[int, int],
    ) -> None:
        """`number`: the number of each parameter, by `id`."""
        self._ddp, self._number = ddp, number
        self._arrived: dict[int, None] = {}
        self.reduced = False
        """True if DDP reduces the newest recorded pass."""
        self._over = False
        self.final: list[int] = []
        """The order of a pass that is over, once it was asked for."""
        self._hooks = watch_gradients(params, self.note)
        self._expected = len(self._hooks)

    def note(self, param: torch.Tensor) -> None:
        """Record that the gradient of `param` has arrived."""
        if self._over:
            return
        number = self._number[id(param)]
        if number in self._arrived:  # a new pass; the previous one failed, or was under no_sync()
            self._arrived.clear()
        self._arrived[number] = None
        self.reduced = self._ddp.require_forward_param_sync
        self._over = self.reduced and len(self._arrived) == self._expected

    def order(self) -> list[int]:
        """The parameters' numbers, in the order of their gradients; the same list once the pass is
        over."""
        if not self._over:
            return list(self._arrived)
        self.final = self.final or list(self._arrived)
        return self.final

    def stop_if_over(self) -> bool:
        """Remove the hooks if the pass is over; returns whether none is left. Not to be called by
        one of them."""
        if self._hooks and self._over:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
        return not self._hooks


if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket

Reduced = torch.futures.Future[torch.Tensor]


class GradientMean:
    """The mean over all ranks, with DDP's own arithmetic.

    DDP multiplies a gradient by the reciprocal of the world size while it copies it into its
    bucket. Gradients that need no copy are divided in place: sparse ones, and those that are views
    of the bucket already (`gradient_as_bucket_view=True` and `zero_grad(set_to_none=False)`, or
    gradients accumulated over several backward passes). If the world size is no power of two, the
    two results differ in the last bit.

    When the hook is called, all gradients are views. So, if the difference matters, `watch` looks
    at each gradient after its accumulation, right before DDP copies it.

    Threads: `watch` and `__call__` run on autograd's threads.

    Args:
        ddp: the module.
        number: the number of each of its parameters, by `id`.
    """

    def __init__(self, ddp: DistributedDataParallel, number: Mapping[int, int]) -> None:
        self._group = ddp.process_group
        self._size = dist.get_world_size(ddp.process_group)
        self._number = number
        self._storage: dict[int, int] = {}
        """The address of each parameter's gradient at its last accumulation, until reduced."""
        self._divided: set[int] = set()
        """Parameters with gradients that the newest first pass of an iteration divided."""
        self._resumed: set[int] = set()
        """Parameters with gradients that the next pass divides although they are new."""
        self._is_first = self._records = True
        self._watches = self.depends_on_kept(ddp)
        if self._watches:
            watch_gradients(ddp.module.parameters(), self.watch)

    @staticmethod
    def depends_on_kept(ddp: DistributedDataParallel) -> bool:
        """True if gradients that the loop keeps from an earlier pass change the result."""
        size = dist.get_world_size(ddp.process_group)
        exact_reciprocal = size & (size - 1) == 0
        return bool(ddp.gradient_as_bucket_view) and not exact_reciprocal

    def watch(self, param: torch.Tensor) -> None:
        """Record the address of a gradient that was accumulated and that DDP has not copied yet."""
        if param.grad is not None and param.grad.layout == torch.strided:
            self._storage[self._number[id(param)]] = _address(param.grad)

    def __call__(self, bucket: GradBucket) -> Reduced:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            buffer.div_(self._size)
        elif self._watches:
            self._scale_parts(bucket)
        else:
            buffer.mul_(1.0 / self._size)
        if buffer.is_complex():
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
            assert work is not None
        else:  # the same operation, without the checks of the arguments
            work = self._group.allreduce([buffer])
        future: Reduced = work.get_future().then(_first)
        return future

    def _scale_parts(self, bucket: GradBucket) -> None:
        if bucket.index() == 0:
            self._records, self._is_first = self._is_first, False
            if self._records:
                self._divided = set()
        buffer, params = bucket.buffer(), bucket.parameters()
        numbers = [self._number[id(p)] for p in params]
        views = {n for n, p in zip(numbers, params, strict=True) if self._is_view(n, p, buffer)}
        divided = views | self._resumed.intersection(numbers)
        self._resumed -= divided
        if self._records:
            self._divided |= divided
        if len(divided) == len(numbers):
            buffer.div_(self._size)
        elif not divided:
            buffer.mul_(1.0 / self._size)
        else:
            for number, part in zip(numbers, bucket.gradients(), strict=True):
                if number in divided:
                    part.div_(self._size)
                else:
                    part.mul_(1.0 / self._size)

    def _is_view(self, number: int, param: torch.Tensor, buffer: torch.Tensor) -> bool:
        """True if the gradient was a view of the bucket already when DDP processed it."""
        if number in self._storage:
            return self._storage.pop(number) == _address(buffer)
        # Not accumulated since the last reduction: a gradient that exists is the view of that time.
        return param.grad is not None

    def start_iteration(self) -> None:
        """Mark the next pass as the first of an iteration."""
        self._is_first = True

    def divided(self) -> list[int]:
        """Numbers of the parameters with gradients that an iteration's first pass divides."""
        return sorted(self._divided)

    def resume(self, divided: Iterable[int]) -> None:
        """Let the next pass divide the gradients of these parameters, as in a run without a
        restart: gradients that the loop keeps between iterations are new after a restart."""
        self._storage.clear()
        self._is_first = True
        if self._watches:
            self._resumed = set(divided)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


ENDS_APART = (
    "this DDP module trains under join(), where ranks may make different numbers of steps, but "
    "all ranks must pass a checkpoint's boundary: the job would hang when the first rank has no "
    "more data. Give all ranks the same number of batches (DistributedSampler or "
    "tierckpt.ResumableSampler do), or end all loops with the shortest by "
    "join(throw_on_early_termination=True); or close() the checkpointer before join()"
)
OTHER_DIVISOR = (
    "join(divide_by_initial_world_size=False): DDP divides by the number of ranks that still have "
    "data, but communication hooks do not receive this number, and this module has one since it "
    "was given to a Checkpointer: gradients would differ. Make a new DDP module for this loop, or "
    "leave the argument out"
)


class UnevenInputs:
    """Detects that a DDP module is under `join()`, by its `join_hook`, which `join()` calls."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.joins = False
        """True until all ranks have left `join()`; DDP's own mark stays set for ever."""

    def start(self, **settings: Any) -> JoinHook:
        """Replacement of DDP's `join_hook`."""
        ddp = self._ddp
        theirs: JoinHook = type(ddp).join_hook(ddp, **settings)
        self.joins, ended = True, theirs.post_hook

        def post_hook(is_last_joiner: bool) -> None:
            self.joins = False
            ended(is_last_joiner)

        theirs.post_hook = post_hook  # type: ignore[method-assign]
        return theirs

    def refuse(self, has_checkpointer: bool, takes_mean: bool) -> None:
        """Raise UnsupportedStateError, on all ranks, under a `join()` that would hang, or that
        would change gradients. Called before a bucket is reduced. A `join()` that throws when the
        first rank ends does neither."""
        config = self._ddp._join_config
        if not self.joins or not config.enable or config.throw_on_early_termination:
            return
        if has_checkpointer:
            raise tierckpt.UnsupportedStateError(ENDS_APART)
        if takes_mean and not self._ddp._divide_by_initial_world_size:
            raise tierckpt.UnsupportedStateError(OTHER_DIVISOR)


if TYPE_CHECKING:
    from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
else:
    BuiltinCommHookType, GradBucket = dist.BuiltinCommHookType, dist.GradBucket

CommHook = Callable[[Any, GradBucket], Reduced]
Release = Callable[[Iterable[torch.Tensor], Reduced | None, float | None], None]

BUILT_IN = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
"""DDP's hooks in C++, and the hooks in Python with the same results."""


class ReleaseHook:
    """The hooks of one DDP module, which consecutive checkpointers share. `release` is called in
    `backward()`, on the training thread or autograd's.

    A module accepts only one communication hook, ever. Once it has one, all releases come from it.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.inner: tuple[Any, CommHook] | None = None
        self._inner_is_given = False
        """True if a checkpointer gave it; else the user registered it with the module."""
        self.release: Release = _release_nothing
        self.chained: Callable[[Any], None] = _look_at_nothing
        """Called with the state of a chained hook."""
        self._ddp = ddp
        # DDP keeps the parameters it was made with. A walk of its modules at every boundary would
        # take longer than all other work for the buckets there.
        self._params = list(ddp.module.parameters())
        self._number = {id(p): i for i, p in enumerate(self._params)}
        self._reduced = reduced_by(ddp)
        self._trained = [param for param in self._reduced if param.requires_grad]
        self._arrivals = GradientOrder(ddp, self._reduced, self._number)
        self._mean: GradientMean | None = None
        """The reduction in place of DDP's own; None while DDP has no communication hook."""
        self._groups: GradientGroups | None = None
        self._uneven = UnevenInputs(ddp)
        self._buckets: list[list[torch.Tensor]] = []
        """Parameters of the buckets of the newest backward pass, in order."""
        self._passes = 0
        """Calls of the communication hook with a first bucket."""
        self.follows_iterations = True
        """`start_iteration` has something to do."""
        self._packed: tuple[list[torch.Tensor], list[int], dict[str, list[int]]] = [], [], {}
        """The last result of `packed`, made of these parameters and this order."""
        self._priming = False
        # The first hook that the user registers from now on is chained, not refused by DDP.
        for name, chain in (
            ("register_comm_hook", self._register),
            ("_register_builtin_comm_hook", self._register_built_in),
            ("join_hook", self._uneven.start),
        ):
            setattr(ddp, name, _Instead(self, name, chain))
        if not self._may_leave_it_to_ddp():
            self._take_over()

    def _may_leave_it_to_ddp(self) -> bool:
        """True if DDP can reduce all gradients itself: its buckets follow from the order of the
        first gradients, and each of the parameters has a gradient in every pass.

        False where DDP's mean depends on what was kept before a restart (see `GradientMean`), and
        where the first pass was made before, unobserved.
        """
        found = self._ddp._get_ddp_logging_data()
        nbytes = sum(param.nbytes for param in self._trained)
        known = (found.get("num_parameter_tensors"), found.get("total_parameter_size_bytes"))
        return (
            self._makes_final_ones()
            and not GradientMean.depends_on_kept(self._ddp)
            and not any(self._ddp.reducer.get_backward_stats())  # times of gradients
            and known == (len(self._trained), nbytes)
        )

    def _take_over(self) -> None:
        """Give DDP a communication hook, from the next backward pass on."""
        if self._mean is not None:
            return
        self._mean = mean = GradientMean(self._ddp, self._number)
        self.follows_iterations = True
        self._passes = int(self._arrivals.reduced)
        self._leave_parameters()

        # DDP keeps the hook in C++, which Python's garbage collector does not see: with a strong
        # reference from there to this object, and from here to the module, none would be freed.
        weak = weakref.ref(self)

        def tierckpt_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            us = weak()
            assert us is not None
            inner = us.inner
            params = bucket.parameters()
            if bucket.index() == 0:
                us._buckets = []
                us._passes += 1
            us._buckets.append(params)
            if us._priming:
                future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future
            if us._uneven.joins:
                us._refuse_join()
            launched_seconds = time.perf_counter()
            future = inner[1](inner[0], bucket) if inner else mean(bucket)
            us.release(params, future, launched_seconds)
            return future

        # DDP checks the annotations at run time, by identity.
        tierckpt_hook.__annotations__ = {
            "bucket": GradBucket,
            "return": torch.futures.Future[torch.Tensor],
        }
        type(self._ddp).register_comm_hook(self._ddp, None, tierckpt_hook)
        # The reducer has the hook. DDP's list is copied and pickled with the module, but the copy's
        # reducer would not have the hook.
        self._ddp._comm_hooks.pop()
        _set_name(self._ddp, "")

    def attach(self, release: Release, chained: Callable[[Any], None], traces: bool) -> None:
        """Serve a checkpointer. With `traces`, `release` receives the reductions."""
        self.release, self.chained = release, chained
        if traces:
            self._take_over()
        if self._mean is None and self._groups is None:
            self._groups = GradientGroups(self._ddp, self._trained, self._release_group)

    def _release_group(self, params: list[torch.nn.Parameter]) -> None:
        if self._uneven.joins:
            self._refuse_join()
        self.release(params, None, None)

    def _refuse_join(self) -> None:
        takes_mean = self._mean is not None and self.inner is None
        self._uneven.refuse(self.release != _release_nothing, takes_mean)

    def _leave_parameters(self) -> None:
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    def start_iteration(self) -> None:
        """An iteration starts: its first pass is the one of `GradientMean`."""
        stopped = self._arrivals.stop_if_over()
        if self._mean is not None:
            self._mean.start_iteration()
        self.follows_iterations = self._mean is not None or not stopped

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> ReleaseHook | None:
        """Return the module's hook, and register it first if needed; None if the user registered
        one."""
        if not cls.has_room(ddp):
            return None
        return cls._known(ddp) or cls(ddp)

    @staticmethod
    def _known(ddp: DistributedDataParallel) -> ReleaseHook | None:
        """The module's hook, or None if it is not registered."""
        instead = ddp.register_comm_hook
        return instead.hook if isinstance(instead, _Instead) else None

    @classmethod
    def has_room(cls, ddp: DistributedDataParallel) -> bool:
        """False if the user registered a hook; only DDP's log shows a built-in one."""
        if cls._known(ddp) is not None:
            return True
        return not (ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"))

    @classmethod
    def may_be_given(cls, ddp: DistributedDataParallel) -> bool:
        """True if a checkpointer may be given a hook for this module: the user registered none with
        the module. A hook that an earlier checkpointer was given does not count."""
        known = cls._known(ddp)
        return cls.has_room(ddp) and (known is None or not known.inner or known._inner_is_given)

    @classmethod
    def states_of(cls, ddp: DistributedDataParallel) -> list[Any]:
        """The states of the user's hooks on this module."""
        known = cls._known(ddp)
        if known is None:
            return [state for _, state in ddp._comm_hooks]
        return [known.inner[0]] if known.inner else []

    def leaves_out(self, param: torch.Tensor) -> bool:
        """True if this module has the parameter, and its last pass did not reduce it."""
        if self._mean is None:
            ours = id(param) in self._number
            return (
                ours and self._arrivals.reduced and not any(map(is_, self._trained, repeat(param)))
            )
        reduced = {id(p) for bucket in self._buckets for p in bucket}
        return id(param) in self._number and bool(reduced) and id(param) not in reduced

    def packed(self) -> dict[str, list[int]]:
        """The order of the buckets, and the way in which the mean was taken; the same object until
        one of them changes."""
        if self._mean is None:
            _, kept_order, found = self._packed
            if found and kept_order is self._arrivals.final:
                return found
            order = self.order()
            if not (found and (order is kept_order or order == kept_order)):
                self._packed = [], order, {"buckets": order, "divided": []}
            return self._packed[2]
        final = self._passes > 1 and self._makes_final_ones()
        params = [p for bucket in self._buckets for p in bucket] if final else []
        divided = self._mean.divided()
        kept, order, found = self._packed
        same = len(params) == len(kept) and all(map(is_, params, kept))
        if not (final and same and found.get("divided") == divided):
            order = order if final and same else self.order()
            self._packed = params, order, {"buckets": order, "divided": divided}
        return self._packed[2]

    def order(self) -> list[int]:
        """The parameters' numbers in an order from which DDP makes its final buckets: that of the
        gradients of the first pass, or of the buckets themselves. Empty if `prime` cannot give this
        order to a new module."""
        if not self._makes_final_ones():
            return []
        if self._mean is None:
            return self._arrivals.order() if self._arrivals.reduced else []
        if self._passes < 2:
            return self._arrivals.order() if self._passes else []
        return [self._number[id(p)] for bucket in self._buckets for p in bucket]

    def _makes_final_ones(self) -> bool:
        """True if DDP makes new buckets once, after its first pass. With `find_unused_parameters`
        it keeps the first ones; with a static graph it has three kinds in three passes."""
        ddp = self._ddp
        return not (ddp.find_unused_parameters or getattr(ddp, "static_graph", False))

    def prime(self, order: list[int]) -> None:
        """Give a new DDP module the buckets of the saved run, from its first pass on.

        DDP starts with provisional buckets and makes the final ones after its first backward pass,
        in the order in which gradients arrived. With three or more ranks, different buckets round
        differently, so the first step after a restart would differ. So this simulates the first
        pass: zero gradients arrive in the saved order, and nothing is reduced. The user's hooks on
        parameters are not called (those on autograd's own nodes are), and random streams do not
        move.
        """
        ddp, params = self._ddp, self._params
        trained = [self._number[id(p)] for p in self._reduced if p.requires_grad]
        # An embedding with sparse gradients accepts no dense zero gradient.
        sparse = any(getattr(m, "sparse", False) is True for m in ddp.module.modules())
        started = self._passes or self._arrivals.reduced
        if not self._makes_final_ones() or sparse or started or sorted(order) != trained:
            return
        self._take_over()
        self._priming = True
        try:
            with _unheard(params):
                ddp.reducer.prepare_for_forward()
                ddp.reducer.prepare_for_backward([])
                for index in order:
                    torch.autograd.backward([params[index]], [torch.zeros_like(params[index])])
                    self._arrivals.note(params[index])
        finally:
            self._priming = False
            for param in params:
                param.grad = None

    def resume(self, divided: Iterable[int]) -> None:
        """See `GradientMean.resume`."""
        if self._mean is not None:
            self._mean.resume(divided)

    def detach_from(self, release: Release) -> None:
        """Detach from a closed checkpointer, unless another one has taken the hook: the module
        outlives its checkpointers."""
        if self.release == release:
            self.release, self.chained = _release_nothing, _look_at_nothing
            self._leave_parameters()

    def give(self, state: Any, hook: CommHook) -> None:
        """Chain the hook that a checkpointer was given, in place of an earlier one's."""
        self._take_over()
        self._chain(state, hook, hook.__qualname__)
        self._inner_is_given = True

    def _register(self, state: Any, hook: CommHook) -> None:
        """Replacement of DDP's `register_comm_hook`, with the same errors in the same cases."""
        self._ddp._check_comm_hook(hook)
        self._take_over()
        if self.inner is not None:
            # Raises, because our hook is registered.
            dist._register_comm_hook(self._ddp.reducer, state, hook)  # type: ignore[attr-defined]
        self._chain(state, hook, hook.__qualname__)

    def _register_built_in(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Replacement of DDP's `_register_builtin_comm_hook`, with the same errors."""
        self._take_over()
        if self.inner is not None:
            register: Any = dist._register_builtin_comm_hook  # type: ignore[attr-defined]
            register(self._ddp.reducer, comm_hook_type)  # raises, because our hook is registered
        self._chain(self._ddp.process_group, BUILT_IN[comm_hook_type], str(comm_hook_type))

    def _chain(self, state: Any, hook: CommHook, name: str) -> None:
        self.chained(state)
        self.inner, self._inner_is_given = (state, hook), False
        _set_name(self._ddp, name)


class _Instead:
    """Replaces a method of one DDP module; a copy of the module has DDP's own method again."""

    def __init__(self, hook: ReleaseHook, name: str, chain: Callable[..., Any]) -> None:
        self.hook = hook
        self._name, self._chain = name, chain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._chain(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Yields the copy's own method: the copy has no attributes yet at this lookup.
        return (getattr, (self.hook._ddp, self._name))


@contextlib.contextmanager
def _unheard(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context in which no hook on these parameters is called, and no random stream moves."""
    # Empty and refill the same dicts: handles of registered hooks refer to them.
    found = [hooks for p in params for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    kept = [(hooks, dict(hooks)) for hooks in found if hooks]
    streams = pack_rng()
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, entries in kept:
            hooks.update(entries)
        load_rng(streams)


def _set_name(ddp: DistributedDataParallel, name: str) -> None:
    """Set the name of the communication hook in DDP's logging data."""
    assert ddp.logger is not None
    ddp.logger._set_comm_hook_name(name)


def _look_at_nothing(state: Any) -> None:
    pass


def _release_nothing(
    params: Iterable[torch.Tensor], reduction: Reduced | None, launched_seconds: float | None
) -> None:
    """The release while the module has no checkpointer: no effect."""
