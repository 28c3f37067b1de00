"""Providers of OpenTelemetry that send to a collector, on the exporter's thread alone.

The SDK's own readers and processors have threads that also run in each forked worker of a
DataLoader, and log every failure. Here a failure is an exception for `Exporter`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TIMEOUT_SECONDS = 5.0
"""Limit of one export with all its repetitions."""
MAX_SPANS = 10_000
"""Spans that wait at most for a collector that does not answer."""
LOGGERS = (OTLPMetricExporter.__module__, OTLPSpanExporter.__module__)


class OtlpProviders:
    """Metrics and spans that wait in memory for `send`. One thread."""

    def __init__(self, endpoint: str, instance: str) -> None:
        """Prepare. `endpoint`: the collector's URL, or empty; `instance`: name of this process."""
        attributes = {SERVICE_INSTANCE_ID: instance}
        if "OTEL_SERVICE_NAME" not in os.environ:
            attributes[SERVICE_NAME] = "tierckpt"
        resource = Resource.create(attributes)
        self._reader, self._spans = InMemoryMetricReader(), InMemorySpanExporter()
        self.meters = MeterProvider([self._reader], resource, shutdown_on_exit=False)
        self.tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        base = endpoint.rstrip("/")
        at = [f"{base}/v1/{kind}" if base else None for kind in ("metrics", "traces")]
        self._metric_exporter = OTLPMetricExporter(at[0], timeout=TIMEOUT_SECONDS)
        self._span_exporter = OTLPSpanExporter(at[1], timeout=TIMEOUT_SECONDS)

    def send(self) -> None:
        """Send everything. Raises ConnectionError if the collector did not take it; nothing but
        spans beyond MAX_SPANS is lost then."""
        with _quiet() as said:
            data = self._reader.get_metrics_data()
            if data is not None:
                taken = self._metric_exporter.export(data) is MetricExportResult.SUCCESS
                if not taken:
                    raise ConnectionError("; ".join(said[-1:]))
            spans = self._spans.get_finished_spans()
            if not spans:
                return
            if self._span_exporter.export(spans) is SpanExportResult.SUCCESS:
                self._spans.clear()
                return
            if len(spans) > MAX_SPANS:
                self._spans.clear()
            raise ConnectionError("; ".join(said[-1:]))


@contextlib.contextmanager
def _quiet() -> Iterator[list[str]]:
    """Collect what the SDK's exporters log on this thread, instead of showing it."""
    said: list[str] = []
    thread = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        if record.thread == thread:
            said.append(record.getMessage())
            return False
        return True

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for each in loggers:
        each.addFilter(keep)
    try:
        yield said
    finally:
        for each in loggers:
            each.removeFilter(keep)


__all__ = ["OtlpProviders"]
