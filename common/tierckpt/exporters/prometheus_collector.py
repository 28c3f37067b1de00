"""The metrics of a job as families of prometheus_client, which imports it."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.utils import floatToGoString

from tierckpt.callbacks import Job

from .exporter import METRICS, Kind, Metric, Sample

JOB_LABELS = ("job_id", "rank")
"""Labels of all metrics, after their own. Prometheus's own label `job` is another thing."""


class Collector:
    """The values of all metrics. Any thread.

    Not prometheus_client's own Counter and Histogram: with them comes a series `_created` for each
    series, which can be switched off only for the whole process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: tuple[str, ...] = ()
        self._values: dict[Metric, dict[tuple[str, ...], float]] = {}
        self._counts: dict[Metric, dict[tuple[str, ...], list[int]]] = {}
        """Of histograms: the number of observations in each bucket."""

    def begin(self, job: Job) -> None:
        """Start with a job: forget all values."""
        with self._lock:
            self._job = (job.job_id, str(job.rank))
            self._values = {metric: {} for metric in METRICS}
            self._counts = {metric: {} for metric in METRICS}

    def record(self, sample: Sample) -> None:
        """Add a sample."""
        metric, labels = sample.metric, sample.labels
        with self._lock:
            values = self._values[metric]
            before = 0.0 if metric.kind is Kind.GAUGE else values.get(labels, 0.0)
            values[labels] = before + sample.value
            if metric.kind is Kind.HISTOGRAM:
                counts = self._counts[metric]
                if labels not in counts:
                    counts[labels] = [0] * (len(metric.buckets) + 1)
                counts[labels][bisect_left(metric.buckets, sample.value)] += 1

    def collect(self) -> Iterator[Family]:
        """All families that have a value."""
        with self._lock:
            return iter([self._family(metric) for metric in METRICS if self._values.get(metric)])

    def describe(self) -> list[Family]:
        """Nothing: a second job's metrics in one registry differ in their labels."""
        return []

    def _family(self, metric: Metric) -> Family:
        names = (*metric.labels, *JOB_LABELS)
        about = (metric.full_name, metric.help)
        values = self._values[metric].items()
        if metric.kind is Kind.HISTOGRAM:
            family = HistogramMetricFamily(*about, labels=names)
            bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
            for labels, total in values:
                counts = itertools.accumulate(self._counts[metric][labels])
                buckets = list(zip(bounds, counts, strict=True))
                family.add_metric((*labels, *self._job), buckets, total)
            return family
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        plain = kind(*about, labels=names)
        for labels, value in values:
            plain.add_metric((*labels, *self._job), value)
        return plain


__all__ = ["JOB_LABELS", "Collector"]
