"""The simulated job: its accounts, and courses that can be computed by hand."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from msgspec.structs import replace

from tierckpt.core import daly_seconds
from tierckpt.errors import ConfigError
from tierckpt.simulation import (
    Estimate,
    Failures,
    Job,
    Level,
    Nodes,
    Restart,
    Scenario,
    document,
    simulate,
    with_best_intervals,
)

DAY = 86400.0


def scenario(*levels: Level, **changes: Any) -> Scenario:
    """16 ranks on 2 nodes, steps of 1 s, a restart of 10 s and 30 s. No failures."""
    base = Scenario(
        job=Job(ranks=16, step_seconds=1.0, length_seconds=1000.0),
        restart=Restart(10.0, 30.0, first_start_seconds=0.0),
        levels=levels,
        replicas=1,
    )
    return replace(base, **changes)


def course(wanted: Scenario) -> Any:
    (outcome,) = simulate(wanted).outcomes
    return outcome


MEMORY = Level("memory", every_steps=1, restore_seconds=2.0)
LOCAL = Level("local", every_steps=50, write_seconds=5.0, restore_seconds=3.0)
STORE = Level("persistent", every_steps=100, write_seconds=20.0, restore_seconds=8.0)


def test_a_failure_costs_the_steps_that_memory_had_not_sealed() -> None:
    failures = Failures(at_seconds=(500.5,))
    outcome = course(scenario(MEMORY, failures=failures))
    # Version 499 was sealed during step 500; the 501st step was under way.
    assert outcome.lost_by_source["memory"] == pytest.approx(1.5)
    assert (outcome.seconds["noticed"], outcome.seconds["restart"]) == (10.0, 30.0)
    assert outcome.seconds["load memory"] == 2.0
    assert outcome.version == 1000 - 42 - 1 - 1  # 1.5 s lost, and half a step at the end


def test_without_memory_the_agent_completes_the_write_under_way() -> None:
    """Version 500 is complete on the disk at 505 s. The agent lives when the process is killed."""
    at = Failures(at_seconds=(502.0,))
    outcome = course(scenario(LOCAL, failures=at))
    assert outcome.lost_by_source["local"] == pytest.approx(2.0)
    blocking = replace(LOCAL, blocking=True)  # a process that writes itself does not
    stalls = 5.0 * 9
    outcome = course(scenario(blocking, failures=Failures(at_seconds=(502.0 + stalls,))))
    assert outcome.lost_by_source["local"] == pytest.approx(52.0)


def test_all_time_is_accounted_for_once() -> None:
    failures = Failures(
        process_every_seconds=2 * DAY,
        reboot_every_seconds=1 * DAY,
        node_every_seconds=1 * DAY,
        rack_every_seconds=2 * DAY,
        store_out_every_seconds=DAY,
        store_slow_every_seconds=DAY,
    )
    levels = MEMORY, LOCAL, Level("peer", group_size=2), STORE
    for nodes in (Nodes(), Nodes(spares=1, repair_seconds=7200)):
        job = Job(ranks=64, nodes_per_rack=2, length_seconds=20 * DAY, step_seconds=1.0)
        study = simulate(scenario(*levels, job=job, failures=failures, nodes=nodes, replicas=2))
        for outcome in study.outcomes:
            phases = study.phases(outcome)
            assert math.fsum(phases.values()) == pytest.approx(outcome.wall_seconds)
            assert outcome.wall_seconds == 20 * DAY
            assert min(phases.values()) >= 0
            assert outcome.failures.keys() == {"process", "reboot", "node", "rack"}
            assert {"memory", "local", "peer"} <= outcome.sources.keys()
            lost = math.fsum(outcome.lost_by_source.values())
            assert phases["lost"] == pytest.approx(lost, abs=600)  # a restart under way at the end
            assert (phases["nodes"] > 0) == (nodes.spares == 1), "without spares it waits"


def test_the_same_seed_gives_the_same_course() -> None:
    failures = Failures(job_every_seconds=100.0, node_share=0.5)
    wanted = scenario(MEMORY, STORE, failures=failures, replicas=3)
    one, again = (document(simulate(wanted)) for _ in range(2))
    assert one == again
    assert one != document(simulate(replace(wanted, seed=2)))
    walls = {o.version for o in simulate(wanted).outcomes}
    assert len(walls) > 1, "replicas differ"


def test_a_lost_node_needs_another_place() -> None:
    failures = Failures(job_every_seconds=2000.0, node_share=1.0)
    job = Job(ranks=16, length_seconds=DAY, step_seconds=1.0)
    no_store = course(scenario(MEMORY, LOCAL, failures=failures, job=job))
    assert set(no_store.sources) == {"scratch"}
    stored = course(scenario(MEMORY, LOCAL, STORE, failures=failures, job=job))
    assert set(stored.sources) <= {"scratch", "persistent"}
    partner = Level("peer", scheme="partner", group_size=2)
    peers = course(scenario(MEMORY, LOCAL, partner, STORE, failures=failures, job=job))
    assert peers.sources["peer"] > peers.sources["persistent"]
    assert peers.version > stored.version > no_store.version


def test_while_the_store_is_out_versions_and_restarts_wait() -> None:
    job = Job(ranks=16, length_seconds=30 * DAY, step_seconds=1.0)
    base = Failures(job_every_seconds=4 * 3600.0, node_share=1.0)
    out = replace(base, store_out_every_seconds=6 * 3600.0, store_out_seconds=3600.0)
    whole = simulate(scenario(STORE, failures=base, job=job, replicas=3))
    troubled = simulate(scenario(STORE, failures=out, job=job, replicas=3))
    assert sum(o.outages for o in whole.outcomes) == 0
    assert sum(o.outages for o in troubled.outcomes) > 100
    one, two = (document(each)["sources"]["persistent"] for each in (whole, troubled))
    assert one["load_seconds"] == pytest.approx(8.0, rel=0.05)
    assert two["load_seconds"] > 15 * one["load_seconds"]
    assert two["lost_seconds"] > 2 * one["lost_seconds"]


def test_warm_restarts_are_for_processes_alone() -> None:
    restart = Restart(10.0, 30.0, 2.0, 0.0)
    failures = Failures(at_seconds=(500.5,))
    warm = course(scenario(MEMORY, failures=failures, restart=restart))
    assert warm.seconds["restart"] == 2.0
    failures = Failures(job_every_seconds=300.0, node_share=1.0)
    cold = course(scenario(STORE, failures=failures, restart=restart))
    assert cold.sources["persistent"] + cold.sources["scratch"] > 0
    assert cold.seconds["restart"] > 25 * (cold.sources["persistent"] + cold.sources["scratch"])


def test_the_best_interval_is_better_than_half_and_double() -> None:
    """Daly's formula, with a blocking version of 30 s and a failure every 4 hours."""
    level = Level("persistent", policy="best", blocking=True, write_seconds=30, restore_seconds=60)
    job = Job(ranks=16, length_seconds=365 * DAY, step_seconds=1.0)
    failures = Failures(job_every_seconds=4 * 3600.0)
    wanted = scenario(level, job=job, failures=failures, replicas=4)
    best = simulate(wanted)
    every = best.plan.schedule.rungs[0].every_steps
    assert every == pytest.approx(daly_seconds(30.0, 1 / 14400), abs=1)
    for factor in (0.5, 2.0):
        other = replace(level, policy="", every_steps=round(every * factor))
        assert simulate(replace(wanted, levels=(other,))).goodput.mean < best.goodput.mean
    slow = replace(wanted, levels=(replace(level, policy="", every_steps=20 * every),))
    assert with_best_intervals(slow).levels == wanted.levels


