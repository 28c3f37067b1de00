"""Redundancy of the peer level: does a set of lost nodes cost a version? Pure.

The groups are those of a real job (`erasure/groups`), and a group's codes decide. The formulas at
the end give the expected number of losses; the simulation is compared with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from functools import cache

from tierckpt.erasure.codes import Code
from tierckpt.erasure.groups import Scheme, plan_groups

from .scenario import Job, Level


class Redundancy:
    """The groups of a job. Nodes are numbered from 0; racks hold neighbours."""

    def __init__(self, job: Job, level: Level) -> None:
        """Raises ConfigError if the ranks cannot be grouped."""
        self.scheme = Scheme.parse(level.scheme)
        unit = job.ranks_per_node * (job.nodes_per_rack if level.domain == "rack" else 1)
        domains = [f"{rank // unit}" for rank in range(job.ranks)]
        self._members: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._codes: list[Code] = []
        self.groups: list[tuple[int, ...]] = []
        for number, group in enumerate(plan_groups(domains, self.scheme, level.group_size)):
            self._codes.append(group.code)
            nodes = tuple(rank // job.ranks_per_node for rank in group.ranks)
            self.groups.append(nodes)
            for member, node in enumerate(nodes):
                self._members[node].append((number, member))

    def survives(self, lost_nodes: Collection[int]) -> bool:
        """True if the shards of these nodes can be rebuilt from the others'."""
        if not self._codes:
            return not lost_nodes
        by_group: defaultdict[int, list[int]] = defaultdict(list)
        for node in lost_nodes:
            for number, member in self._members[node]:
                by_group[number].append(member)
        return all(
            len(members) <= self.scheme.m or code_survives(self._codes[number], tuple(members))
            for number, members in by_group.items()
        )


@cache
def code_survives(code: Code, lost: tuple[int, ...]) -> bool:
    """True if a group can rebuild the shards of these members."""
    gone = set(lost)
    for row in range(code.n):
        segments = code.row(row)
        missing = [segment for segment in segments if segment.member in gone]
        if len(missing) > code.m and any(not segment.parity for segment in missing):
            return False
    return True


def losses_per_second(redundancy: Redundancy, node_rate: float, window_seconds: float) -> float:
    """Rate at which failures exceed the redundancy, to first order.

    Each node is lost `node_rate` times a second. It is unprotected for `window_seconds`, and each
    further loss begins the window again. So m + 1 losses, each within a window of the one before,
    cost a version, if they are fatal to a group. With F ordered fatal (m + 1)-tuples of nodes the
    rate is F r^(m+1) w^m. It is good as long as losses within a window are rare.
    """
    m = redundancy.scheme.m
    return _fatal_tuples(redundancy) * node_rate ** (m + 1) * window_seconds**m


def _fatal_tuples(redundancy: Redundancy) -> int:
    """Ordered tuples of m + 1 nodes that cost a version."""
    fatal: set[frozenset[int]] = set()
    need = redundancy.scheme.m + 1
    for nodes, code in zip(redundancy.groups, redundancy._codes, strict=True):
        for members in _fatal_members(code, need):
            fatal.add(frozenset(nodes[member] for member in members))
    orders = 1
    for number in range(2, need + 1):
        orders *= number
    return len(fatal) * orders


@cache
def _fatal_members(code: Code, need: int) -> tuple[tuple[int, ...], ...]:
    from itertools import combinations

    return tuple(
        lost for lost in combinations(range(code.n), need) if not code_survives(code, lost)
    )
