"""DDP's `join()`: ranks make different numbers of steps, which checkpoints do not support."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

import tierckpt

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

    def begin(self, **settings: Any) -> JoinHook:
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


__all__ = ["UnevenInputs"]
