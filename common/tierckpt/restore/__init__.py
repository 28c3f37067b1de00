"""Restore: from the versions that exist to the live training state."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .loader import LARGE_BYTES, Loader, PieceWriter, TensorPreallocator
    from .progress import Progress
    from .rebuild import ShardBroadcaster
    from .shards import Failure, FaultScope, Part, Reads, ShardImage, runs_of
    from .verification import Candidates, VerifiedVersion

__getattr__ = lazy_exports(__name__)
