"""Groups of parameters that are released together, where DDP reduces them without our hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

FIRST_BYTES = 1 << 20
"""Size of the first group, as of DDP's first bucket."""


class GradientGroups:
    """Calls `on_group` in each backward pass that DDP reduces, once per group.

    A group is about as large as one of DDP's buckets, and has neighbours in the order of the
    parameters. One hook is on its first parameter, whose gradient usually comes last: right before
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


__all__ = ["GradientGroups"]
