"""The reduction of DDP without a communication hook, with the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .gradient_hooks import watch_gradients

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
        self._begins = self._records = True
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
            self._records, self._begins = self._begins, False
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

    def begin_iteration(self) -> None:
        """Mark the next pass as the first of an iteration."""
        self._begins = True

    def divided(self) -> list[int]:
        """Numbers of the parameters with gradients that an iteration's first pass divides."""
        return sorted(self._divided)

    def resume(self, divided: Iterable[int]) -> None:
        """Let the next pass divide the gradients of these parameters, as in a run without a
        restart: gradients that the loop keeps between iterations are new after a restart."""
        self._storage.clear()
        self._begins = True
        if self._watches:
            self._resumed = set(divided)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
