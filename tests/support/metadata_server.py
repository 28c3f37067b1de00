"""Metadata services of clouds, on this machine: they answer as the documentation of each says."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, str]
Reply = Callable[[str, str, Mapping[str, str]], Answer]
"""Answers a method, a path and headers with a status and a text."""
HOLDS = 0
"""Status of an answer that never comes."""
TRICKLES = 1
"""Status of an answer that never ends: some bytes come all the time."""


class Server:
    """A server; `reply` may be replaced at any time."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[str] = []
        """Methods and paths of all requests."""
        self.over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer("GET")

            def do_PUT(self) -> None:
                self._answer("PUT")

            def _answer(self, method: str) -> None:
                server.asked.append(f"{method} {self.path}")
                status, text = server.reply(method, self.path, self.headers)
                if status == HOLDS:
                    server.over.wait()
                    return
                if status == TRICKLES:
                    self.send_response(200)
                    self.end_headers()
                    with contextlib.suppress(OSError):  # the client has gone
                        while not server.over.wait(0.01):
                            self.wfile.write(b"TRUE")
                    return
                body = text.encode("latin-1")
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self.over.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@contextmanager
def serving(reply: Reply) -> Iterator[Server]:
    server = Server(reply)
    try:
        yield server
    finally:
        server.close()


class Aws:
    """IMDSv2. The token must be asked for by PUT, and be given with each request."""

    def __init__(self) -> None:
        self.notice: dict[str, str] | None = None
        self.token = "token-1"

    def announce(self, seconds: float, action: str = "terminate") -> float:
        """Announce an end in so many seconds; returns its Unix time."""
        end = int(time.time() + seconds)
        self.notice = {"action": action, "time": f"{datetime.fromtimestamp(end, UTC):%FT%TZ}"}
        return end

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if (method, path) == ("PUT", "/latest/api/token"):
            given = int(headers.get("X-aws-ec2-metadata-token-ttl-seconds") or 0)
            return (200, self.token) if 1 <= given <= 21600 else (400, "")
        if headers.get("X-aws-ec2-metadata-token") != self.token:
            return 401, "Unauthorized"
        if path == "/latest/meta-data/spot/instance-action" and self.notice:
            return 200, json.dumps(self.notice)
        return 404, "<html>Not Found</html>"


class Gcp:
    """Google's service. The header must be given with each request."""

    def __init__(self) -> None:
        self.preempted = False

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if headers.get("Metadata-Flavor") != "Google":
            return 403, "Forbidden"
        if path != "/computeMetadata/v1/instance/preempted":
            return 404, "Not Found"
        return 200, str(self.preempted).upper()


class Azure:
    """Azure's service: events of all machines of a scale set, and this machine's name."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []

    def announce(self, kind: str, machine: str, end_seconds: float) -> None:
        when = f"{datetime.fromtimestamp(end_seconds, UTC):%a, %d %b %Y %H:%M:%S GMT}"
        self.events.append(
            {
                "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": [machine],
                "EventStatus": "Scheduled",
                "NotBefore": when,
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if headers.get("Metadata") != "true":
            return 400, "Bad Request"
        if path.startswith("/metadata/scheduledevents?api-version="):
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events})
        if path.startswith("/metadata/instance/compute/name?"):
            return 200, "node_3"
        return 404, "Not Found"
