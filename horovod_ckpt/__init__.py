"""Horovod adapter: checkpoints from callbacks in `hvd.DistributedOptimizer`.

::

    import horovod.torch as hvd, horovod_ckpt

    hvd.init()
    optimizer = horovod_ckpt.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), model=model, path="ckpts"
    )
    ckpt = optimizer.checkpointer
    for step in range(ckpt.restore(), steps):
        ...
        loss.backward()
        optimizer.step()
        ckpt.step()
    ckpt.close()
"""

from __future__ import annotations

from tierckpt import Callbacks, __version__

try:
    from .adapter import Checkpointer, DistributedOptimizer, install
    from .horovod_group import HorovodGroup
except ImportError as error:
    raise ImportError(
        "horovod_ckpt needs a Horovod that was built for the torch in use, and importing it "
        f"failed: {error}. In a checkout of Tierckpt `python tools/make_horovod.py` builds one "
        "into this environment (`make horovod`: into .venv); pip alone can't"
    ) from error

__all__ = [
    "Callbacks",
    "Checkpointer",
    "DistributedOptimizer",
    "HorovodGroup",
    "__version__",
    "install",
]
