"""The dashboard for Grafana: its queries have answers, and its JSON is of Grafana's schema."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.exported_job import EVENTS, JOB, wait_until
from tests.support.prometheus_here import program, scraping
from tierckpt.exporters import METRICS, Kind, PrometheusPort

FILE = Path(__file__).resolve().parents[3] / "examples" / "grafana" / "tierckpt.json"
LABELS = {"job_id", "rank"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text()))


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """The queries of all panels."""
    return [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]


def series() -> dict[str, set[str]]:
    """Names of all series, with their labels."""
    found: dict[str, set[str]] = {}
    for metric in METRICS:
        labels = LABELS | set(metric.labels)
        if metric.kind is Kind.HISTOGRAM:
            found[f"{metric.full_name}_bucket"] = labels | {"le"}
            found |= {f"{metric.full_name}_{end}": labels for end in ("sum", "count")}
        else:
            found[metric.full_name] = labels
    return found


def test_queries_use_series_and_labels_that_there_are(dashboard: dict[str, Any]) -> None:
    known = series()
    used = set()
    for expression in expressions(dashboard):
        names = re.findall(r"tierckpt_\w+", expression)
        assert set(names) <= known.keys(), expression
        labels = set().union(*(known[name] for name in names))
        given = re.findall(r"(?:by|on|group_right) \((.*?)\)", expression)
        asked = set(re.findall(r"\w+", " ".join(given))) | set(re.findall(r"(\w+)=", expression))
        assert asked <= labels, expression
        used |= {name.removesuffix("_bucket").removesuffix("_sum") for name in names}
    left_out = {metric.full_name for metric in METRICS} - used
    assert left_out == set()


def test_panels_lie_side_by_side_and_have_legends_of_their_labels(
    dashboard: dict[str, Any],
) -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        )
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            grouped = re.findall(r"by \((.*?)\)", target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert any(label in each for each in grouped), target


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrometheusPort]:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("tierckpt.exporters.exporter.Exporter.turn_seconds", 0.01)
    made = PrometheusPort(0, "127.0.0.1")
    made.on_attached(JOB)
    wait_until(lambda: made._server is not None, "the port is not open")
    yield made
    made.on_closed()


def test_a_real_prometheus_answers_every_query(
    dashboard: dict[str, Any], exporter: PrometheusPort, tmp_path: Path
) -> None:
    program("prometheus")
    with scraping(f"127.0.0.1:{exporter.port}", tmp_path / "prometheus") as prometheus:

        def has_seen(count: int) -> bool:
            for event in EVENTS:
                exporter.on_event(event)
            exporter.on_step_boundary(10)
            found = prometheus.query("count_over_time(tierckpt_live_version[5m])")
            return bool(found) and int(found[0]["value"][1]) >= count

        wait_until(lambda: has_seen(4), "nothing is scraped")
        jobs = prometheus.query("tierckpt_running")
        assert [each["metric"]["job_id"] for each in jobs] == [JOB.job_id]
        for expression in expressions(dashboard):
            query = expression.replace("$job_id", JOB.job_id).replace("$__rate_interval", "5m")
            assert prometheus.query(query), query
        costs = next(e for e in expressions(dashboard) if "live_version" in e)
        answer = prometheus.query(costs.replace("$job_id", JOB.job_id))
        assert {each["metric"]["level"]: each["value"][1] for each in answer} == {
            "memory": "1",
            "local": "2",
        }


def test_grafanas_own_schema_knows_every_field(dashboard: dict[str, Any]) -> None:
    """The types of Grafana's SDK, generated from its schemas, leave out a field that they do not
    know."""
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import dashboard as model

    plugins.register_default_plugins()
    read = model.Dashboard.from_json(dashboard)
    again = json.loads(JSONEncoder(sort_keys=True).encode(read))
    assert not list(_lost(dashboard, again, "dashboard"))


def _lost(given: Any, kept: Any, place: str) -> Iterator[str]:
    if isinstance(given, dict):
        for name, value in given.items():
            if value is not None:
                yield from _lost(value, kept.get(name), f"{place}.{name}")
    elif isinstance(given, list):
        for number, (value, other) in enumerate(itertools.zip_longest(given, kept or [])):
            yield from _lost(value, other, f"{place}[{number}]")
    elif given != kept:
        yield f"{place}: {given} is {kept}"
