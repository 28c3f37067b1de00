"""The adapter proper: a communication hook that releases a bucket's layers, and little else."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tierckpt

from .group import current_group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Checkpointer(tierckpt.Checkpointer):
    """Checkpoints a DDP (or unwrapped) model; see `tierckpt.Checkpointer` for the rest.

    Args:
        model: a DistributedDataParallel module, or any module (one process, or gradients reduced
            some other way): layers are then copied from the forward pass on.
        optimizer: as in `tierckpt.Checkpointer`.
        comm_hook: the communication hook to use for the reduction, as `(state, hook)`: what you
            would have given to `register_comm_hook`. Without one, a plain allreduce with the
            same arithmetic as DDP's own. Calling `model.register_comm_hook` afterwards works too.
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
        chainable = ddp is not None and not getattr(ddp, "_comm_hooks", [])
        self.releases_by_layer = chainable
        self._inner = comm_hook
        if comm_hook is not None and not chainable:
            raise tierckpt.ConfigError(
                "comm_hook was given, but the model is no DistributedDataParallel module or has a "
                "communication hook already; give the hook here and do not register it yourself"
            )
        super().__init__(model, optimizer, group=current_group(), **settings)
        if ddp is not None and chainable:
            self._ddp = ddp
            self._bucket_view = bool(ddp.gradient_as_bucket_view)
            ddp.register_comm_hook(None, self._make_hook())
            # A hook that the user registers from now on is chained, instead of refused by DDP.
            ddp.register_comm_hook = self._set_inner  # type: ignore[method-assign]
        elif ddp is not None:
            self._notice(
                "the model has a communication hook already: layers are copied from the forward "
                "pass on. Pass it as comm_hook=(state, hook) to copy under the allreduce",
                logging.INFO,
            )

    def _set_inner(self, state: Any, hook: CommHook) -> None:
        self._inner = (state, hook)

    def _make_hook(self) -> CommHook:
        def tierckpt_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            inner = self._inner
            future = inner[1](inner[0], bucket) if inner else _allreduce(bucket)
            self.release(bucket.parameters())
            return future

        # DDP checks the annotations at run time, by identity.
        tierckpt_hook.__annotations__ = {
            "bucket": GradBucket,
            "return": torch.futures.Future[torch.Tensor],
        }
        return tierckpt_hook


def _find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP module in `model`, which may be torch.compile's wrapper around it."""
    if isinstance(model, DistributedDataParallel):
        return model
    inner = getattr(model, "_orig_mod", None)
    return _find_ddp(inner) if isinstance(inner, torch.nn.Module) else None


def _allreduce(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over all ranks, bit for bit as DDP without a hook computes it.

    DDP multiplies by the reciprocal of the world size before it sums, but divides sparse gradients,
    as torch's own `allreduce_hook` does all; the two differ in the last bit when the world size is
    no power of two.
    """
    buffer = bucket.buffer()
    if buffer.is_sparse:
        buffer.div_(dist.get_world_size())
    else:
        buffer.mul_(1.0 / dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
    return future


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def wrap(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    restore: bool = True,
    close_at_exit: bool = True,
    **settings: Any,
) -> torch.optim.Optimizer:
    """Checkpoints for a script whose loop cannot be touched: one line behind the optimizer's.

    Returns the same optimizer, with hooks, so it stays what schedulers and scalers expect; its
    `checkpointer` attribute is the Checkpointer, `checkpointer.restored` what was restored. The
    boundary is the next forward pass. With `restore`, the newest version is brought back at once.
    With `close_at_exit`, a script that ends without an exception gets its final checkpoint.
    """
    checkpointer = Checkpointer(model, optimizer, **settings)
    optimizer.checkpointer = checkpointer  # type: ignore[attr-defined]
    if restore:
        checkpointer.restore()
    if close_at_exit:
        atexit.register(_close_at_exit, checkpointer)
    return optimizer


def _close_at_exit(checkpointer: Checkpointer) -> None:
    failed = getattr(sys, "last_value", None) is not None
    if failed or (
        dist.is_available() and not dist.is_initialized() and checkpointer.group.size > 1
    ):
        checkpointer.abandon()
    else:
        checkpointer.close()


__all__ = ["Checkpointer", "wrap"]
