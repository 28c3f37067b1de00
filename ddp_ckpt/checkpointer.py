"""The adapter proper: a communication hook that releases a bucket's layers, and little else."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tierckpt.iterations import Unattached
from tierckpt.scripts import serve

from .arrivals import Arrivals
from .group import current_group
from .hookstate import HookState
from .reduction import Mean, Reduced

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket

CommHook = Callable[[Any, GradBucket], Reduced]
Release = Callable[[Iterable[torch.Tensor], Reduced, float], None]


class Checkpointer(tierckpt.Checkpointer):
    """Checkpoints a DDP (or unwrapped) model; see `tierckpt.Checkpointer` for the rest.

    Args:
        model: a DistributedDataParallel module, or any module (one process, or gradients reduced
            some other way): layers are then copied from the forward pass on.
        optimizer: as in `tierckpt.Checkpointer`.
        comm_hook: the communication hook to use for the reduction, as `(state, hook)`: what you
            would have given to `register_comm_hook`. Without one, a plain allreduce with the
            same arithmetic as DDP's own. Calling `model.register_comm_hook` afterwards works too.
            What such a hook remembers is not in the checkpoints by itself: see `HookState`.
        settings: as in `tierckpt.Checkpointer`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        comm_hook: tuple[Any, CommHook] | None = None,
        **settings: Any,
    ) -> None:
        ddp = _find_ddp(model)
        hook = _Hook.of(ddp) if ddp is not None else None
        self.releases_by_layer = hook is not None
        if comm_hook is not None and hook is None:
            raise tierckpt.ConfigError(
                "comm_hook was given, but the model is no DistributedDataParallel module or has a "
                "communication hook already; give the hook here and do not register it yourself"
            )
        objects = (settings.get("extra_per_rank") or {}).values()
        self._hook_states = [obj for obj in objects if isinstance(obj, HookState)]
        if self._hook_states and getattr(ddp, "static_graph", False):
            raise tierckpt.ConfigError(
                "HookState with static_graph=True: DDP makes its final buckets after the first "
                "iteration and cannot be shown them before, and what the hook remembers is by "
                "bucket. Leave one of the two out"
            )
        group = current_group(ddp.process_group if ddp is not None else None)
        super().__init__(model, optimizer, group=group, **settings)
        self._hook = hook
        if hook is not None:
            hook.release, hook.chained = self.release, self._look_at_hook
            if comm_hook is not None:
                hook.set_inner(*comm_hook)
        elif ddp is not None:
            self._reports.notice(
                "the model has a communication hook already: layers are copied from the forward "
                "pass on. Pass it as comm_hook=(state, hook) to copy under the allreduce",
                logging.INFO,
            )

    def _shut_down(self, remove: bool) -> None:
        super()._shut_down(remove)
        if self._hook is not None:
            self._hook.let_go_of(self)

    def _look_at_hook(self, state: Any) -> None:
        """Say it when a hook remembers what is not saved."""
        known = [obj.state for obj in self._hook_states]
        if state is None or isinstance(state, dist.ProcessGroup) or any(s is state for s in known):
            return
        changes_results = isinstance(state, PowerSGDState)
        self._reports.notice(
            f"the communication hook's state, a {type(state).__name__}, is not in the checkpoints: "
            "a resumed run begins without what it remembers"
            f"{' (its error feedback), and its curve is another one' if changes_results else ''}. "
            'Give extra_per_rank={"hook": ddp_ckpt.HookState(state)} to have it saved',
            logging.WARNING if changes_results else logging.INFO,
        )

    def _made_step(self, label: str) -> bool:
        if self._hook is not None:
            self._hook.mean.made_step()
        return super()._made_step(label)

    def pack_adapter(self) -> Any:
        """The order of DDP's buckets, and how it took the mean."""
        if self._hook is None:
            return None
        return {"buckets": self._hook.order(), "divided": self._hook.mean.divided()}

    def load_adapter(self, value: Any) -> None:
        """Make DDP's buckets those of the saved run. For two ranks any buckets sum alike, but a
        hook may remember something of each."""
        saved = value or {}
        order = saved.get("buckets")
        if self._hook is None:
            return
        if order and (self.group.size > 2 or self._hook_states):
            self._hook.prime(order)
        self._hook.mean.resume(saved.get("divided", ()))


