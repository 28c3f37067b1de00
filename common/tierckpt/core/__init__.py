"""Core: the decisions that all ranks must make alike. Pure: no input or output."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from tierckpt.config import RetentionPolicy

    from .branches import MAX_HONOURED, ForkSource, Rollback, RollbackRequest, check_alike
    from .branches import merged_rollbacks
    from .branches import nearest_version, pending_request, rollback_of_setting, source_of
    from .decisions import MAX_QUIET_SECONDS, NEVER_SECONDS, NO_HALT, NO_METRIC, QUIET_SECONDS
    from .decisions import (
        PLACES,
        VOTE_WIDTH,
        Decision,
        HaltRequest,
        HaltVote,
        LevelVote,
        Reason,
        Schedule,
    )
    from .decisions import StallTimeout, Vote, as_vote, most_quiet_seconds, of_vote
    from .levels import AGENT, AWAITED, BROKEN, DONE, INTERVALS, LEDGERS, LOCAL, MEMORY, PEER
    from .levels import PENDING, PERSISTENT, RANK, Cost, CostEstimate, Level, place_of
    from .parts import Boundary, Stalls
    from .restore_plan import EVERYWHERE, Found, FoundParity, Inventory, Location, Pin, Problem
    from .restore_plan import RestorePlan, Source, inventory_digest, newest_whole, pack_inventory
    from .restore_plan import plan_restore, unpack_inventory
    from .retention import Best, HeldVersion, best_of, milestones, retirable, retirable_names
    from .tuning import LOOK_STEPS, MIN_STEPS, SHARES, Change, Hysteresis
    from .tuning import LevelModel, RollingStats, StepTimer, Tuner, daly_seconds, optimum, overhead
    from .tuning import rates, whole_steps, within_budget, young_seconds
    from .version import REMEMBERED, Ledger, Version, Versions, superseded_by

__getattr__ = lazy_exports(__name__)
