"""Import of other tools' checkpoints as versions, and export of versions to them."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .log_history import entries_of, lines_of

__getattr__ = lazy_exports(__name__)
