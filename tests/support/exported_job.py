"""The events of a job that exporters receive, and the values that they must show."""

from __future__ import annotations

import contextlib
import http.server
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tierckpt.callbacks import Job
from tierckpt.events import Event
from tierckpt.exporters import Exporter

JOB = Job("demo-1a2b", rank=2, ranks=4, local_rank=0, levels=("memory", "local"))
FIRST = Job("demo-1a2b", rank=0, ranks=4, local_rank=0, levels=("memory", "local"))

EVENTS = (
    Event("restored", "memory", 7, nbytes=400, seconds={"inventory": 0.1, "total": 0.25}),
    Event("sealed", "memory", 8, nbytes=100, seconds={"stall": 0.002, "sealed_after": 0.04}),
    Event("sealed", "memory", 9, nbytes=100, seconds={"stall": 0.3, "sealed_after": 0.05}),
    Event("committed", "local", 8, nbytes=90, seconds={"write": 0.5, "commit": 0.25}),
    Event("skipped", "local", 9, reason="busy", message="a rank is still writing v8"),
    Event("failed", "local", 10, message="OSError: no space", severity=logging.ERROR),
    Event("rejected", version=10, message="a copy"),
    Event("drifted", version=10, message="weight differs", severity=logging.ERROR),
    Event("notice", version=10, message="mind this", severity=logging.WARNING),
    Event("notice", version=10, message="by the way", severity=logging.INFO),
    Event("interval", "local", 10, seconds={"step": 0.1, "cost": 0.2}),
)

VALUES = {
    "tierckpt_stored_total": {"memory": 2, "local": 1},
    "tierckpt_written_bytes_total": {"memory": 200, "local": 90},
    "tierckpt_newest_version": {"memory": 9, "local": 8},
    "tierckpt_version_bytes": {"memory": 100, "local": 90},
    "tierckpt_failed_total": {"memory": 0, "local": 1},
    "tierckpt_store_seconds_count": {"memory": 2, "local": 1},
    "tierckpt_store_seconds_sum": {"memory": 0.09, "local": 0.75},
    "tierckpt_stall_seconds_count": {"": 2},
    "tierckpt_stall_seconds_sum": {"": 0.302},
    "tierckpt_restores_total": {"": 1},
    "tierckpt_restored_version": {"": 7},
    "tierckpt_restored_bytes": {"": 400},
    "tierckpt_rejected_total": {"": 1},
    "tierckpt_drifted_total": {"": 1},
    "tierckpt_live_version": {"": 10},
    "tierckpt_running": {"": 0},
    "tierckpt_interrupted": {"": 0},
    "tierckpt_ranks": {"": 4},
}
"""Values after the events, by level."""


def play(exporter: Exporter, job: Job = JOB, events: tuple[Event, ...] = EVENTS) -> None:
    """Give a whole job to an exporter. After that all is exported."""
    exporter.on_attached(job)
    for event in events:
        exporter.on_event(event)
    exporter.on_step_boundary(10)
    exporter.on_event(Event("closed", version=10))
    exporter.on_closed()


def wait_until(true: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Wait for what another thread or process does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@contextlib.contextmanager
def receiving(refusals: list[int] | None = None) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server of HTTP on this machine: its URL, and path and body of each POST. It answers with
    the last status in `refusals` as long as there is one."""
    got: list[tuple[str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if refusals:
                self.send_response(refusals[-1])
            else:
                got.append((self.path, body))
                self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
