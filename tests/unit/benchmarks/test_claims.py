"""Figures of the pages: each is the value of a results file, or listed with a reason."""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Load = Callable[[str], Any]

CLAIM = """
page = "page.md"
[[claim]]
results = "run.json"
rows = [{name = "a", label = "`a` on rank 0"}, {name = "b", label = "b"}]
let.m = "one(methods, name=name)"
text = "| {label} | {ms(mid(m.call))} | {m.cost} |"
"""
PAGE = "# Page\n\n| | call, ms | cost |\n|---|---|---|\n| `a` on rank 0 | 1.5 | - |\n"
RUN = {"command": "python x.py", "commit": "1" * 40, "date": "2026", "cpu": "c", "cores": 2}


def row(name: str, call: float, cost: Any) -> dict[str, Any]:
    return {"name": name, "call": {"median": call, "low": 0.0, "high": 1.0}, "cost": cost}


COST = {"median": 0.024, "low": -0.31, "high": 1234.5}


@pytest.fixture
def checked(
    benchmark_module: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Check a page against a file of claims and a results file."""
    check = benchmark_module("lib.claims.check")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "CLAIMS", tmp_path)

    def report(page: str, claims: str = CLAIM, **context: Any) -> Any:
        rows = [row("a", 0.00149, None), row("b", 0.506, COST)]
        (tmp_path / "page.md").write_text(page)
        (tmp_path / "page.toml").write_text(claims)
        (tmp_path / "run.json").write_text(json.dumps({**RUN, **context, "methods": rows}))
        (found,) = check.reports(tmp_path)
        return found

    return report


def test_every_figure_of_the_pages_is_proved_or_given(benchmark_module: Load) -> None:
    """After a new measurement: `python benchmarks/figures.py --write`."""
    reports = benchmark_module("lib.claims.check").reports()
    assert [problem for report in reports for problem in report.problems] == []


def test_the_page_decides_the_rounding(checked: Callable[..., Any]) -> None:
    report = checked(PAGE + "| **b** | **506.0** | 0.02 (-0.3 to 1,234.5) |\n")
    assert report.problems == []
    assert [each.text for each in report.proved] == ["1.5", "506.0", "0.02", "-0.3", "1,234.5"]


def test_a_wrong_figure_is_named_with_its_value_and_written(
    checked: Callable[..., Any], benchmark_module: Load, tmp_path: Path
) -> None:
    report = checked(PAGE + "| **b** | **507** | 0.03 (-0.3 to 1,235) |\n")
    assert report.problems == [
        "page.md: has 507 where run.json gives 506 (506)",
        "page.md: has 0.03 where run.json gives 0.02 (0.024)",
    ]
    check = benchmark_module("lib.claims.check")
    assert sorted(check.write(tmp_path)) == ["page.md: 0.03 became 0.02", "page.md: 507 became 506"]
    assert (tmp_path / "page.md").read_text() == (
        PAGE + "| **b** | **506** | 0.02 (-0.3 to 1,235) |\n"
    )


def test_a_figure_without_a_claim_is_refused_unless_it_is_given(
    checked: Callable[..., Any],
) -> None:
    page = PAGE + "| b | 506 | 0.02 (-0.3 to 1,234.5) |\n\nIt takes 31 ms (`--rounds 3`).\n"
    assert checked(page).problems == ["page.md, Page: no results file proves 31"]
    listed = '[[given]]\nsection = "Page"\nfigures = "31"\nreason = "a target"\n'
    report = checked(page, CLAIM + listed)
    assert (report.problems, report.given) == ([], 1)
    gone = checked(page.replace("31", "some"), CLAIM + listed)
    assert gone.problems == ["page.md, Page: listed, but proved or not there: 31"]


def test_a_row_that_the_page_lacks_is_named(checked: Callable[..., Any]) -> None:
    (problem,) = checked(PAGE + "| c | 506 | 0.02 (-0.3 to 1,234.5) |\n").problems[:1]
    assert "no such text of b" in problem


def test_a_row_that_no_file_has_is_refused(checked: Callable[..., Any]) -> None:
    page = PAGE + "| b | 506 | 0.02 (-0.3 to 1,234.5) |\n| **c** | faster | - |\n"
    assert checked(page).problems == ["page.md: no results file has the row | c | faster | - |"]


def test_a_file_without_its_commit_is_refused(checked: Callable[..., Any]) -> None:
    page = PAGE + "| b | 506 | 0.02 (-0.3 to 1,234.5) |\n"
    assert checked(page, commit=None).problems == ["run.json does not name its commit"]
    known = 'without_context = {"run.json" = "measured from an export"}\n'
    assert checked(page, known + CLAIM, commit=None).problems == []


def test_the_runs_of_make_figures_end_in_time(benchmark_module: Load) -> None:
    measure = benchmark_module("lib.claims.measure")
    assert sum(run.minutes for run in measure.runs(quick=False)) <= 90
    assert sum(run.minutes for run in measure.runs(quick=True)) <= 10


def test_new_results_are_set_beside_the_page(benchmark_module: Load, tmp_path: Path) -> None:
    """Here the results of the page themselves: all figures are the same."""
    measure = benchmark_module("lib.claims.measure")
    lines = list(measure.comparison(measure.RESULTS))
    assert len(lines) > 100
    for line in lines:
        _, page, here = line.splitlines()
        assert page.removeprefix("    page ") == here.removeprefix("    here ")


def test_a_command_that_takes_too_long_is_stopped_with_its_children(
    benchmark_module: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = benchmark_module("lib.claims.measure")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "slow.py").write_text(
        "import pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    (tmp_path / "runs.toml").write_text(
        '[[run]]\nscript = "slow.py"\nresults = ["a", "b"]\noptions = ""\nminutes = 0.05\n'
    )
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "RUNS", tmp_path / "runs.toml")
    (failed,) = measure.measure(False, tmp_path / "out")
    assert failed == (
        "python benchmarks/slow.py was stopped after 0.05 minutes, and wrote no results"
    )
    with contextlib.suppress(ProcessLookupError):
        child = os.pidfd_open(int((tmp_path / "child").read_text()))
        assert select.select([child], [], [], 30)[0], "the child ends"
        os.close(child)
