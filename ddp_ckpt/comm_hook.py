"""What is registered with a DDP module: the reduction, then the release of the bucket's layers."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tierckpt.state.rng import load_rng, pack_rng

from .ddp_modules import reduced_by
from .gradient_mean import GradientMean, Reduced
from .gradient_order import GradientOrder
from .uneven_inputs import UnevenInputs

if TYPE_CHECKING:
    from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
else:
    BuiltinCommHookType, GradBucket = dist.BuiltinCommHookType, dist.GradBucket

CommHook = Callable[[Any, GradBucket], Reduced]
Release = Callable[[Iterable[torch.Tensor], Reduced, float], None]

BUILT_IN = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
"""DDP's hooks in C++, and those in Python that compute the same."""


class ReleaseHook:
    """One DDP module's hook. DDP takes one in a module's life; checkpointers that follow each other
    take turns with it."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.inner: tuple[Any, CommHook] | None = None
        self._inner_is_given = False
        """By a checkpointer; else it was registered with the module."""
        self.release: Release = _release_nothing
        self.chained: Callable[[Any], None] = _look_at_nothing
        """Hears of the state of a hook that is chained."""
        self._ddp = ddp
        # DDP's parameters are those it was made with; to walk its modules at every boundary takes
        # longer than everything else that is done there for the buckets.
        self._params = list(ddp.module.parameters())
        self._number = {id(p): i for i, p in enumerate(self._params)}
        self._reduced = reduced_by(ddp)
        self._arrivals = GradientOrder(self._reduced, self._number)
        self.mean = GradientMean(ddp, self._number)
        self._uneven = UnevenInputs(ddp)
        self._buckets: list[list[torch.Tensor]] = []
        """Parameters of the buckets of the newest backward pass, in order."""
        self._passes = 0
        self._priming = False

        # DDP's own side keeps the hook where Python's collector does not look: if that kept us, and
        # we the module, none of the three would ever be freed.
        weak = weakref.ref(self)

        def tierckpt_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            us = weak()
            assert us is not None
            inner = us.inner
            params = bucket.parameters()
            if bucket.index() == 0:
                us._buckets = []
                us._passes += 1
                if us._passes == 2:
                    us._arrivals.stop()
            us._buckets.append(params)
            if us._priming:
                future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future
            us._uneven.refuse(us.release != _release_nothing, us.inner is None)
            launched_seconds = time.perf_counter()
            future = inner[1](inner[0], bucket) if inner else us.mean(bucket)
            us.release(params, future, launched_seconds)
            return future

        # DDP checks the annotations at run time, by identity.
        tierckpt_hook.__annotations__ = {
            "bucket": GradBucket,
            "return": torch.futures.Future[torch.Tensor],
        }
        ddp.register_comm_hook(None, tierckpt_hook)
        # The reducer has it. DDP's list is copied and pickled with the module, and the copy's
        # reducer would not have it.
        ddp._comm_hooks.pop()
        _set_name(ddp, "")
        # The first hook that the user registers from now on is chained, not refused by DDP.
        for name, chain in (
            ("register_comm_hook", self._register),
            ("_register_builtin_comm_hook", self._register_built_in),
            ("join_hook", self._uneven.begin),
        ):
            setattr(ddp, name, _Instead(self, name, chain))

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> ReleaseHook | None:
        """The module's hook, registered if need be; None when the user has one registered."""
        if not cls.has_room(ddp):
            return None
        return cls._known(ddp) or cls(ddp)

    @staticmethod
    def _known(ddp: DistributedDataParallel) -> ReleaseHook | None:
        """The module's hook, if it is registered."""
        instead = ddp.register_comm_hook
        return instead.hook if isinstance(instead, _Instead) else None

    @classmethod
    def has_room(cls, ddp: DistributedDataParallel) -> bool:
        """False when the user has one registered; only DDP's log tells of one that is built in."""
        if cls._known(ddp) is not None:
            return True
        return not (ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"))

    @classmethod
    def may_be_given(cls, ddp: DistributedDataParallel) -> bool:
        """Whether a checkpointer may be given a hook for this module: it has none of the user's
        but what an earlier checkpointer was given."""
        known = cls._known(ddp)
        return cls.has_room(ddp) and (known is None or not known.inner or known._inner_is_given)

    @classmethod
    def states_of(cls, ddp: DistributedDataParallel) -> list[Any]:
        """What the hooks of the user's that it has remember."""
        known = cls._known(ddp)
        if known is None:
            return [state for _, state in ddp._comm_hooks]
        return [known.inner[0]] if known.inner else []

    def leaves_out(self, param: torch.Tensor) -> bool:
        """Whether this module has the parameter, and is known not to reduce it."""
        reduced = {id(p) for bucket in self._buckets for p in bucket}
        return id(param) in self._number and bool(reduced) and id(param) not in reduced

    def order(self) -> list[int]:
        """The parameters in the order of DDP's final buckets; after the first pass, in the order
        by which it will make them. Empty where no new module can be made to have them (`prime`):
        then they say nothing but how many passes this run has made."""
        if not self._makes_final_ones():
            return []
        if self._passes < 2:
            return self._arrivals.order() if self._passes else []
        return [self._number[id(p)] for bucket in self._buckets for p in bucket]

    def _makes_final_ones(self) -> bool:
        """Whether DDP makes other buckets after its first pass: it keeps the first ones where it
        looks for unused parameters, and with a static graph has three kinds in as many passes."""
        ddp = self._ddp
        return not (ddp.find_unused_parameters or getattr(ddp, "static_graph", False))

    def prime(self, order: list[int]) -> None:
        """Let a new DDP module have the buckets of the one before from its first pass on.

        DDP starts with provisional buckets and makes the final ones after its first backward pass,
        in the order in which gradients came. Other buckets are other sums: three ranks and more
        round differently in the first step after a restart. So the first pass is played: zero
        gradients come in the saved order, and nothing is reduced. It is none of the user's: their
        hooks on parameters are not called (those on autograd's own nodes are), and the random
        streams stay where they are.
        """
        ddp, params = self._ddp, self._params
        trained = [self._number[id(p)] for p in self._reduced if p.requires_grad]
        # An embedding with sparse gradients cannot be played a dense zero.
        sparse = any(getattr(m, "sparse", False) is True for m in ddp.module.modules())
        if not self._makes_final_ones() or sparse or self._passes or sorted(order) != trained:
            return
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

    def let_go_of(self, release: Release) -> None:
        """Of one whose checkpointer was closed, unless another has come: the module outlives it."""
        if self.release == release:
            self.release, self.chained = _release_nothing, _look_at_nothing

    def give(self, state: Any, hook: CommHook) -> None:
        """A checkpointer's argument; in place of what an earlier one was given, if anything."""
        self._chain(state, hook, hook.__qualname__)
        self._inner_is_given = True

    def _register(self, state: Any, hook: CommHook) -> None:
        """In place of DDP's `register_comm_hook`: raises what that raises, and when it does."""
        self._ddp._check_comm_hook(hook)
        if self.inner is not None:
            # Raises, as ours is there.
            dist._register_comm_hook(self._ddp.reducer, state, hook)  # type: ignore[attr-defined]
        self._chain(state, hook, hook.__qualname__)

    def _register_built_in(self, comm_hook_type: BuiltinCommHookType) -> None:
        """In place of DDP's `_register_builtin_comm_hook`."""
        if self.inner is not None:
            register: Any = dist._register_builtin_comm_hook  # type: ignore[attr-defined]
            register(self._ddp.reducer, comm_hook_type)  # the same
        self._chain(self._ddp.process_group, BUILT_IN[comm_hook_type], str(comm_hook_type))

    def _chain(self, state: Any, hook: CommHook, name: str) -> None:
        self.chained(state)
        self.inner, self._inner_is_given = (state, hook), False
        _set_name(self._ddp, name)


class _Instead:
    """Stands in a module for a method of DDP's; a copy of the module has DDP's own again."""

    def __init__(self, hook: ReleaseHook, name: str, chain: Callable[..., Any]) -> None:
        self.hook = hook
        self._name, self._chain = name, chain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._chain(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the copy, which has no attributes yet when this is looked up.
        return (getattr, (self.hook._ddp, self._name))


@contextlib.contextmanager
def _unheard(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """No hook on these parameters hears of gradients, and no random stream moves on."""
    # Emptied and filled again: who registered a hook has a handle to the very dict.
    found = [hooks for p in params for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    kept = [(hooks, dict(hooks)) for hooks in found if hooks]
    streams = pack_rng().make()
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, entries in kept:
            hooks.update(entries)
        load_rng(streams)


def _set_name(ddp: DistributedDataParallel, name: str) -> None:
    """What DDP's logging data call the communication hook."""
    assert ddp.logger is not None
    ddp.logger._set_comm_hook_name(name)


def _look_at_nothing(state: Any) -> None:
    pass


def _release_nothing(
    params: Iterable[torch.Tensor], reduction: Reduced, launched_seconds: float
) -> None:
    """Before there is a checkpointer."""


__all__ = ["CommHook", "ReleaseHook"]
