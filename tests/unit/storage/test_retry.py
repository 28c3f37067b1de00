"""Which calls are retried, how often and when; and the advice to the user for other errors."""

from __future__ import annotations

import errno
import random
import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.errors import ConfigError
from tierckpt.storage.persistent import (
    PersistentError,
    PosixBackend,
    RetryingBackend,
    RetryPolicy,
    advice,
    is_transient,
    lacks_room,
    open_backend,
)


class AnswerError(Exception):
    """Errors as S3 clients raise them."""

    def __init__(self, status: int, code: str = "") -> None:
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class ReadTimeoutError(Exception):
    """Has the name that clients use."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "eio"),
        OSError(errno.ESTALE, "stale"),
        OSError(errno.ECONNRESET, "reset"),
        OSError(errno.ESHUTDOWN, "thrown out, and let in again"),
        OSError(errno.EMFILE, "many files"),
        socket.gaierror(socket.EAI_AGAIN, "no name server"),
        OSError(socket.EAI_AGAIN, "the same, as clients pass it on"),
        TimeoutError("slow"),
        ConnectionError("gone"),
        AnswerError(503),
        AnswerError(429),
        caused_by(OSError(errno.EINVAL, "busy"), AnswerError(500)),
        ReadTimeoutError(),
    ],
)
def test_transient_errors(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "full"), "free space"),
        (OSError(errno.EDQUOT, "quota"), "quota"),
        (OSError(errno.EROFS, "ro"), "read-only"),
        (PermissionError(errno.EACCES, "no"), "right to write"),
        (FileNotFoundError("bucket"), "create the bucket or directory"),
        (caused_by(PermissionError("denied"), AnswerError(403)), "check the credentials"),
        (caused_by(PermissionError("time"), AnswerError(403, "RequestTimeTooSkewed")), "clock"),
        (AnswerError(404), "create the bucket"),
        (caused_by(PermissionError("no"), AnswerError(403, "QuotaExceeded")), "quota is used up"),
        (AnswerError(500, "XMinioStorageFull"), "quota is used up"),
        (OSError(errno.EBADF, "odd"), "documentation"),
    ],
)
def test_a_permanent_error_comes_with_advice(error: Exception, told: str) -> None:
    assert not is_transient(error)
    assert told in advice(error)


@pytest.mark.parametrize(
    ("cause", "full"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (AnswerError(507), True),
        (caused_by(OSError(errno.EIO, "as clients translate it"), AnswerError(507)), True),
        (caused_by(OSError(errno.ENOSPC, "as clients translate it"), AnswerError(403)), False),
        (AnswerError(403, "QuotaExceeded"), True),
        (AnswerError(400, "XMinioAdminBucketQuotaExceeded"), True),
        (AnswerError(403, "AccessDenied"), False),
        (AnswerError(503, "BucketThrottleQuotaExceeded"), False),
        (OSError(errno.EROFS, "ro"), False),
    ],
)
def test_errors_that_more_room_would_end_are_distinguished(cause: Exception, full: bool) -> None:
    assert lacks_room(caused_by(PersistentError("", "", False), cause)) == full
    assert not lacks_room(cause)


@given(st.integers(1, 60), st.floats(0, 1, exclude_max=True))
def test_waits_grow_to_a_limit_and_differ(failures: int, uniform: float) -> None:
    policy = RetryPolicy(first_seconds=0.5, most_seconds=30.0)
    longest = min(0.5 * 2 ** (failures - 1), 30.0)
    assert longest / 2 <= policy.wait_seconds(failures, uniform) <= longest


class Failing(PosixBackend):
    """Fails `times` times with `error`."""

    def __init__(self, error: Exception, times: int) -> None:
        super().__init__("/nowhere")
        self.error, self.times, self.calls = error, times, 0

    def size(self, name: str) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return 42


def retrying(inner: Failing, waits: list[float], tries: int = 4) -> RetryingBackend:
    policy = RetryPolicy(tries=tries, first_seconds=1.0)
    return RetryingBackend(inner, policy, waits.append, uniform=lambda: 0.0)


def test_it_continues_when_the_trouble_is_over() -> None:
    inner, waits = Failing(OSError(errno.EIO, "eio"), 3), list[float]()
    assert retrying(inner, waits).size("x") == 42
    assert waits == [0.5, 1.0, 2.0]


def test_waits_leave_the_training_s_random_stream_alone() -> None:
    """An inline agent runs in the trainer's process."""
    before = random.getstate()
    backend = RetryingBackend(Failing(OSError(errno.EIO, "eio"), 3), RetryPolicy(), lambda s: None)
    assert backend.size("x") == 42
    assert random.getstate() == before


def test_it_gives_up_with_a_report() -> None:
    inner, waits = Failing(OSError(errno.EIO, "eio"), 99), list[float]()
    with pytest.raises(
        PersistentError, match=r"/nowhere/x: OSError: .*given up after 4 tries"
    ) as e:
        retrying(inner, waits).size("x")
    assert e.value.transient
    assert (inner.calls, len(waits)) == (4, 3)


def test_a_permanent_error_is_not_retried() -> None:
    inner, waits = Failing(OSError(errno.ENOSPC, "full"), 99), list[float]()
    with pytest.raises(PersistentError, match=r"/nowhere/x: .*free space") as e:
        retrying(inner, waits).size("x")
    assert not e.value.transient
    assert (inner.calls, waits) == (1, [])


def test_answers_and_bugs_are_no_trouble() -> None:
    for error in (FileNotFoundError("x"), ZeroDivisionError()):
        with pytest.raises(type(error)):
            retrying(Failing(error, 99), []).size("x")


def test_an_impatient_caller_can_give_up_between_tries() -> None:
    def sleep(seconds: float) -> None:
        raise KeyError("superseded")

    inner = Failing(OSError(errno.EIO, "eio"), 99)
    with pytest.raises(KeyError):
        RetryingBackend(inner, RetryPolicy(), sleep).size("x")
    assert inner.calls == 1


def test_without_a_client_a_url_is_an_error_that_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("obstore", "fsspec"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"memory://x needs a package .*fsspec"):
        open_backend("memory://x")
    with pytest.raises(ConfigError, match=r"s3://bucket/x needs .*pip install 'tierckpt\[s3\]'"):
        open_backend("s3://bucket/x")
    assert open_backend("/some/where").url == "/some/where"
    assert open_backend("file:///some/where").url == "/some/where"


def test_a_url_of_an_unknown_kind_is_refused() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigError, match="nonsense://x cannot be opened"):
        open_backend("nonsense://x")
