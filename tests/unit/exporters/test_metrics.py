"""The metrics of events: names by the conventions, few values of labels, nothing forgotten."""

from __future__ import annotations

import logging
import re

import pytest

from tests.support.exported_job import EVENTS
from tierckpt.events import Event
from tierckpt.exporters import METRICS, PHASES, REASONS, Kind, samples, zeros

LEVELS = ("memory", "local", "peer", "persistent")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions_of_prometheus(metric) -> None:  # type: ignore[no-untyped-def]
    assert re.fullmatch(r"tierckpt(_[a-z]+)+", metric.full_name)
    assert metric.full_name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.unit in ("", "seconds", "bytes")
    assert metric.help.endswith(".")
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_samples_have_a_value_for_each_label() -> None:
    found = [sample for event in EVENTS for sample in samples(event)]
    found += zeros(LEVELS)
    for sample in found:
        assert len(sample.labels) == len(sample.metric.labels)
        assert sample.metric in METRICS


def test_every_label_has_few_values_whatever_events_say() -> None:
    """A text in a label would make a new time series for each text."""
    for reason in REASONS:
        (skipped,) = samples(Event("skipped", "local", 3, reason=reason, message="v17 is slow"))
        assert skipped.labels == ("local", reason)
    (failed,) = samples(Event("failed", "peer", 3, message="node 17 is away"))
    assert failed.labels == ("peer",)
    seconds = {**dict.fromkeys(PHASES, 1.0), "something else": 1.0}
    restored = samples(Event("restored", "peer and memory", 3, seconds=seconds))
    assert {sample.labels for sample in restored} == {(), *((phase,) for phase in PHASES)}


@pytest.mark.parametrize(
    ("severity", "label"),
    [(logging.DEBUG, None), (logging.INFO, None), (30, "warning"), (40, "error")],
)
def test_a_notice_counts_if_it_is_severe(severity: int, label: str | None) -> None:
    found = [sample.labels for sample in samples(Event("notice", severity=severity))]
    assert found == ([(label,)] if label else [])


@pytest.mark.parametrize("interrupted", [True, False])
def test_the_end_says_whether_it_was_an_interruption(interrupted: bool) -> None:
    """A job that the cloud took away ends cleanly, and should come back."""
    found = samples(Event("closed", facts={"interrupted": interrupted}))
    values = {sample.metric.full_name: sample.value for sample in found}
    assert values == {"tierckpt_running": 0, "tierckpt_interrupted": interrupted}


def test_what_can_happen_is_zero_before_it_happens() -> None:
    """Prometheus computes no rate across the first appearance of a series."""
    counters = {metric for metric in METRICS if metric.kind is Kind.COUNTER}
    at_zero = {(sample.metric, sample.labels) for sample in zeros(LEVELS)}
    assert {metric for metric, _ in at_zero} == counters
    happened = {
        (sample.metric, sample.labels)
        for event in EVENTS
        for sample in samples(event)
        if sample.metric.kind is Kind.COUNTER
    }
    assert happened <= at_zero
