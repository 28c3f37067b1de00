"""Events: every listener receives all of them, and a listener's failure does not stop training."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierckpt import _appender
from tierckpt.events import Event, EventLog


def fail(event: Event) -> None:
    raise RuntimeError(f"no ear for {event.name}")


def test_events_are_lines_of_json(tmp_path: Path) -> None:
    log = EventLog(3, str(tmp_path / "deep" / "events"))
    log.emit(
        "sealed", level="memory", version=7, nbytes=10, seconds={"copy": 0.5}, message='a "b"\n'
    )
    log.emit("failed", level="local", behind_since=5)
    log.close()
    text = (tmp_path / "deep" / "events" / "events-r00003.jsonl").read_text()
    first, second = (json.loads(line) for line in text.splitlines())
    assert first["rank"] == 3
    assert (first["name"], first["version"], first["seconds"]) == ("sealed", 7, {"copy": 0.5})
    assert first["message"] == 'a "b"\n'
    assert (second["behind_since"], second["level"]) == (5, "local")
    assert set(first) == set(Event.__struct_fields__)


def test_a_restarted_job_does_not_continue_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events-r00000.jsonl"
    path.write_text('{"name":"sealed","lev')
    log = EventLog(0, str(tmp_path))
    log.emit("notice", version=1)
    log.close()
    half, line = path.read_text().splitlines()
    assert half == '{"name":"sealed","lev'
    assert json.loads(line)["version"] == 1


def test_a_line_is_there_as_soon_as_the_event_is(tmp_path: Path) -> None:
    log = EventLog(0, str(tmp_path))
    log.emit("notice", message="read me")
    assert "read me" in (tmp_path / "events-r00000.jsonl").read_text()
    log.close()


def test_events_are_counted_by_name_and_by_level() -> None:
    log = EventLog(0)
    for level in ("memory", "memory", "local"):
        log.emit("failed", level=level)
    log.emit("sealed", level="memory")
    assert log.counts == {
        "failed": 3,
        "failed/memory": 2,
        "failed/local": 1,
        "sealed": 1,
        "sealed/memory": 1,
    }


def test_a_failing_callback_is_reported_and_keeps_nothing_from_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []
    log = EventLog(0, str(tmp_path), callback=fail)
    log.add_callback(heard.append)
    log.emit("sealed", version=3)
    log.close()
    assert [e.version for e in heard] == [3]
    assert '"version":3' in (tmp_path / "events-r00000.jsonl").read_text()
    assert "no ear for sealed" in caplog.text
    assert log.counts["sealed"] == 1


def test_a_full_disk_costs_the_file_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events-r00000.jsonl").symlink_to("/dev/full")
    heard: list[Event] = []
    log = EventLog(0, str(tmp_path), callback=heard.append)
    for version in (3, 4):
        log.emit("sealed", version=version)
    log.close()
    said, *others = heard
    assert (said.name, said.severity) == ("notice", logging.ERROR)
    assert "events-r00000.jsonl: [Errno 28] No space left" in said.message
    assert [e.version for e in others] == [3, 4]
    assert [r.getMessage() for r in caplog.records] == [said.text()]


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[EventLog, list[str], int]]:
    """A log with its file in a file system that hangs, what it said, and the child in the hang."""
    said: list[str] = []
    log = EventLog(0, str(tmp_path), lambda event: said.append(event.message), by_child=True)
    assert log._file is not None
    assert log._file._child is not None
    child = log._file._child.pid
    os.kill(child, signal.SIGSTOP)
    yield log, said, child
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGCONT)


def test_a_file_system_that_hangs_stops_nobody(
    tmp_path: Path, stopped: tuple[EventLog, list[str], int]
) -> None:
    log, said, child = stopped
    path = tmp_path / "events-r00000.jsonl"
    for version in range(3000):
        log.emit("sealed", version=version)
    assert [text for text in said if text] == [f"{path} does not answer: events wait in memory"]
    assert not path.read_bytes()
    os.kill(child, signal.SIGCONT)
    log.close()
    events = map(json.loads, path.read_text().splitlines())
    assert [e["version"] for e in events if e["name"] == "sealed"] == [*range(3000)]
    assert len([text for text in said if text]) == 1


def test_what_a_file_system_that_hangs_does_not_take_is_said(
    stopped: tuple[EventLog, list[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, said, child = stopped
    monkeypatch.setattr(_appender, "END_SECONDS", 0.05)
    monkeypatch.setattr(_appender, "MAX_KEPT_BYTES", 1 << 16)
    for version in range(3000):
        log.emit("sealed", version=version)
    assert sum("the file system does not answer" in text for text in said) == 1
    assert not log.has_file
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_forked_worker_does_not_delay_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    log = EventLog(0, str(tmp_path), lambda event: said.append(event.message), by_child=True)
    worker = os.fork()
    if not worker:
        signal.pause()
        os._exit(0)
    log.emit("sealed", version=1)
    log.close()
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    assert said == [""]


def test_a_file_that_refuses_is_said_by_its_child(tmp_path: Path) -> None:
    (tmp_path / "events-r00000.jsonl").symlink_to("/dev/full")
    said: list[str] = []
    log = EventLog(0, str(tmp_path), lambda event: said.append(event.message), by_child=True)
    log.emit("sealed", version=1)
    log.close()
    assert said == [
        "",
        f"{tmp_path}/events-r00000.jsonl lacks the last events: No space left on device",
    ]


def test_severity_decides_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(2)
    with caplog.at_level(logging.INFO, logger="tierckpt"):
        log.emit("sealed", version=1)
        log.emit("failed", version=2, level="local", behind_since=1, severity=logging.ERROR)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert caplog.records[0].getMessage() == ("[rank 2] failed v2 local (newest version there: v1)")


def test_the_text_of_an_event() -> None:
    event = Event("committed", "local", 4, 1, 2_500_000, {"write": 0.25}, message="fine")
    assert event.text() == "[rank 1] committed v4 to local 2.5 MB (write 250.0 ms) - fine"


def test_an_event_about_no_version_names_none() -> None:
    notice = Event("notice", version=0, message="starting from the beginning")
    assert notice.text() == "[rank 0] starting from the beginning"
    rejected = Event("rejected", version=0, message="v3 shard 1 of 2: cut short")
    assert rejected.text() == "[rank 0] rejected: v3 shard 1 of 2: cut short"
    interval = Event("interval", "local", 7, message="every 12 steps")
    assert interval.text() == "[rank 0] interval local: every 12 steps"


UNCONFIGURED = """
import logging
from tierckpt.events import EventLog

