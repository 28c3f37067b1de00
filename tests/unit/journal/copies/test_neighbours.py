"""The ranks that keep copies of each other's journals."""

from __future__ import annotations

from tierckpt.erasure import Scheme, plan_groups
from tierckpt.journal import neighbours


def test_every_journal_has_one_copy_on_another_node() -> None:
    domains = [f"node{rank // 4}" for rank in range(20)]
    for scheme in ("xor", "partner", "rs 3+2"):
        groups = plan_groups(domains, Scheme.parse(scheme))
        found = {rank: neighbours(groups, rank) for rank in range(20)}
        pairs = {rank: pair for rank, pair in found.items() if pair is not None}
        assert pairs.keys() == {*range(20)}
        assert all(pairs[keeper][1] == rank for rank, (keeper, _) in pairs.items())
        assert all(domains[rank] != domains[keeper] for rank, (keeper, _) in pairs.items())
        assert len({keeper for keeper, _ in pairs.values()}) == 20


def test_without_groups_there_is_none() -> None:
    assert neighbours((), 0) is None
