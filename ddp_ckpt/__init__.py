"""DDP adapter: checkpoints from inside DistributedDataParallel's gradient allreduce.

ckpt = ddp_ckpt.Checkpointer(ddp_model, optimizer, path="ckpts", extra={"scheduler": sched})
start = ckpt.restore()
for step in range(start, steps):
    ...; loss.backward(); optimizer.step(); sched.step()
    ckpt.step()
ckpt.close()
"""

from __future__ import annotations

from tierckpt import Callbacks, __version__

from .checkpointer import Checkpointer, wrap
from .group import TorchGroup
from .hookstate import HookState

__all__ = ["Callbacks", "Checkpointer", "HookState", "TorchGroup", "__version__", "wrap"]
