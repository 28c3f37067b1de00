"""papers.py: the page has the numbers of the results files, and rows of several runs add up."""

from __future__ import annotations

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
    results, papers = (
        benchmark_module("lib.papers.results"),
        benchmark_module("lib.papers.registry"),
    )
    for name, paper in papers.PAPERS.items():
        document = results.read(results.path_of(name))
        keys = [tuple(row[part] for part in paper.key) for row in document["rows"]]
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


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 1),
        ({"cost_seconds": 0.049}, 1),
        ({"cost_seconds": 0.11}, 3),
        ({"taken": 3}, 2),
    ],
    ids=["free", "within the budget", "above the budget", "skipped"],
)
def test_the_fewest_iterations_within_the_budget(
    benchmark_module: Load, changed: dict[str, Any], expected: int
) -> None:
    tried = {
        "every": 1,
        "step_seconds": 1.0,
        "cost_seconds": -0.01,
        "due": 6,
        "taken": 6,
        "phases": {},
        **changed,
    }
    assert benchmark_module("lib.papers.lightcheck").iterations(tried, "ours-memory") == expected


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
