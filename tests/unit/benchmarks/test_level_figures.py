"""The figures of benchmarks/levels.py, from timings that are made up."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def modules(benchmark_module: Callable[[str], Any]) -> argparse.Namespace:
    """The benchmark's modules."""
    return argparse.Namespace(f=benchmark_module("lib.levels.figures"))


def sample(modules: argparse.Namespace, alone: float, overall: float, **changed: Any) -> Any:
    """Computing takes 10 s; bare, the work takes 1.8 s a time, and the same in all."""
    values = {"compute_s": 10.0, "overall_s": overall, "plain_s": 8.0, "beside_s": 8.4, **changed}
    work = modules.f.Work([alone / 2, alone / 2], alone, cpu_s=1.0)
    return modules.f.Sample(work, modules.f.Work([1.8], 1.8, cpu_s=0.25), **values)


def row(modules: argparse.Namespace, *samples: Any) -> Any:
    made = modules.f.Row("xor", nodes=2, data_bytes=10**9, linked=True)
    made.samples.extend(samples)
    return argparse.Namespace(**made.figures())


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
    for bare_overall_s, bare in ((10.08, 0.955), (10.2, 0.89)):
        missed = row(modules, sample(modules, 4.0, 10.4, bare_overall_s=bare_overall_s))
        overlaps = missed.overlap.median, missed.bare_overlap.median
        assert overlaps == pytest.approx((0.9, bare), abs=0.005)


def test_a_rows_figures_are_medians_of_its_rounds(modules: argparse.Namespace) -> None:
    found = row(modules, *(sample(modules, alone, 10.0) for alone in (4.0, 3.6, 4.5)))
    assert found.of_bare.median == pytest.approx(0.9)
    assert (found.of_bare.low, found.of_bare.high) == pytest.approx((0.8, 1.0))
    assert found.cpu_s.median == 0.5
    assert found.slowdown.median == pytest.approx(0.05)
    assert found.bare_cpu_s.median == 0.25
