"""Preemption notices: a cloud's metadata service announces that it will take this machine away.

| cloud | machine | notice | time given |
|---|---|---|---|
| `aws` | EC2 spot instance | `spot/instance-action`, with IMDSv2's token | 2 minutes |
| `gcp` | spot or preemptible VM | `instance/preempted` | 30 s |
| `azure` | spot VM, scale set | scheduled events | 30 s or more; for others minutes |

The service answers at an address of the machine itself, so one process of each node asks. It asks
on a thread of its own (`Watcher`, which looks again and again, also for other requests to end the
job): a service may be away, slow or wrong, and the training must not notice.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from tierckpt._text import error_text
from tierckpt.config import parse_notices

__all__ = ["CLOUDS", "Cloud", "Metadata", "Notice", "PreemptionWatcher", "Watcher", "service_of"]


JOIN_SECONDS = 1.0
"""The longest wait for the thread at the end; it may hang in a look."""


class Watcher:
    """Calls `_look`, which must not raise, at once and then periodically. A subclass writes plain
    attributes in `_look`, and the training thread reads them."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def _start_thread(self, name: str, every_seconds: float) -> None:
        """Start the thread."""
        self._thread = threading.Thread(
            target=self._work, args=(every_seconds,), name=name, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _work(self, every_seconds: float) -> None:
        self._look()
        while not self._over.wait(every_seconds):
            self._look()

    def _look(self) -> None:
        raise NotImplementedError


ANSWER_SECONDS = 2.0
"""Limit of one answer; the service is on the machine."""
MAX_BYTES = 1 << 18
"""Limit of an answer's length."""
FAILURES = 3
"""Failures in a row after which the service is reported as away: one may be a throttled request."""
GCP_SECONDS = 30.0
"""Time that Google grants; its notice has none."""
AZURE_ENDS = frozenset(("Preempt", "Terminate", "Reboot", "Redeploy"))
"""Types of events that end a machine, or all that it has in memory and on its temporary disk."""
AWS_ENDS = frozenset(("terminate", "stop", "hibernate"))


class Notice(Struct, frozen=True):
    """The announced end of this machine."""

    action: str
    """The cloud's word for it."""
    end_seconds: float
    """Unix time."""


class Metadata:
    """Client of a machine's metadata service, without proxies. One thread."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: as `http://169.254.169.254`."""
        self.endpoint = endpoint.rstrip("/")
        self.token = ""
        """Token of AWS; empty: none yet."""

    def ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        """Status and text of the answer. Raises OSError, http.client.HTTPException, ValueError."""
        parts = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=ANSWER_SECONDS
        )
        try:
            connection.request(method, parts.path + path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, _body(answer).decode()
        finally:
            connection.close()

    def get(self, path: str, headers: Mapping[str, str]) -> str:
        """Text of an answer with status 200. Raises as `ask`."""
        status, text = self.ask("GET", path, headers)
        if status != 200:
            raise ValueError(f"status {status} for {path}")
        return text


def _body(answer: http.client.HTTPResponse) -> bytes:
    """The answer's body, up to MAX_BYTES. Raises TimeoutError if it never ends: the socket's limit
    counts again for each part."""
    deadline, read = time.monotonic() + ANSWER_SECONDS, b""
    while len(read) < MAX_BYTES and (part := answer.read1(MAX_BYTES - len(read))):
        read += part
        if time.monotonic() > deadline:
            raise TimeoutError("the answer does not end")
    return read


# --- clouds --------------------------------------------------------------------------------------


def _aws(service: Metadata) -> Notice | None:
    path = "/latest/meta-data/spot/instance-action"
    if not service.token:
        service.token = _aws_token(service)
    status, text = service.ask("GET", path, {"X-aws-ec2-metadata-token": service.token})
    if status == 404:
        return None
    if status == 401:  # the token has expired
        service.token = ""
    if status != 200:
        raise ValueError(f"status {status} for {path}")
    found = _object(text)
    if found["action"] not in AWS_ENDS:
        raise ValueError(f"an unknown action: {text[:80]!r}")
    return Notice(f"action {found['action']}", datetime.fromisoformat(found["time"]).timestamp())


def _aws_token(service: Metadata) -> str:
    path = "/latest/api/token"
    status, text = service.ask("PUT", path, {"X-aws-ec2-metadata-token-ttl-seconds": "21600"})
    if status != 200 or not text.isprintable():
        raise ValueError(f"status {status} for {path}")
    return text


def _gcp(service: Metadata) -> Notice | None:
    path = "/computeMetadata/v1/instance/preempted"
    text = service.get(path, {"Metadata-Flavor": "Google"}).strip()
    if text not in ("TRUE", "FALSE"):
        raise ValueError(f"not TRUE or FALSE: {text[:80]!r}")
    return Notice("preempted", time.time() + GCP_SECONDS) if text == "TRUE" else None


def _azure(service: Metadata) -> Notice | None:
    header = {"Metadata": "true"}
    events = _object(service.get("/metadata/scheduledevents?api-version=2020-07-01", header))
    ends = [event for event in events["Events"] if event["EventType"] in AZURE_ENDS]
    if not ends:
        return None
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = service.get(path, header).strip()
    ours = [
        Notice(f"event {event['EventType']}", _not_before(event["NotBefore"]))
        for event in ends
        if name in event["Resources"]
    ]
    return min(ours, key=lambda notice: notice.end_seconds, default=None)


def _not_before(text: str) -> float:
    """Unix time of an event; empty: it has started."""
    return email.utils.parsedate_to_datetime(text).timestamp() if text else time.time()


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"not a JSON object: {text[:80]!r}")
    return found


