"""Checkpoints for jobs of Lightning's Trainer, of the packages lightning and pytorch_lightning.

::

    from tierckpt.lightning import TierCheckpoint

    Trainer(callbacks=[TierCheckpoint(path="ckpts")]).fit(model)

A restart resumes at the next batch, in the middle of an epoch, bit for bit. With the variable
TIERCKPT_PATH set, every Trainer has the callback, without a change of the script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .callback import TierCheckpoint

__all__ = ["TierCheckpoint"]

# Lazy: Lightning loads the entry points of this package also in jobs that do not use it.
__getattr__ = lazy_exports(__name__)
