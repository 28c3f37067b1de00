"""The functions that Lightning's entry points name: callbacks for every Trainer.

They import nothing unless TIERCKPT_PATH is set: Lightning calls them in every job of an environment
that has Tierckpt.
"""

from __future__ import annotations

import os
from typing import Any

PATH = "TIERCKPT_PATH"


def callbacks() -> list[Any]:
    """The callback if TIERCKPT_PATH is set; it does nothing in a Trainer that was given one."""
    if not os.environ.get(PATH):
        return []
    from .callback import TierCheckpoint

    return [TierCheckpoint.automatic()]


__all__ = ["callbacks"]
