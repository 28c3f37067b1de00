"""DDP's `join()`: ranks that make different numbers of steps, which checkpoints cannot follow."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

import tierckpt

ENDS_APART = (
    "this DDP module trains under join(), where ranks may make different numbers of steps, and a "
    "checkpoint's boundary is one of all ranks: the job would hang when the first has no more "
    "data. Give all ranks the same number of batches (DistributedSampler or "
    "tierckpt.ResumableSampler do), or end all loops with the shortest by "
    "join(throw_on_early_termination=True); or close() the checkpointer before join()"
)
OTHER_DIVISOR = (
    "join(divide_by_initial_world_size=False): DDP divides by the number of ranks that still have "
    "data, and does not tell communication hooks, of which this module has one since it was given "
    "to a Checkpointer: gradients would be others. Make the DDP module anew for this loop, or "
    "leave the argument out"
)


class UnevenInputs:
    """Whether a DDP module is under `join()`, by way of its `join_hook`, which that asks for."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._joins = False
        """Until all ranks have left; DDP's own mark of it stays for ever."""

    def begin(self, **settings: Any) -> JoinHook:
        """In place of DDP's `join_hook`."""
        ddp = self._ddp
        theirs: JoinHook = type(ddp).join_hook(ddp, **settings)
        self._joins, ended = True, theirs.post_hook

        def post_hook(is_last_joiner: bool) -> None:
            self._joins = False
            ended(is_last_joiner)

        theirs.post_hook = post_hook  # type: ignore[method-assign]
        return theirs

    def refuse(self, has_checkpointer: bool, takes_mean: bool) -> None:
        """Before a bucket is reduced, on all ranks alike: raise UnsupportedStateError under a
        `join()` that would hang, or that has other gradients. One that throws when the first rank
        ends does neither."""
        config = self._ddp._join_config
        if not self._joins or not config.enable or config.throw_on_early_termination:
            return
        if has_checkpointer:
            raise tierckpt.UnsupportedStateError(ENDS_APART)
        if takes_mean and not self._ddp._divide_by_initial_world_size:
            raise tierckpt.UnsupportedStateError(OTHER_DIVISOR)


__all__ = ["UnevenInputs"]
