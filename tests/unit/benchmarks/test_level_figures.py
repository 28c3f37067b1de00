"""The figures of benchmarks/levels.py, from timings that are made up."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def modules(benchmark_module: Callable[[str], Any]) -> argparse.Namespace:
    """The benchmark's modules."""
    return argparse.Namespace(
        f=benchmark_module("lib.levels.figures"),
        report=benchmark_module("lib.levels.report"),
        spread=benchmark_module("lib.figures").Spread,
    )


def sample(modules: argparse.Namespace, alone: float, overall: float, **changed: Any) -> Any:
    """Computing takes 10 s; bare, the work takes 1.8 s a time, and the same in all."""
    values = {"compute_s": 10.0, "overall_s": overall, "plain_s": 8.0, "beside_s": 8.4, **changed}
    work = modules.f.Work([alone / 2, alone / 2], alone, cpu_s=1.0)
    return modules.f.Sample(work, modules.f.Work([1.8], 1.8, cpu_s=0.25), **values)


def row(modules: argparse.Namespace, *samples: Any, **changed: Any) -> Any:
    values = {"nodes": 2, "data_bytes": 10**9, "linked": True, "target": None, **changed}
    made = modules.f.Row("xor", "socket", **values)
    made.samples.extend(samples)
    made.finish()
    return made


@pytest.mark.parametrize(
    ("overall", "overlap"),
    [(10.0, 1.0), (10.2, 0.95), (12.0, 0.5), (14.0, 0.0), (15.0, -0.25), (9.0, 1.25)],
)
def test_overlap_is_the_work_that_adds_no_time(
    overall: float, overlap: float, modules: argparse.Namespace
) -> None:
    found = sample(modules, alone=4.0, overall=overall).overlap
    assert found == pytest.approx(overlap)


def test_the_cost_of_bare_sockets_is_the_limit_of_overlap(
    modules: argparse.Namespace,
) -> None:
    assert sample(modules, 4.0, 10.4).bare_overlap is None  # not of a disk
    for bare_overall_s, bare in ((10.08, "95.5"), (10.2, "89.0")):
        missed = row(modules, sample(modules, 4.0, 10.4, bare_overall_s=bare_overall_s))
        overlaps = missed.overlap.median, missed.bare_overlap.median
        assert overlaps == pytest.approx((0.9, float(bare) / 100), abs=0.005)
        together = modules.f.AllLevels(1)
        (verdict, _) = modules.report.judge([missed], together, toy=False, no_network="")
        assert verdict.verdict == "MISSED"
        cells = modules.report._cells(missed)
        assert verdict.why.startswith(f"bare sockets: {cells[-1]} %")
        assert ("the link is not the limit" in verdict.why) == (bare_overall_s > 10.1)


def test_a_rows_figures_are_medians_of_its_rounds(modules: argparse.Namespace) -> None:
    found = row(modules, *(sample(modules, alone, 10.0) for alone in (4.0, 3.6, 4.5)))
    assert found.of_bare.median == pytest.approx(0.9)
    assert (found.of_bare.low, found.of_bare.high) == pytest.approx((0.8, 1.0))
    assert found.cpu_s.median == 0.5
    assert found.slowdown.median == pytest.approx(0.05)
    assert modules.report._cells(found)[5] == "0.50 / 0.25"
    cells = modules.report._cells(found)
    assert cells[:2] == ("xor", "0.500 (0.444..0.556)")


def test_targets_are_met_missed_or_not_measured(modules: argparse.Namespace) -> None:
    good, bad = sample(modules, 4.0, 10.1), sample(modules, 4.0, 13.0)
    rows = [
        row(modules, good),
        row(modules, bad),
        row(modules, good, linked=False),
        row(modules, good, target=0.85),
        row(modules, good, target=0.95),
    ]
    together = modules.f.AllLevels(every=32)
    verdicts = modules.report.judge(rows, together, toy=False, no_network="no namespaces")
    device, peers, slowdown = verdicts[:2], verdicts[2:5], verdicts[5]
    assert [v.verdict for v in device] == ["met", "MISSED"]
    assert [v.verdict for v in peers] == ["met", "MISSED", "not measured"]
    assert peers[2].why == "no namespaces"
    assert slowdown.verdict == "not measured"
    toy = modules.report.judge(rows, together, toy=True, no_network="")
    assert {v.verdict for v in toy} == {"not measured"}


@pytest.mark.parametrize(("extra", "taken", "met"), [(0.9, 2, True), (1.1, 2, False), (0.9, 1, 0)])
def test_the_slowdown_counts_only_when_every_version_came_through(
    extra: float, taken: int, met: bool, modules: argparse.Namespace
) -> None:
    together = modules.f.AllLevels(every=20, taken=taken, due=2)
    spreads = {"step_s": 1.0, "version_s": extra, "slowdown": extra / 20}
    for name, value in spreads.items():
        setattr(together, name, modules.spread(value, value, value, 3))
    (verdict,) = modules.report.judge([], together, toy=False, no_network="")
    assert verdict.verdict == ("met" if met else "MISSED")
    assert met or "22 s apart" in verdict.why or "taken 1 of 2" in verdict.why
