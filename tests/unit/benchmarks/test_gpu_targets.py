"""The GPU targets, judged on made-up rows: a fast one, a slow one, and one that says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

STATE_BYTES = 1_500_000_000


@pytest.fixture
def targets(benchmark_module: Callable[[str], Any]) -> Any:
    """The benchmark's module."""
    return benchmark_module("lib.targets")


def judged(targets: Any, which: str, **changed: Any) -> tuple[str, str]:
    """Verdict and reason on a run of `changed` from a good one: a step of 100 ms, a copy of 60."""
    facts = {
        "step": 0.100,
        "slowdown": 0.0005,
        "copy": 0.060,
        "checksum": 0.004,
        "bare": 0.060,
        "taken": 12,
        "due": 12,
        "every": 1,
        "world": 1,
        "model": "gpt2",
        **changed,
    }

    def spread(name: str) -> Any:
        return targets.Spread(facts[name], facts[name], facts[name], 1)

    row = targets.Row("ours-memory", "ours", "-", taken=facts["taken"], due=facts["due"])
    row.step, row.slowdown = spread("step"), spread("slowdown")
    row.phases = {"copy": spread("copy"), "checksum": spread("checksum")}
    limits = {"copy_pinned": spread("bare")} if facts["bare"] else {}
    rows = {"ours-memory": row}
    told = (facts["model"], facts["every"], facts["world"], STATE_BYTES)
    run = targets.Run(rows, limits, "torchrun", *told)
    (found,) = (each for each in targets.judge(run) if each.target.startswith(f"GPU: {which}"))
    return found.verdict, found.why


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "met"),
        ({"copy": 0.0626}, "met"),
        ({"copy": 0.0628}, "MISSED"),
        ({"checksum": 0.007}, "MISSED"),
        ({"bare": None}, "not measured"),
        ({"world": 2}, "not measured"),
        ({"model": "toy"}, "not measured"),
    ],
)
def test_the_copy_is_judged_with_the_hashing_that_held_it_up(
    targets: Any, changed: dict[str, Any], verdict: str
) -> None:
    assert judged(targets, "sustained copy", **changed)[0] == verdict


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "met"),
        ({"slowdown": 0.0009}, "met"),
        ({"slowdown": 0.0011}, "MISSED"),
        ({"slowdown": -0.002}, "met"),
        # 180 ms at nine tenths of the link are 200, which is 100 more than a step.
        ({"bare": 0.180, "slowdown": 0.099}, "met"),
        ({"bare": 0.180, "slowdown": 0.101}, "MISSED"),
        ({"bare": 0.090, "world": 2, "slowdown": 0.099}, "met"),
        ({"bare": 0.090, "world": 2, "slowdown": 0.101}, "MISSED"),
        # What could have been taken must be; what does not fit may be skipped.
        ({"taken": 11}, "MISSED"),
        ({"taken": 6, "bare": 0.180, "slowdown": 0.05}, "met"),
        ({"bare": None}, "not measured"),
        ({"every": 4}, "not measured"),
        ({"model": "toy"}, "not measured"),
    ],
)
def test_the_slowdown_may_be_one_percent_or_the_excess_of_the_copy(
    targets: Any, changed: dict[str, Any], verdict: str
) -> None:
    assert judged(targets, "slowdown", **changed)[0] == verdict


def test_a_missing_verdict_names_the_command_to_run(targets: Any) -> None:
    assert judged(targets, "sustained copy", bare=None)[1] == "run with --device cuda"
    assert "--world 1" in judged(targets, "sustained copy", world=2)[1]
    assert judged(targets, "slowdown", every=4)[1] == "run with --every 1"
    assert "taken 11 of 12" in judged(targets, "slowdown", taken=11)[1]
