"""DDP adapter: checkpoints from inside DistributedDataParallel's gradient allreduce.

::

    ckpt = ddp_ckpt.Checkpointer(ddp_model, optimizer, path="ckpts", extra={"schedule": schedule})
    for step in range(ckpt.restore(), steps):
        ...
        loss.backward()
        optimizer.step()
        schedule.step()
        ckpt.step()
    ckpt.close()
"""

from __future__ import annotations

from tierckpt import Callbacks, __version__

from .checkpointer import Checkpointer, wrap
from .comm_hook import HookState
from .torch_group import TorchGroup

__all__ = ["Callbacks", "Checkpointer", "HookState", "TorchGroup", "__version__", "wrap"]