def test_an_interval_is_no_shorter_than_a_write() -> None:
    study = simulate(scenario(MEMORY, replace(LOCAL, every_steps=1, write_seconds=7.5)))
    _, local = study.plan.schedule.rungs
    assert local.every_steps == 8
    assert study.plan.notes == (
        "local: every 8 steps instead of 1, since a version takes 7.5 s to be complete",
    )


def test_a_year_of_16384_ranks_takes_a_fraction_of_a_minute() -> None:
    """Events are counted, not seconds: a few per failure, whatever the ranks and steps."""
    import simpy

    steps = 0
    original = simpy.Environment.step

    def counting(self: simpy.Environment) -> None:
        nonlocal steps
        steps += 1
        original(self)

    job = Job(ranks=16_384, step_seconds=1.0, length_seconds=365 * DAY)
    failures = Failures(job_every_seconds=3.1 * 3600, node_share=0.6)
    wanted = scenario(MEMORY, LOCAL, Level("peer", scheme="rs 4+2"), STORE, job=job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simpy.Environment, "step", counting)
        outcome = course(replace(wanted, failures=failures))
    count = sum(outcome.failures.values())
    assert 2500 < count < 3200
    assert steps < 12 * count


def test_confidence_intervals() -> None:
    for freedom, factor in ((1, 12.706), (3, 3.182), (5, 2.571), (9, 2.262), (29, 2.045)):
        values = [*map(float, range(freedom + 1))]
        expected = factor * statistics.stdev(values) / len(values) ** 0.5
        slack = 0.02 if freedom < 5 else 0.002
        assert Estimate.of(values).error == pytest.approx(expected, rel=slack)
    assert Estimate.of([1.0, 2.0, 3.0, 4.0]).mean == 2.5
    assert math.isnan(Estimate.of([1.0]).error)


