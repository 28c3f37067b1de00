"""The recorder: no cost when it is off, complete when it is on, and never a reason to stop."""

from __future__ import annotations

import json
import logging
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.parts import boundary_at
from tierckpt.config import Config
from tierckpt.events import Event, EventLog
from tierckpt.testing import TinyJob
from tierckpt.tracing import Span, Trace, open_trace, read_entries, read_trace
from tierckpt.tracing import recorder as trace_module

MEMORY_ONLY: dict[str, Any] = {"local_every_steps": 0, "local_every_seconds": 0.0}


class Recording:
    """A trace in a folder, and its notices."""

    def __init__(self, path: Path, steps: int = 10) -> None:
        self.path = path
        self.said: list[str] = []
        self.trace = Trace(path, 3, steps, lambda param: f"p{param.numel()}", self.said.append)

    def boundary(self, version: int) -> Trace | None:
        self.trace.boundary_ends(boundary_at(version, 0.0))
        return self.trace if self.trace._file is not None else None


@pytest.fixture
def recording(tmp_path: Path) -> Any:
    found = Recording(tmp_path / "deep" / "trace-r00003.json")
    yield found
    found.trace.close()


def entries(path: Path) -> list[dict[str, Any]]:
    return [e for e in read_entries(path) if e["ph"] != "M"]


def kinds(path: Path) -> list[str]:
    return [e["cat"] for e in entries(path)]


# --- off -----------------------------------------------------------------------------------------


def calls_of_a_job(path: Path, shm_dir: Path, **settings: Any) -> list[str]:
    """Names of the recorder's functions called in four steps, on any thread."""
    seen: list[str] = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == trace_module.__file__:
            seen.append(frame.f_code.co_name)

    threading.setprofile(look)  # for the copier, which the job starts
    try:
        with TinyJob(path, shm_dir=str(shm_dir), **MEMORY_ONLY, **settings) as job:
            sys.setprofile(look)
            job.run(4)
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def test_off_not_one_function_of_it_is_called(tmp_path: Path, shm_dir: Path) -> None:
    assert calls_of_a_job(tmp_path / "off", shm_dir) == []
    # The same look sees them when it is on, so it would have seen them.
    seen = calls_of_a_job(tmp_path / "on", shm_dir, trace_dir=str(tmp_path / "traces"))
    assert {"copied", "span", "boundary_ends"} <= set(seen)


# --- on ------------------------------------------------------------------------------------------


def spans_of(job_spans: list[Span], kind: str, version: int) -> list[Span]:
    return [s for s in job_spans if s.kind == kind and s.version == version]


def test_a_job_of_one_process_is_recorded_in_order(tmp_path: Path, shm_dir: Path) -> None:
    folder = tmp_path / "traces"
    with TinyJob(
        tmp_path / "ckpts", shm_dir=str(shm_dir), trace_dir=str(folder), **MEMORY_ONLY
    ) as job:
        job.run(5)
    spans = read_trace(folder / "trace-r00000.json").spans
    updates = [s for s in spans if s.kind == "update"]
    assert len(updates) == 5
    for version in (1, 2, 3, 4):
        (boundary,) = spans_of(spans, "boundary", version)
        (slot,) = spans_of(spans, "slot", version)
        (barrier,) = spans_of(spans, "barrier", version)
        (seal,) = spans_of(spans, "seal", version)
        copies = spans_of(spans, "copy", version)
        before, after = updates[version - 1], updates[version]
        assert before.end_us <= boundary.start_us <= slot.start_us
        for copy in copies:
            assert slot.end_us <= copy.start_us <= copy.end_us <= barrier.end_us
        assert max(c.start_us for c in copies) <= seal.start_us
        assert max(c.end_us for c in copies) <= seal.end_us <= barrier.end_us
        assert barrier.end_us <= after.start_us
        assert {c.row for c in copies} <= {"training", "copier"}
        # 12 x 24 + 24, twice 24, 24 x 4 + 4, each with two moments and a step count for each of
        # the six; and BatchNorm's two averages and its counter.
        parameters = 12 * 24 + 24 + 48 + 24 * 4 + 4
        assert sum(c.nbytes for c in copies) == 4 * (3 * parameters + 6 + 48) + 8
        layers = {layer for c in copies for layer in c.layers}
        assert layers == {
            "0.weight",
            "0.bias",
            "1.weight",
            "1.bias",
            "4.weight",
            "4.bias",
            "buffers",
        }


