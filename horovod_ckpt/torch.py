"""`import horovod_ckpt.torch as hvd` in place of `import horovod.torch as hvd`.

Everything of Horovod's module under the same names, but two: `DistributedOptimizer` restores the
newest checkpoint at once, takes checkpoints and closes at the end of the script, and
`elastic.TorchState` commits to our levels. Settings come from `TIERCKPT_*` variables or a file
(`TIERCKPT_CONFIG`), or as further arguments.
"""

from __future__ import annotations

import os
from typing import Any

import horovod.torch
from horovod.torch import *  # noqa: F403

from . import elastic
from . import optimizer as _ours

__all__ = ["DistributedOptimizer", "elastic"]
__all__ += [name for name in dir(horovod.torch) if not name.startswith("_")]


def __getattr__(name: str) -> Any:
    return getattr(horovod.torch, name)


def DistributedOptimizer(optimizer: Any, *args: Any, **settings: Any) -> Any:
    """`horovod_ckpt.DistributedOptimizer` for a script that knows nothing of checkpoints.

    The boundary is the next forward pass. Under elastic Horovod it is Horovod's own function:
    there the state object takes the checkpoints.
    """
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        return horovod.torch.DistributedOptimizer(optimizer, *args, **settings)
    defaults = {"restore": True, "close_at_exit": True, "boundary": "forward"}
    return _ours.DistributedOptimizer(optimizer, *args, **{**defaults, **settings})
