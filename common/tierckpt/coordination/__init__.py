"""Coordination: what ranks tell one another to decide alike."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .agreement import Agreement
    from .ballots import OWN_WIDTH, Ballots, GroupBallots, RankGoneError, SharedBallots, ballots_for
    from .error_barrier import ErrorBarrier, gather_or_raise, said_by
    from .job_history import JobHistory, Offer, gather_inventories, is_sender
    from .peers import FormerNodes, PeerSetup, out_of_reach, redundancy_groups
    from .pinning import mark_everywhere
    from .proof_order import VARIABLE as PROOF_VARIABLE, ProofOrder, order_here, path_of, redirected
    from .settings_check import JobTopology, agree_on_settings
    from .versions import Reports, SlotHandoff

__getattr__ = lazy_exports(__name__)