def test_it_ends_after_its_steps(recording: Recording) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles = recording.trace.watch({"sgd": optimizer})
    recording.trace._left = 2
    optimizer.step()
    assert recording.boundary(1) is recording.trace
    optimizer.step()
    assert recording.boundary(2) is None
    optimizer.step()
    recording.trace.span("copy", 0.0, 1.0, version=3)
    assert recording.boundary(3) is None
    assert kinds(recording.path).count("update") == 2
    assert [e["args"]["version"] for e in entries(recording.path) if e["cat"] == "boundary"] == [
        1,
        2,
    ]
    assert recording.said == []
    for handle in handles:
        handle.remove()


def test_closed_it_keeps_no_tensor_alive(recording: Recording) -> None:
    class Plan(SimpleNamespace):
        """A plan that allows weak references."""

    piece = SimpleNamespace(spec=SimpleNamespace(name="model/a"))
    block = SimpleNamespace(parts=((0, 0, 1),), nbytes=8)
    plan: Any = Plan(layout=SimpleNamespace(pieces=[piece], blocks=[block]))
    alive = weakref.ref(plan)
    recording.trace.copied(1, plan, (0,), 0.0, 0.0)
    recording.boundary(1)
    recording.trace.copied(1, plan, (0,), 0.0, 0.0)
    recording.trace.close()
    del plan
    assert alive() is None
    assert [e["name"] for e in entries(recording.path) if e["cat"] == "copy"] == ["a", "a"]


def test_a_step_around_a_step_is_one_update_the_inner_one(recording: Recording) -> None:
    after = recording.trace._after_update("outer")
    for hook in (recording.trace._before_update, recording.trace._before_update, after, after):
        hook()
    recording.boundary(1)
    assert kinds(recording.path).count("update") == 1


def test_horovods_names_of_reductions_are_recorded_in_every_run(tmp_path: Path) -> None:
    """The newest run's names win; a name is not a span."""
    for names in ({"allreduce.a": ["a"], "x_1of2": ["b"]}, {"x_1of2": ["c", "d"]}):
        recording = Recording(tmp_path / "t.json")
        recording.trace.name_reductions(names)
        recording.trace.close()
    found = read_trace(tmp_path / "t.json")
    assert found.reductions == {"allreduce.a": ("a",), "x_1of2": ("c", "d")}
    assert [s.kind for s in found.spans] == ["begin", "begin"]


def test_a_record_from_any_thread_is_kept(recording: Recording) -> None:
    def record() -> None:
        for version in range(200):
            recording.trace.span("copy", 0.0, 1.0, version=version)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        recording.trace._flush()  # while they are at it
    for thread in threads:
        thread.join()
    recording.boundary(1)
    found = [e for e in entries(recording.path) if e["cat"] == "copy"]
    assert sorted(e["args"]["version"] for e in found) == sorted(4 * list(range(200)))
    assert {e["tid"] for e in found} == {trace_module.COPIER}


def test_a_reduction_lasts_from_its_launch_until_its_future_is_done(recording: Recording) -> None:
    params = [torch.zeros(3), torch.zeros(5)]
    future: torch.futures.Future[Any] = torch.futures.Future()
    recording.trace.released(params, 7, future, launched_seconds=1.0)
    recording.boundary(7)
    assert "release" in kinds(recording.path)
    assert "allreduce" not in kinds(recording.path)
    future.set_result(None)
    recording.boundary(8)
    (found,) = [e for e in entries(recording.path) if e["cat"] == "allreduce"]
    (release,) = [e for e in entries(recording.path) if e["cat"] == "release"]
    assert found["ts"] == release["ts"]
    assert found["dur"] > 0
    assert found["args"] == {"version": 7, "bytes": 32, "layers": ["p3", "p5"]}
    assert found["name"] == "p3 +1"