class _Hook:
    """What is registered with DDP: the reduction, then the release of the bucket's layers.

    DDP takes one hook in a module's life, so there is one of these for a module; checkpointers
    that follow each other take turns.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.inner: tuple[Any, CommHook] | None = None
        self.release: Release = _release_nothing
        self.chained: Callable[[Any], None] = _look_at_nothing
        """Hears of the state of a hook that is chained."""
        self._ddp = ddp
        # DDP's parameters are those it was made with; to walk its modules at every boundary takes
        # longer than everything else that is done there for the buckets.
        params = list(ddp.module.parameters())
        self._number = {id(p): i for i, p in enumerate(params)}
        self._arrivals = Arrivals(params, self._number)
        self.mean = Mean(ddp, self._number)
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
        # A hook that the user registers from now on is chained, instead of refused by DDP.
        ddp.register_comm_hook = self.set_inner  # type: ignore[method-assign]

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> _Hook | None:
        """The module's hook, registered if need be; None when the user has one registered."""
        known = getattr(ddp.register_comm_hook, "__self__", None)
        if isinstance(known, _Hook):
            return known
        return None if getattr(ddp, "_comm_hooks", []) else cls(ddp)

    def order(self) -> list[int]:
        """The parameters in the order of DDP's final buckets; after the first pass, in the order
        by which it will make them."""
        if self._passes < 2:
            return self._arrivals.order() if self._passes else []
        return [self._number[id(p)] for bucket in self._buckets for p in bucket]

    def prime(self, order: list[int]) -> None:
        """Let a new DDP module have the buckets of the one before from its first pass on.

        DDP starts with provisional buckets and makes the final ones after its first backward pass,
        in the order in which gradients came. Other buckets are other sums: three ranks and more
        round differently in the first step after a restart. So the first pass is played: zero
        gradients come in the saved order, and nothing is reduced.
        """
        ddp = self._ddp
        params = list(ddp.module.parameters())
        final = ddp.find_unused_parameters or getattr(ddp, "static_graph", False)
        # An embedding with sparse gradients cannot be played a dense zero.
        sparse = any(getattr(m, "sparse", False) is True for m in ddp.module.modules())
        if final or sparse or self._passes or sorted(order) != _trained(params):
            return
        self._priming = True
        try:
            ddp.reducer.prepare_for_forward()
            ddp.reducer.prepare_for_backward([])
            for index in order:
                torch.autograd.backward([params[index]], [torch.zeros_like(params[index])])
        finally:
            self._priming = False
            for param in params:
                param.grad = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Unattached, ())

    def let_go_of(self, checkpointer: Checkpointer) -> None:
        """Of one that was closed, unless another one has come: the module outlives it."""
        if self.release == checkpointer.release:
            self.release, self.chained = _release_nothing, _look_at_nothing

    def set_inner(self, state: Any, hook: CommHook) -> None:
        """In place of DDP's `register_comm_hook`."""
        self.inner = (state, hook)
        self.chained(state)


def _trained(params: list[torch.nn.Parameter]) -> list[int]:
    return [i for i, p in enumerate(params) if p.requires_grad]


def _look_at_nothing(state: Any) -> None:
    pass


def _release_nothing(
    params: Iterable[torch.Tensor], reduction: Reduced, launched_seconds: float
) -> None:
    """Before there is a checkpointer."""


def _find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP module in `model`, which may be torch.compile's wrapper around it."""
    if isinstance(model, DistributedDataParallel):
        return model
    inner = getattr(model, "_orig_mod", None)
    return _find_ddp(inner) if isinstance(inner, torch.nn.Module) else None


def wrap(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    restore: bool = True,
    close_at_exit: bool = True,
    **settings: Any,
) -> torch.optim.Optimizer:
    """Checkpoints for a script whose loop cannot be touched: one line behind the optimizer's, or
    behind the scheduler's where there is one, which goes into `extra`: it would begin anew else.

    Returns the same optimizer, with hooks, so it stays what schedulers and scalers expect; its
    `checkpointer` attribute is the Checkpointer, `checkpointer.restored` what was restored. The
    boundary is the next forward pass. With `restore`, the newest version is brought back at once.
    With `close_at_exit`, a script that ends without an exception gets its final checkpoint.
    """
    checkpointer = Checkpointer(model, optimizer, **{"boundary": "forward", **settings})
    optimizer.checkpointer = checkpointer  # type: ignore[attr-defined]
    serve(checkpointer, restore, close_at_exit)
    return optimizer


__all__ = ["Checkpointer", "wrap"]
