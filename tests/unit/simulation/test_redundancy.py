"""Which losses of nodes cost a version, and how many are expected."""

from __future__ import annotations

from itertools import combinations

import pytest

from tierckpt.simulation import (
    Bandwidth,
    Failures,
    Job,
    Level,
    Nodes,
    Redundancy,
    Restart,
    Scenario,
    losses_per_second,
    simulate,
)

DAY = 86400.0


def of(scheme: str, nodes: int = 16, **more: int) -> Redundancy:
    return Redundancy(Job(ranks=2 * nodes, ranks_per_node=2), Level("peer", scheme=scheme, **more))


@pytest.mark.parametrize(
    ("scheme", "survived"),
    [("none", 0), ("partner", 1), ("xor", 1), ("partner 2", 2), ("rs 4+2", 2)],
)
def test_a_scheme_survives_as_many_losses_as_it_says(scheme: str, survived: int) -> None:
    redundancy = of(scheme)
    assert all(redundancy.survives(lost) for lost in combinations(range(16), survived))
    assert not all(redundancy.survives(lost) for lost in combinations(range(16), survived + 1))


def test_nodes_of_other_groups_do_not_count() -> None:
    redundancy = of("xor", group_size=8)  # 32 ranks: four groups
    group = redundancy.groups[0]
    assert not redundancy.survives(group[:2])
    others = set(range(16)) - set(group)
    assert all(redundancy.survives({group[0], other}) for other in others)


def test_partners_survive_two_losses_that_are_not_neighbours() -> None:
    ring = of("partner", group_size=8).groups[0]
    redundancy = of("partner", group_size=8)
    assert not redundancy.survives(ring[:2])
    assert redundancy.survives((ring[0], ring[2]))


def scenario(scheme: str, node_every_days: float, days: float) -> Scenario:
    """One group of 8 nodes; each loss leaves it exposed for 600 s."""
    return Scenario(
        job=Job(ranks=8, ranks_per_node=1, step_seconds=10, length_seconds=days * DAY),
        failures=Failures(node_every_seconds=node_every_days * DAY),
        nodes=Nodes(),
        bandwidth=Bandwidth(),
        restart=Restart(notice_seconds=60, start_seconds=300, node_seconds=120),
        levels=(
            Level("local", every_steps=60),
            Level("peer", scheme=scheme, restore_seconds=60, protect_seconds=60),
            Level("persistent", every_steps=600),
        ),
        replicas=8,
    )


@pytest.mark.parametrize(
    ("scheme", "node_every_days"), [("partner", 1.0), ("xor", 2.0), ("rs 4+2", 0.5)]
)
def test_simulated_losses_are_those_of_the_formula(scheme: str, node_every_days: float) -> None:
    study = simulate(scenario(scheme, node_every_days, days=80))
    found = sum(outcome.beyond_redundancy for outcome in study.outcomes)
    assert study.expected_losses is not None
    expected = len(study.outcomes) * study.expected_losses
    assert expected > 15, "enough to compare"
    # A window that other losses prolong makes it a little more than the first order.
    assert expected - 3 * expected**0.5 < found < 1.25 * expected + 3 * expected**0.5


def test_a_loss_beyond_the_redundancy_is_repaired_by_the_store() -> None:
    study = simulate(scenario("xor", 1, days=20))
    beyond = sum(outcome.beyond_redundancy for outcome in study.outcomes)
    stored = sum(outcome.sources["persistent"] for outcome in study.outcomes)
    # Two may meet in one restart; and a loss before the first version after a restart needs the
    # store again.
    assert 0.7 * beyond < stored < 1.3 * beyond


def test_xor_loses_more_than_partner_and_rs_far_less() -> None:
    rates = {
        scheme: losses_per_second(of(scheme, nodes=64, group_size=8), 1e-8, 600)
        for scheme in ("partner", "xor", "rs 4+2")
    }
    assert rates["xor"] == pytest.approx(3.5 * rates["partner"])  # 7 other members, or 2 neighbours
    assert rates["rs 4+2"] < 1e-3 * rates["partner"]
