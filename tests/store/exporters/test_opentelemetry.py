"""OpenTelemetry: its own readers in memory, the script's providers, and a receiver of OTLP."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from tests.support.exported_job import EVENTS, JOB, VALUES, play, receiving, wait_until
from tierckpt.exporters import OpenTelemetry

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

UNITS = {"s": "_seconds", "By": "_bytes", "": ""}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierckpt.exporters.exporter.Exporter.turn_seconds", 0.01)


def check(found: dict[str, dict[str, float]]) -> None:
    for name, values in VALUES.items():
        assert found[name] == pytest.approx(values), name


def test_its_own_reader_finds_all_metrics_with_units() -> None:
    """The names become those of Prometheus by the rules of OpenTelemetry."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import (
        Gauge,
        Histogram,
        InMemoryMetricReader,
        NumberDataPoint,
    )

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    play(OpenTelemetry(meter_provider=provider))
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[str, dict[str, float]] = {}
    (scope,) = data.resource_metrics[0].scope_metrics
    assert scope.scope.name == "tierckpt"
    for metric in scope.metrics:
        name = metric.name.replace(".", "_") + UNITS[metric.unit or ""]
        kind = metric.data
        name += "" if isinstance(kind, Gauge | Histogram) else "_total"
        for point in kind.data_points:
            attributes = point.attributes or {}
            assert (attributes["job_id"], attributes["rank"]) == ("demo-1a2b", "2")
            level = str(attributes.get("level", ""))
            if isinstance(point, NumberDataPoint):
                found.setdefault(name, {})[level] = point.value
            else:
                assert 1e-4 in point.explicit_bounds or 3600 in point.explicit_bounds
                found.setdefault(f"{name}_count", {})[level] = point.count
                found.setdefault(f"{name}_sum", {})[level] = point.sum
    provider.shutdown()
    check(found)


def test_writes_and_restores_are_spans() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    play(OpenTelemetry(tracer_provider=provider))
    restore, store = spans.get_finished_spans()
    assert (restore.name, store.name) == ("tierckpt restore", "tierckpt store local")
    for span, seconds in ((restore, 0.25), (store, 0.75)):
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.end_time - span.start_time == pytest.approx(1e9 * seconds, abs=2e3)
    assert store.end_time == pytest.approx(1e9 * EVENTS[3].time_seconds, abs=2e3)
    assert store.attributes is not None
    assert (store.attributes["version"], store.attributes["commit_seconds"]) == (8, 0.25)


def received(got: list[tuple[str, bytes]]) -> tuple[dict[str, dict[str, float]], list[str], Any]:
    """Metrics, names of spans and the resource, as a collector decodes them."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    values: dict[str, dict[str, float]] = {}
    names, resource = [], None
    for path, body in got:
        if path == "/v1/traces":
            request = ExportTraceServiceRequest.FromString(body)
            names += [s.name for s in request.resource_spans[0].scope_spans[0].spans]
            continue
        assert path == "/v1/metrics"
        (of_resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
        resource = {each.key: each.value.string_value for each in of_resource.resource.attributes}
        for metric in of_resource.scope_metrics[0].metrics:
            kind = metric.WhichOneof("data")
            for point in getattr(metric, str(kind)).data_points:
                about = {each.key: each.value.string_value for each in point.attributes}
                number = point.sum if kind == "histogram" else point.as_double or point.as_int
                values.setdefault(metric.name, {})[about.get("level", "")] = number
    return values, names, resource


def test_a_collector_receives_metrics_and_spans() -> None:
    with receiving() as (url, got):
        play(OpenTelemetry(url))
        values, names, resource = received(got)
    assert values["tierckpt.store"] == pytest.approx({"memory": 0.09, "local": 0.75})
    assert values["tierckpt.newest_version"] == {"memory": 9, "local": 8}
    assert values["tierckpt.running"] == {"": 0}
    assert names == ["tierckpt restore", "tierckpt store local"]
    assert resource["service.name"] == "tierckpt"
    assert resource["service.instance.id"] == "demo-1a2b/2"


def test_an_absent_collector_is_reported_once_and_gets_all_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = [400]
    with receiving(refusals) as (url, got):
        exporter = OpenTelemetry(url, every_seconds=0)
        exporter.on_attached(JOB)
        for event in EVENTS:
            exporter.on_event(event)
        wait_until(lambda: caplog.records, "nothing is said")
        for _ in range(3):
            sent = exporter._next_seconds
            wait_until(lambda sent=sent: exporter._next_seconds > sent, "it is not tried again")  # type: ignore[misc]
        refusals.clear()
        wait_until(lambda: len(got) >= 2, "nothing comes")
        exporter.on_closed()
        values, names, _ = received(got)
    assert values["tierckpt.drifted"] == {"": 1}
    assert names == ["tierckpt restore", "tierckpt store local"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().startswith(f"OpenTelemetry({url!r}) does not export; training")
    assert "400" in record.getMessage()


SCRIPT = """
import sys
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.support.exported_job import play
from tierckpt.exporters import OpenTelemetry
reader = InMemoryMetricReader()
exporter = OpenTelemetry()
metrics.set_meter_provider(MeterProvider([reader]))
play(exporter)
data = reader.get_metrics_data()
print(sorted(m.name for m in data.resource_metrics[0].scope_metrics[0].metrics)[:2])
"""


def test_providers_that_the_script_has_set_up_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.strip() == "['tierckpt.drifted', 'tierckpt.failed']", done.stderr
