"""Offline: checkpoints without the job that made them.

`survey` and `catalog` list what exists, `verify` checks it, `stored_version` and `comparison` read
tensors.
"""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .catalog import Row, outlook, rows_of
    from .comparison import Difference, compare
    from .leaves import fingerprint, leaves_of, shown_leaf
    from .stored_version import open_version
    from .survey import Survey, survey as survey_of

__getattr__ = lazy_exports(__name__)
