"""Simulation of a job: how much of its time trains, under failures of processes, nodes and stores.

`scenario` is the description of a job: its TOML file, and examples to start from. `model` computes
durations from bandwidths, chooses intervals, and has the groups of nodes that protect each other.
`course` simulates one course of the job, or several, and gives means with confidence intervals,
also as JSON.

Failures are events of one superposed process, however many ranks there are. No step and no version
is an event: at a failure, the versions that exist are computed. docs/simulate.md has the model.

An undisturbed job has made v steps, of s seconds each, and their stalls at the position
P(v) = v s + sum over levels of c floor(v / n), where a level takes multiples of n and a version of
it stalls the training for c. A failure at position x finds, on a level with latency L, the largest
multiple v of n with P(v) + L <= x; lost work is x - P(v). A flush is late by the time for which the
store was slow or out. An agent completes its writes after its processes were killed. No interval is
shorter than a write; a note says so.

Losses beyond the redundancy, to first order: nodes are lost r times a second each, and each leaves
its groups exposed for w seconds. With F ordered sets of m + 1 nodes that no group survives,
versions are lost F r^(m+1) w^m times a second: F is two for each node with `partner` in groups of
more than two, g - 1 with `xor` in groups of g. If failures hit restarts, too, a recovery of R takes
M (exp(R / M) - 1) on average with a failure every M.
"""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .course import Estimate, Study, document, simulate, with_best_intervals
    from .model import Redundancy, Rung, Schedule, losses_per_second
    from .scenario import EXAMPLES, TABLES, Bandwidth, Failures, Job, Level, Nodes, Restart
    from .scenario import Scenario, assignments, merge_trees, read_tree, scenario_of

__getattr__ = lazy_exports(__name__)
