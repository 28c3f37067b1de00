"""papers.py: the page has the numbers of the results files, and rows of several runs add up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]

Load = Callable[[str], Any]


def test_the_page_is_made_from_the_results(benchmark_module: Load) -> None:
    """After a change of a result, a published value or a table: `papers.py --write`."""
    page = benchmark_module("lib.papers.page")
    assert page.PAGE.read_text() == page.text()


def test_every_row_has_the_context_of_its_run(benchmark_module: Load) -> None:
    page = benchmark_module("lib.papers.page")
    results = page.results
    for name, paper in page.PAPERS.items():
        document = results.read(results.path_of(name))
        keys = [tuple(row[part] for part in paper.KEY) for row in document["rows"]]
        assert len(set(keys)) == len(keys)
        for row in document["rows"]:
            run = document["runs"][row["run"]]
            assert run["command"].startswith(f"python benchmarks/papers.py {name}")
            assert run["commit"]
            assert run["cpu"]


def test_a_run_replaces_its_rows_and_keeps_the_others(
    benchmark_module: Load, tmp_path: Path
) -> None:
    results, path = benchmark_module("lib.papers.results"), tmp_path / "rows.json"
    first, second = {"date": "1"}, {"date": "2"}
    results.merge(path, first, [{"m": "a", "v": 1}, {"m": "b", "v": 1}], ("m",))
    results.merge(path, second, [{"m": "b", "v": 2}, {"m": "c", "v": 2}], ("m",))
    document = results.read(path)
    found = {row["m"]: (row["v"], document["runs"][row["run"]]) for row in document["rows"]}
    assert found == {"a": (1, first), "b": (2, second), "c": (2, second)}
    results.merge(path, second, [{"m": "a", "v": 2}], ("m",))
    assert results.read(path)["runs"] == [second], "contexts without a row go"


def test_checkfreq_lengthens_its_interval_for_persist_and_stall(benchmark_module: Load) -> None:
    tuned = benchmark_module("lib.methods.checkfreq").tuned_interval
    assert tuned(0.1, 0.3, iteration=1.0, update=0.1, budget=0.05) == 1, "all fits into a step"
    assert tuned(0.1, 3.5, iteration=1.0, update=0.1, budget=0.05) == 4, "one persist at a time"
    assert tuned(1.4, 0.1, iteration=1.0, update=0.1, budget=0.05) == 10, "a stall of half a step"


def test_checkfreq_copies_once_and_reuses_the_memory(
    benchmark_module: Load, tmp_path: Path
) -> None:
    checkfreq = benchmark_module("lib.methods.checkfreq")
    state = {"model": {"w": torch.arange(3.0)}, "groups": [{"lr": 0.1, "params": [0]}], "step": 1}
    buffer = checkfreq.copied(state, {})
    address = buffer["model"]["w"].data_ptr()
    state["model"]["w"].add_(1)
    assert buffer["model"]["w"].tolist() == [0, 1, 2]
    assert checkfreq.copied(state, buffer)["model"]["w"].data_ptr() == address
    checkfreq.persist(checkfreq.copied(state, buffer), tmp_path / "v1")
    loaded = torch.load(tmp_path / "v1")
    assert loaded["model"]["w"].tolist() == [1, 2, 3]
    assert loaded["groups"] == state["groups"]
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def visit(total: float, cpu: float = 0.01, others: float = 0.0) -> dict[str, float]:
    return {"total_overhead": total, "cpu_share": cpu, "others_cores": others}


def tried(*visits: dict[str, float], every: int = 1, due: int = 6, taken: int = 6) -> Any:
    row = {"every": every, "due": due, "taken": taken, "step_seconds": 1.0, "phases": {}}
    return {**row, "visits": list(visits)}


@pytest.mark.parametrize(
    ("row", "share", "verdict", "words"),
    [
        (tried(*[visit(0.04)] * 3), 0.04, "met", "4.0 (4.0 to 4.0, n = 3)"),
        (tried(*[visit(-0.08, cpu=0.06)] * 3), 0.06, "missed", "6.0 (6.0 to 6.0, n = 3)"),
        (tried(*[visit(0.3, others=0.2)] * 3), 0.01, "not known", "~1.0 (others 0.2, n = 3)"),
        (tried(visit(0.01), visit(0.03)), 0.02, "so far within", "2.0 (1.0 to 3.0, n = 2)"),
        (tried(*[visit(0.01)] * 2, visit(0.9, others=1)), 0.01, "so far within", "n = 2"),
        (tried(*[visit(0.114, 0.2)] * 3, taken=2), 0.114, "missed", "took 2 of 6"),
    ],
    ids=["met", "CPU is more", "others work", "two visits", "two quiet ones", "skipped as for NT3"],
)
def test_one_rule_judges_every_cost(
    benchmark_module: Load, row: Any, share: float, verdict: str, words: str
) -> None:
    cost = benchmark_module("lib.papers.rule").cost_of(row)
    assert cost.share == pytest.approx(share)
    assert cost.verdict(0.05) == verdict
    assert words in cost.text


@pytest.mark.parametrize(
    ("tries", "expected"),
    [
        ([tried(visit(-0.01))], (1, True)),
        ([tried(visit(0.11))], (3, False)),
        ([tried(visit(0.02), taken=3)], (2, False)),
        ([tried(visit(0.11)), tried(visit(0.5, cpu=0, others=1), every=3)], (3, False)),
    ],
    ids=["within the budget", "above it", "skipped", "the last try was not quiet"],
)
def test_the_fewest_iterations_within_the_budget(
    benchmark_module: Load, tries: Any, expected: tuple[int, bool]
) -> None:
    found = benchmark_module("lib.papers.lightcheck").interval_of(tries, "ours-memory")
    assert (found.iterations, found.measured) == expected


def test_a_row_without_data_is_not_on_the_page(benchmark_module: Load) -> None:
    """Without its rows a method is neither in a table nor in a verdict, and is said to be lacking;
    a failed row counts as none."""
    page = benchmark_module("lib.papers.page")
    results = page.results
    for name, paper in page.PAPERS.items():
        document = results.read(results.path_of(name))
        key = "scheme" if name == "dpu" else "method"
        (gone, *_) = sorted({row[key] for row in document["rows"]})
        failed = [
            row | {"status": "failed"} if row[key] == gone else row for row in document["rows"]
        ]
        left = [row for row in document["rows"] if row[key] != gone]
        assert page.tables(name, failed) == page.tables(name, left)
        assert page.verdicts(name, failed) == page.verdicts(name, left)
        lacking = {json.dumps(key) for key in page.missing_keys(name)}
        for row in document["rows"]:
            own = {part: row[part] for part in paper.KEY}
            assert json.dumps(own) not in lacking


def test_missing_packages_are_an_error_at_the_start(
    benchmark_module: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A toy of all papers says what it leaves out."""
    papers = benchmark_module("papers")
    for name, paper in papers.PAPERS.items():
        reasons = ["no DLIO"] if name == "mlperf" else ["no time"]
        monkeypatch.setattr(paper, "missing", lambda _, found=reasons: found, raising=False)
    monkeypatch.setattr(sys, "argv", ["papers.py", "mlperf"])
    with pytest.raises(SystemExit) as ended:
        papers.arguments()
    assert ended.value.code == 2
    assert "mlperf cannot be measured here: no DLIO" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["papers.py", "--toy"])
    assert papers.arguments().chosen == {}
    assert "mlperf is left out: no DLIO" in capsys.readouterr().err


def test_models_have_the_published_sizes(benchmark_module: Load) -> None:
    """On the meta device: no memory is taken."""
    models = benchmark_module("lib.papers.models")
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in models.MODELS[name].make().parameters())
            for name in ("nt3", "edsr")
        }
    assert counts["nt3"] == pytest.approx(154.9e6, rel=0.001)
    assert counts["edsr"] == pytest.approx(1.37e6, rel=0.01)