def test_transfers_end_however_late_it_is() -> None:
    """In ten years of seconds the clock has a resolution of 6e-8."""
    job = Job(ranks=16, length_seconds=3650 * DAY, step_seconds=1.0)
    level = replace(STORE, every_steps=3600, restore_seconds=8.123456789)
    outcome = course(scenario(level, job=job, failures=Failures(job_every_seconds=DAY)))
    assert outcome.sources["persistent"] > 3000
    assert outcome.seconds["load persistent"] == pytest.approx(
        8.1234567 * outcome.sources["persistent"], rel=0.001
    )


def test_a_job_that_can_never_get_done_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit of the wall time it would be simulated without end."""
    monkeypatch.setattr("tierckpt.simulation.course.MAX_WITHOUT_PROGRESS", 1000)
    often = Failures(job_every_seconds=3.0)
    endless = Job(ranks=16, step_seconds=1.0, length_seconds=math.inf, work_seconds=100.0)
    with pytest.raises(ConfigError, match=r"1,001 failures in a row.*give \[job\] length"):
        course(scenario(LOCAL, job=endless, failures=often))
    limited = replace(endless, length_seconds=9000.0)
    assert not course(scenario(LOCAL, job=limited, failures=often)).done


def test_lost_nodes_that_are_never_repaired_use_up_the_spares() -> None:
    lost = Failures(node_every_seconds=500.0)
    study = simulate(scenario(STORE, failures=lost, nodes=Nodes(1, repair_seconds=math.inf)))
    assert study.outcomes[0].failures["node"] >= 2
    assert study.outcomes[0].seconds["nodes"] > 0.0, "it waits for a node until the end"
    assert any("waits for nodes, with 1 spare (repair: never); raise" in n for n in study.notes)
    assert not simulate(scenario(STORE, failures=lost)).notes


def test_a_store_that_changes_too_often_is_refused() -> None:
    fickle = Failures(store_slow_every_seconds=1e-6, store_slow_seconds=1e-6)
    with pytest.raises(ConfigError, match="failures would be simulated"):
        course(scenario(STORE, failures=fickle, job=Job(16, length_seconds=DAY)))
