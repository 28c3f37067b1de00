"""Checkpointer: orchestration of all the other parts."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .adapter import VOID, Adapter, Handle, PlainAdapter
    from .checkpointer import close_now
    from .levels import Backlog, Promotion, Tiers, agent_client, flush_order, parities_to_mend
    from .levels import shards_to_mend, was_lost
    from .loop import Rounds
    from .node_resources import held_bytes
    from .shutdown import WaitProgress
    from .start import Restart, check_state, shard_bytes

__getattr__ = lazy_exports(__name__)
