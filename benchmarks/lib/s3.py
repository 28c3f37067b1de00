"""An S3 server for a benchmark, and the barest client of it: sockets and threads, no checksums."""

from __future__ import annotations

import http.client
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tierckpt.testing import s3_server

BUCKET = "bench"
TOY_KEYS = {
    "access_key_id": s3_server.KEY,
    "secret_access_key": s3_server.SECRET,
    "region": "us-east-1",
}
CONNECTIONS = 8


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    endpoint: str
    bucket: str
    keys: dict[str, str]

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/run"

    @property
    def options(self) -> dict[str, Any]:
        """Storage options for Tierckpt."""
        return {"endpoint": self.endpoint, **self.keys}


@contextmanager
def toy_server(folder: Path) -> Iterator[Server]:
    """The server of the tests: its front is slow, so it serves only to try the benchmark."""
    if s3_server.program() is None:
        sys.exit("there is no S3 server: run make s3-for-tests, or name one with --endpoint")
    (folder / BUCKET).mkdir()
    with s3_server.serving(folder) as endpoint:
        yield Server("the tests' server", endpoint, BUCKET, TOY_KEYS)


class BareClient:
    """Sends and receives objects over CONNECTIONS connections. The requests are signed before."""

    def __init__(self, server: Server, names: Sequence[str]) -> None:
        import obstore
        from obstore.store import S3Store

        options = {"allow_http": True}
        store = S3Store(
            server.bucket, endpoint=server.endpoint, client_options=options, **server.keys
        )
        self._host = urlsplit(server.endpoint).netloc
        self.names = list(names)
        expires = timedelta(hours=1)
        self._put = obstore.sign(store, "PUT", self.names, expires)
        self._get = obstore.sign(store, "GET", self.names, expires)

    def put(self, parts: Sequence[memoryview]) -> None:
        """Store one object for each part."""

        def one(connection: http.client.HTTPConnection, number: int) -> None:
            connection.request("PUT", self._target(self._put[number]), parts[number])
            _checked(connection.getresponse()).read()

        self._spread(len(parts), one)

    def get(self, parts: Sequence[memoryview]) -> None:
        """Read one object into each part."""

        def one(connection: http.client.HTTPConnection, number: int) -> None:
            connection.request("GET", self._target(self._get[number]))
            answer, done, part = _checked(connection.getresponse()), 0, parts[number]
            while done < len(part) and (count := answer.readinto(part[done:])):
                done += count
            answer.read()

        self._spread(len(parts), one)

    def _target(self, url: str) -> str:
        parts = urlsplit(url)
        return f"{parts.path}?{parts.query}"

    def _spread(self, count: int, one: Callable[[http.client.HTTPConnection, int], None]) -> None:
        numbers, lock = iter(range(count)), threading.Lock()

        def work() -> None:
            connection = http.client.HTTPConnection(self._host, blocksize=1 << 20)
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return connection.close()
                one(connection, number)

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for done in [pool.submit(work) for _ in range(CONNECTIONS)]:
                done.result()


def _checked(answer: http.client.HTTPResponse) -> http.client.HTTPResponse:
    if answer.status not in (200, 206):
        raise OSError(f"HTTP status {answer.status}: {answer.read(500)!r}")
    return answer