class Cloud(Struct, frozen=True):
    """One cloud's service."""

    endpoint: Callable[[Mapping[str, str]], str]
    """Its address; the environment may name another one."""
    look: Callable[[Metadata], Notice | None]
    """Asks for a notice. Raises KeyError, TypeError, and as `Metadata.ask`."""
    every_seconds: float
    """Interval, as the cloud recommends it or its notice needs it."""


def _aws_endpoint(environment: Mapping[str, str]) -> str:
    mode = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower()
    default = "http://[fd00:ec2::254]" if mode == "ipv6" else "http://169.254.169.254"
    return environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or default


def _gcp_endpoint(environment: Mapping[str, str]) -> str:
    host = environment.get("GCE_METADATA_HOST") or "metadata.google.internal"
    return f"http://{host}"


CLOUDS = {
    "aws": Cloud(_aws_endpoint, _aws, 5.0),
    "gcp": Cloud(_gcp_endpoint, _gcp, 1.0),
    "azure": Cloud(lambda environment: "http://169.254.169.254", _azure, 1.0),
}


def service_of(setting: str, environment: Mapping[str, str]) -> tuple[str, Cloud, Metadata] | None:
    """Name of the cloud of `Config.halt_notices`, the cloud, and its service; None if it is empty.
    Nothing is asked yet."""
    name, endpoint = parse_notices(setting)
    if not name:
        return None
    return name, CLOUDS[name], Metadata(endpoint or CLOUDS[name].endpoint(environment))


# --- the thread ----------------------------------------------------------------------------------


class PreemptionWatcher(Watcher):
    """Looks for a notice at intervals, on its own thread. Any thread may read the results."""

    def __init__(self, setting: str, environment: Mapping[str, str]) -> None:
        """`setting`: as `Config.halt_notices`; empty: there is nothing to watch."""
        super().__init__()
        self.notice: Notice | None = None
        """The notice, unless it was withdrawn."""
        self.noticed_seconds: float | None = None
        """The time at which the notice was found, by `time.monotonic()`."""
        self.problem = ""
        """Why the service gives no answer; empty if it does."""
        self._failures = 0
        if found := service_of(setting, environment):
            self._name, self._cloud, self._service = found
            self._start_thread("tierckpt-preemption", self._cloud.every_seconds)

    def _look(self) -> None:
        try:
            found = self._cloud.look(self._service)
        except Exception as error:  # any error would end the thread
            self._failures += 1
            if self._failures >= FAILURES:
                self.problem = (
                    f"{self._service.endpoint} gives no answer that a metadata service of "
                    f"{self._name} gives ({error_text(error)}), so an announced end "
                    "of this machine may be missed. It is asked again all the time. If this "
                    "machine is not there, set halt_notices to nothing"
                )
            return
        self._failures, self.problem = 0, ""
        if found is None:
            self.notice = self.noticed_seconds = None
        elif self.notice is None or found.action != self.notice.action:
            self.noticed_seconds = time.monotonic()
            self.notice = found
