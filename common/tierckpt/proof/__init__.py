"""Proof: the test of `tierckpt prove` whether a killed and restarted script continues exactly.

A job under test has a `ProofOrder` (`coordination.proof_order`). Its checkpoints go to a scratch
folder, each rank records the contents of every version (`recorder`, `records`), and the job ends
or is killed where the order says. `runs` starts such jobs, and `verdict` compares the records and
reports the behaviour that the compared steps did not exercise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .recorder import state_of
    from .records import RankRun, Writer, read as read_records
    from .runs import ProveError, Run, end_survivors
    from .verdict import Departure, IncomparableError, Request, cause, coverage_gaps, departure
    from .verdict import description, over_epochs

__getattr__ = lazy_exports(__name__)

WALL_CLOCK = "wall clock"
"""Key of a value in an object's state, not compared: times, which differ from run to run."""
