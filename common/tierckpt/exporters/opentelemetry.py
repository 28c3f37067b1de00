"""OpenTelemetry: metrics, and spans of the rare work, by the script's providers or over OTLP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tierckpt.callbacks import Job
from tierckpt.errors import ConfigError
from tierckpt.events import Event

from .exporter import METRICS, PREFIX, Exporter, Kind, Metric, Ranks, Sample, require

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import Tracer, TracerProvider

    from .otlp import OtlpProviders

UNITS = {"seconds": "s", "bytes": "By", "": ""}
SPANS = ("committed", "restored")


class OpenTelemetry(Exporter):
    """Records metrics `tierckpt.*`, and a span for each write to a level and for each restore.

    They go to the given providers; else to those that the script has set up; else over OTLP and
    HTTP to a collector.

    Args:
        endpoint: URL of a collector, `http://collector:4318`; default: the one of
            OTEL_EXPORTER_OTLP_ENDPOINT, or this machine's.
        meter_provider, tracer_provider: of the SDK.
        every_seconds: interval of the exports to a collector.
        ranks: the ranks that export; by default the first one of each node.
    """

    def __init__(
        self,
        endpoint: str = "",
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        every_seconds: float = 15.0,
        ranks: Ranks = "node",
    ) -> None:
        super().__init__(ranks)
        require("opentelemetry.sdk", "opentelemetry")
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"the collector is {endpoint!r}; give its URL for OTLP over HTTP, like "
                "http://collector:4318"
            )
        self._meters, self._tracers = meter_provider, tracer_provider
        self._is_given = meter_provider is not None or tracer_provider is not None
        self._endpoint, self._every_seconds = endpoint, every_seconds
        self._next_seconds = 0.0
        self._own: OtlpProviders | None = None
        self._attributes: dict[str, str] = {}
        self._instruments: dict[Metric, Any] = {}
        self._tracer: Tracer | None = None

    def __repr__(self) -> str:
        return f"OpenTelemetry({self._endpoint!r})" if self._endpoint else "OpenTelemetry"

    def begin(self, job: Job) -> None:
        """Find or make the providers, and make the instruments."""
        meters, tracers = self._providers(job)
        self._attributes = {"job_id": job.job_id, "rank": str(job.rank)}
        if meters is not None:
            meter = meters.get_meter(PREFIX)
            self._instruments = {metric: _instrument(meter, metric) for metric in METRICS}
        if tracers is not None:
            self._tracer = tracers.get_tracer(PREFIX)
        self._next_seconds = time.monotonic() + self._every_seconds

    def _providers(self, job: Job) -> tuple[MeterProvider | None, TracerProvider | None]:
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider as SdkMeters
        from opentelemetry.sdk.trace import TracerProvider as SdkTracers

        if self._is_given:
            return self._meters, self._tracers
        meters, tracers = metrics.get_meter_provider(), trace.get_tracer_provider()
        ours = isinstance(meters, SdkMeters), isinstance(tracers, SdkTracers)
        if any(ours) and not self._endpoint:
            return (meters if ours[0] else None), (tracers if ours[1] else None)
        require("opentelemetry.exporter.otlp.proto.http", "opentelemetry")
        from .otlp import OtlpProviders

        self._own = OtlpProviders(self._endpoint, f"{job.job_id}/{job.rank}")
        return self._own.meters, self._own.tracers

    def record(self, sample: Sample, event: Event | None) -> None:
        """See `Exporter`."""
        instrument = self._instruments.get(sample.metric)
        if instrument is None:
            return
        names = sample.metric.labels
        attributes = {**self._attributes, **dict(zip(names, sample.labels, strict=True))}
        match sample.metric.kind:
            case Kind.COUNTER:
                instrument.add(sample.value, attributes)
            case Kind.GAUGE:
                instrument.set(sample.value, attributes)
            case Kind.HISTOGRAM:
                instrument.record(sample.value, attributes)

    def record_event(self, event: Event) -> None:
        """Make a span, too, if the event is the end of rare work."""
        super().record_event(event)
        if self._tracer is None or event.name not in SPANS:
            return
        seconds = event.seconds
        took_seconds = seconds.get("total", sum(seconds.values()))
        end_ns = int(1e9 * event.time_seconds)
        attributes = {
            **self._attributes,
            "level": event.level,
            "version": event.version,
            "bytes": event.nbytes,
            **{f"{name}_seconds": value for name, value in seconds.items()},
        }
        name = "restore" if event.name == "restored" else f"store {event.level}"
        start_ns = end_ns - int(1e9 * took_seconds)
        span = self._tracer.start_span(
            f"{PREFIX} {name}", start_time=start_ns, attributes=attributes
        )
        span.end(end_ns)

    def export(self) -> bool:
        """Send to the collector, if it is time. Providers of the script export by themselves."""
        if self._own is None or time.monotonic() < self._next_seconds:
            return False
        self._next_seconds = time.monotonic() + self._every_seconds
        self._own.send()
        return True

    def end(self) -> None:
        """Send the rest."""
        own, self._own = self._own, None
        if own is not None:
            own.send()


def _instrument(meter: Meter, metric: Metric) -> Any:
    name, about = f"{PREFIX}.{metric.name}", (UNITS[metric.unit], metric.help)
    match metric.kind:
        case Kind.COUNTER:
            return meter.create_counter(name, *about)
        case Kind.GAUGE:
            return meter.create_gauge(name, *about)
        case Kind.HISTOGRAM:
            return meter.create_histogram(
                name, *about, explicit_bucket_boundaries_advisory=metric.buckets
            )


__all__ = ["OpenTelemetry"]