log = EventLog(0)
log.emit("committed", level="local", version=7, severity=logging.INFO)
log.emit("restored", version=7, message="restored v7", severity=logging.INFO)
log.emit("failed", level="local", version=8, severity=logging.ERROR)
EventLog(1).emit("restored", version=7, message="restored v7")  # as on all ranks but rank 0
logging.getLogger("tierckpt").setLevel(logging.CRITICAL)
log.emit("restored", version=9, message="restored v9", severity=logging.INFO)
"""


def test_a_script_without_logging_shows_restores_and_failures() -> None:
    """By Python's own rule a restart would show nothing, and a line would not name its source.
    A logger set to be silent stays silent."""
    done = subprocess.run(
        [sys.executable, "-c", UNCONFIGURED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr.splitlines() == [
        "tierckpt: [rank 0] restored v7",
        "tierckpt: [rank 0] failed v8 local",
    ]


def test_a_receiver_that_always_fails_is_shown_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = EventLog(0, callback=fail)
    for version in range(1000):
        log.emit("sealed", version=version)
    first, *others = caplog.records
    assert first.exc_info is not None
    counts = [r.getMessage().partition(" times")[0].split()[-1] for r in others]
    assert counts == ["10", "100", "1000"]
    assert all(r.exc_info is None and "RuntimeError: no ear" in r.getMessage() for r in others)


def test_another_error_of_it_is_shown_too(caplog: pytest.LogCaptureFixture) -> None:
    def fail_variously(event: Event) -> None:
        raise (KeyError if event.version % 2 else ValueError)(event.version)

    log = EventLog(0, callback=fail_variously)
    log.add_callback(fail)
    for version in range(4):
        log.emit("sealed", version=version)
    kinds = [r.exc_info[0] for r in caplog.records if r.exc_info]
    assert kinds == [ValueError, RuntimeError, KeyError]


def test_an_event_reaches_a_receiver_a_file_or_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a receiver, a version at every step makes no event, and is only counted."""
    caplog.set_level(logging.WARNING, "tierckpt")  # clears the loggers' caches, now and at the end
    log = EventLog(0)
    assert log.count_unwanted("sealed/memory")
    assert log.counts == {"sealed": 1, "sealed/memory": 1}
    log.add_callback(lambda _: None)
    assert not log.count_unwanted("sealed/memory")
    written = EventLog(0, str(tmp_path))
    assert not written.count_unwanted("sealed/memory")
    written.close()
