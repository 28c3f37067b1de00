"""The common part of exporters: who exports, on which thread, and what a failure does."""

from __future__ import annotations

import logging
import pickle
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.exported_job import EVENTS, JOB, play, wait_until
from tierckpt import ConfigError, exporters
from tierckpt.events import Event
from tierckpt.exporters import Exporter


class Recording(Exporter):
    """Keeps what it gets; `error` is raised by `export`, if it is set."""

    turn_seconds = 0.001

    def __init__(self, ranks: Any = "node") -> None:
        super().__init__(ranks)
        self.calls: list[Any] = []
        self.threads: set[int] = set()
        self.error: Exception | None = None
        self.exports = 0

    def begin(self, job: Any) -> None:
        self.calls.append(job)

    def record(self, sample: Any, event: Event | None) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append((sample.metric.full_name, sample.value))

    def export(self) -> bool:
        self.exports += 1
        if self.error is not None:
            raise self.error
        return True

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize(
    ("ranks", "rank", "local_rank", "exports"),
    [
        ("first", 0, 0, True),
        ("first", 2, 0, False),
        ("node", 2, 0, True),
        ("node", 3, 1, False),
        ("all", 3, 1, True),
    ],
)
def test_one_rank_of_a_node_or_of_the_job_or_each_exports(
    ranks: str, rank: int, local_rank: int, exports: bool
) -> None:
    exporter = Recording(ranks)
    play(exporter, replace(JOB, rank=rank, local_rank=local_rank))
    assert bool(exporter.calls) == exports


def test_events_are_recorded_on_a_thread_of_its_own_which_ends_with_the_job() -> None:
    exporter = Recording()
    play(exporter)
    assert threading.get_ident() not in exporter.threads
    assert len(exporter.threads) == 1
    assert exporter.calls[0] == JOB
    assert exporter.calls[-1] == "end"
    assert ("tierckpt_newest_version", 9) in exporter.calls
    assert ("tierckpt_live_version", 10) in exporter.calls
    assert not [thread for thread in threading.enumerate() if "Recording" in thread.name]


def test_a_second_job_starts_where_the_first_one_was_left_open() -> None:
    """An elastic job makes a checkpointer after each reset, on another number of ranks."""
    exporter = Recording()
    exporter.on_attached(JOB)
    play(exporter, replace(JOB, ranks=3))
    assert exporter.calls.count("end") == 2
    assert ("tierckpt_ranks", 3) in exporter.calls


def test_a_failure_is_said_once_until_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Recording()
    with caplog.at_level(logging.INFO, logger="tierckpt"):
        for _ in range(2):
            exporter.error = OSError("no space")
            exporter.on_attached(JOB)
            before = exporter.exports
            wait_until(lambda before=before: exporter.exports > before + 3, "no further try")  # type: ignore[misc]
            exporter.error = None
            exporter.on_closed()
    said = [record.getMessage() for record in caplog.records]
    failed = (
        "Recording does not export; training continues, and it is tried again. OSError: no space"
    )
    assert said == [failed, "Recording works again"] * 2


def test_an_event_that_cannot_be_recorded_does_not_hide_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter = Recording()
    play(exporter, events=(Event("sealed", "memory", 1), *EVENTS))
    assert ("tierckpt_newest_version", 9) in exporter.calls
    (record,) = caplog.records
    assert record.getMessage() == "Recording: an event is left out. KeyError: 'stall'"


def test_a_job_ends_although_its_exporter_does_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, resume = threading.Event(), threading.Event()

    class Stuck(Recording):
        def export(self) -> bool:
            stuck.set()
            return resume.wait(60)

    monkeypatch.setattr("tierckpt.exporters.exporter.END_SECONDS", 0.01)
    monkeypatch.setattr("tierckpt.exporters.exporter.MAX_EVENTS", 2)
    exporter = Stuck()
    exporter.on_attached(JOB)
    thread = exporter._thread
    assert thread is not None
    assert stuck.wait(60)
    for event in EVENTS:  # more than it keeps
        exporter.on_event(event)
    exporter.on_closed()
    resume.set()
    thread.join(60)
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("Stuck: not all could be exported in 0 s; the job ends")
    assert said[1] == "Stuck: events are left out, as it is too slow for them"


@pytest.mark.parametrize("name", ["PrometheusPort", "OpenTelemetry"])
def test_launchers_may_pickle_an_exporter_before_the_job(name: str) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("opentelemetry.sdk")
    made = pickle.loads(pickle.dumps(getattr(exporters, name)()))
    assert (made.ranks, made.job) == ("node", None)


def test_ranks_are_one_of_three() -> None:
    with pytest.raises(ConfigError, match="ranks is 'some'; valid: first, node, all"):
        Recording("some")
