"""Replicas: the check that the state shared by all ranks is equal on all of them."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .monitor import ReplicaMonitor
    from .replica_check import NONE, Finding
    from .replicated_state import GPU_PART_ELEMENTS, Look, ReplicatedState, weighted_sum

__getattr__ = lazy_exports(__name__)