def test_the_end_of_a_last_reduction_reported_late_is_not_lost(tmp_path: Path) -> None:
    """A thread that waits for a future may wake up before the callbacks are called."""
    tells: list[threading.Thread] = []

    class Late(torch.futures.Future[Any]):
        def add_done_callback(self, callback: Any) -> None:
            self.callback = callback

        def done(self) -> bool:
            if not tells:  # we are waited for
                tells.append(threading.Thread(target=self.callback, args=(self,)))
                tells[0].start()
            return True

    recording = Recording(tmp_path / "trace-r00003.json", steps=2)
    unfinished: torch.futures.Future[Any] = torch.futures.Future()
    recording.trace.released([torch.zeros(2)], 1, unfinished)
    assert recording.boundary(1) is not None
    recording.trace.released([torch.zeros(3)], 1, Late())
    assert recording.boundary(2) is None
    tells[0].join()
    (reduced,) = (e for e in entries(recording.path) if e["cat"] == "allreduce")
    assert reduced["args"]["layers"] == ["p3"]
    unfinished.set_result(None)
    assert recording.said == []


def test_the_agents_work_is_drawn_after_the_seal(recording: Recording) -> None:
    recording.trace.span("seal", 1.0, 2.0, version=4)
    seconds = {"write": 0.5, "commit": 0.25}
    recording.trace.on_event(Event("committed", "local", 4, nbytes=9, seconds=seconds))
    recording.trace.on_event(Event("committed", "local", 5, nbytes=9, seconds=seconds))  # unknown
    recording.boundary(4)
    seal, write, commit = (
        e for e in entries(recording.path) if e["cat"] in ("seal", "write", "commit")
    )
    assert write["ts"] == seal["ts"] + seal["dur"]
    assert (write["dur"], commit["dur"]) == (500_000, 250_000)
    assert commit["ts"] == write["ts"] + write["dur"]


# --- the file ------------------------------------------------------------------------------------


def test_torn_anywhere_it_is_read_up_to_there_and_continued(tmp_path: Path) -> None:
    whole = tmp_path / "whole.json"
    first = Recording(whole)
    first.trace.span("copy", 1.0, 2.0, version=1, layers=['a "quoted" \\ {name}]'])
    first.boundary(1)
    first.trace.close()
    text = whole.read_bytes()
    complete = len(entries(whole))
    last_line = text[:-1].rindex(b"\n") + 1
    torn = tmp_path / "torn.json"
    for length in range(last_line, len(text)):
        torn.write_bytes(text[:length])
        # The comma after an entry is not needed to read it.
        assert len(entries(torn)) == complete - (length < len(text) - 2)
    torn.write_bytes(text[: len(text) - 5])
    second = Recording(torn)
    second.boundary(2)
    second.trace.close()
    found = entries(torn)
    assert [e["cat"] for e in found].count("begin") == 2
    assert [e["args"].get("version") for e in found if e["cat"] == "boundary"][-1] == 2
    assert json.loads(torn.read_text().rstrip().rstrip(",") + "]")


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    heard: list[Event] = []
    (tmp_path / "trace-r00000.json").write_text('{"mine": 1}')
    log = EventLog(0, callback=heard.append)
    assert open_trace(Config(trace_dir=str(tmp_path)), 0, str, log) is None
    assert (tmp_path / "trace-r00000.json").read_text() == '{"mine": 1}'
    assert "not a trace of Tierckpt" in heard[0].message


def test_a_folder_that_cannot_be_had_costs_a_notice(tmp_path: Path, shm_dir: Path) -> None:
    (tmp_path / "file").write_text("")
    with TinyJob(
        tmp_path / "ckpts",
        shm_dir=str(shm_dir),
        trace_dir=str(tmp_path / "file" / "traces"),
        **MEMORY_ONLY,
    ) as job:
        job.run(2)
    notices = [e for e in job.events if "trace_dir" in e.message]
    assert [e.severity for e in notices] == [logging.WARNING]
    assert [e.version for e in job.events if e.name == "sealed"] == [1, 2]


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    found = Recording(tmp_path / "trace.json")
    assert found.trace._file is not None
    found.trace._file.close()
    found.trace._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    found.trace.span("copy", 0.0, 1.0, version=1)
    assert found.boundary(1) is None
    assert found.boundary(2) is None
    assert len(found.said) == 1
    assert "No space left" in found.said[0]


def test_a_too_long_file_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_BYTES", 3000)
    found = Recording(tmp_path / "trace.json", steps=1000)
    version = 0
    while found.boundary(version) is not None:
        version += 1
        assert version < 100
    assert "longer than 3000 bytes" in found.said[0]
    assert kinds(found.path).count("boundary") == version + 1


# --- names ---------------------------------------------------------------------------------------
