"""Failures of a store: which ones are transient, retries, and advice to the user for the others."""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tierckpt._text import in_words
from tierckpt.errors import PersistentError

from .backend import Backend, Content
from .object_stores.client_errors import error_code, http_status

Result = TypeVar("Result")

_chance = random.Random()
"""A generator of its own: the global one is the training's if the agent runs in its process."""

_TRANSIENT_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_TRANSIENT_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.ENOTCONN,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOLCK,
    errno.EPIPE,
    errno.EREMOTEIO,
    errno.ESHUTDOWN,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
"""ESHUTDOWN, ENOTCONN: a file system's client that was evicted by its servers reconnects by
itself."""
# Clients have errors of their own, which are no OSError; recognized by name, to import no client.
_TRANSIENT_NAMES = (
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "EndpointConnectionError",
    "FSTimeoutError",
    "HTTPClientError",
    "ReadTimeoutError",
    "ResponseStreamingError",
    "ServerTimeoutError",
)
_NO_ROOM = {errno.EDQUOT, errno.ENOSPC}
_INSUFFICIENT_STORAGE = 507
_USED_UP = re.compile(r"(?!.*Throttle).*(QuotaExceeded|StorageFull)")
"""Error codes of S3 servers for a full store, with any status: Ceph and others use QuotaExceeded,
with 403; MinIO puts its own name before that, or before StorageFull."""
_OF_CREDENTIALS = {"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
"""Error codes of S3 servers for credentials, some with status 400."""
_LESS = "keep fewer versions (one more than persistent_keep_last must fit)"
_ADVICE = {
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.EDQUOT: f"the quota is used up: free space, raise it, or {_LESS}",
    errno.ENOENT: "it does not exist: create the bucket or directory, or mount it",
    errno.ENOSPC: f"the device is full: free space, or {_LESS}",
    errno.ENOTDIR: "use the path of a directory",
    errno.EROFS: "the file system is mounted read-only: remount it, or use another path",
}
_STATUS_ADVICE = {
    400: "the store did not understand the request: check the endpoint and region",
    401: "check the credentials (AWS_ACCESS_KEY_ID and the like)",
    403: "check the credentials, and their right to write there",
    404: _ADVICE[errno.ENOENT],
    _INSUFFICIENT_STORAGE: _ADVICE[errno.ENOSPC],
}


def is_transient(error: BaseException) -> bool:
    """True if the same call may succeed a little later.

    A status of the server takes precedence over an errno: clients translate statuses imprecisely.
    """
    status = http_status(error)
    if status is not None:
        return status in _TRANSIENT_STATUS and not _used_up(error)
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        # Below zero: not an errno, but the result of a host name lookup.
        return error.errno in _TRANSIENT_ERRNO or error.errno < 0
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint(_TRANSIENT_NAMES)


def lacks_room(error: BaseException) -> bool:
    """True for a PersistentError that ends when files there are removed."""
    cause = error.__cause__
    if not isinstance(error, PersistentError) or cause is None:
        return False
    if (status := http_status(cause)) is not None:
        return status == _INSUFFICIENT_STORAGE or _used_up(cause)
    return isinstance(cause, OSError) and cause.errno in _NO_ROOM


def _used_up(error: BaseException) -> bool:
    return _USED_UP.fullmatch(error_code(error)) is not None


def advice(error: BaseException) -> str:
    """Advice for a permanent error."""
    if _used_up(error):
        return _ADVICE[errno.EDQUOT]
    if error_code(error) == "RequestTimeTooSkewed":
        return "set this machine's clock: the store rejects signatures minutes off its own time"
    status = 401 if error_code(error) in _OF_CREDENTIALS else http_status(error)
    if status in _STATUS_ADVICE:
        return _STATUS_ADVICE[status]
    if type(error).__name__ == "NoCredentialsError":
        return _STATUS_ADVICE[401]
    code = error.errno if isinstance(error, OSError) else None
    if code is None:
        code = errno.EACCES if isinstance(error, PermissionError) else None
        code = errno.ENOENT if isinstance(error, FileNotFoundError) else code
    return _ADVICE.get(code or 0, "see the store's own documentation for this error")


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter: thousands of nodes must not retry at the same moment.

    The k-th wait is uniform in [d/2, d), d = min(first_seconds * 2**k, most_seconds).
    """

    tries: int = 6
    first_seconds: float = 0.5
    most_seconds: float = 30.0

    def wait_seconds(self, failures: int, uniform: float) -> float:
        """Seconds to wait after `failures` failures; `uniform` is in [0, 1)."""
        longest = min(self.first_seconds * 2.0 ** (failures - 1), self.most_seconds)
        return longest * (0.5 + uniform / 2)


class RetryingBackend:
    """A backend that retries transient failures, and gives advice for the others.

    Raises PersistentError, and FileNotFoundError or FileExistsError if they answer the call. Every
    operation of a backend may be repeated: a put starts from the beginning and is atomic, a range
    is written again. An exclusive put may find the file of its own earlier attempt; the caller
    recognizes it by the content. `sleep` may raise, to give up (see `pacer.FlushPacer.sleep`).
    """

    def __init__(
        self,
        inner: Backend,
        policy: RetryPolicy,
        sleep: Callable[[float], None],
        uniform: Callable[[], float] = _chance.random,
        on_retry: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.inner = inner
        self.url, self.shared_writes = inner.url, inner.shared_writes
        self.in_parts = inner.in_parts
        self.policy, self.sleep = policy, sleep
        self._uniform, self._on_retry = uniform, on_retry

    def create(self) -> None:
        """See `Backend`."""
        self._call("", self.inner.create)

    def put(self, name: str, content: Content, nbytes: int, exclusive: bool = False) -> None:
        """See `Backend`."""
        answers = (FileExistsError,) if exclusive else ()
        self._call(name, lambda: self.inner.put(name, content, nbytes, exclusive), answers)

    def write_at(self, name: str, offset: int, content: Content) -> None:
        """See `Backend`."""
        self._call(name, lambda: self.inner.write_at(name, offset, content))

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Backend`."""
        read = self.inner.read
        return self._call(name, lambda: read(name, offset, nbytes), (FileNotFoundError,))

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """See `Backend`."""
        read = self.inner.read_into
        return self._call(name, lambda: read(name, offset, into), (FileNotFoundError,))

    def size(self, name: str) -> int:
        """See `Backend`."""
        return self._call(name, lambda: self.inner.size(name), (FileNotFoundError,))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """See `Backend`."""
        return self._call(folder, lambda: self.inner.sizes(folder))

    def delete(self, *names: str) -> None:
        """See `Backend`."""
        self._call(", ".join(names), lambda: self.inner.delete(*names))

    def delete_folder(self, folder: str) -> None:
        """See `Backend`."""
        self._call(folder, lambda: self.inner.delete_folder(folder))

    def discard(self, name: str) -> None:
        """See `Backend`."""
        self._call(name, lambda: self.inner.discard(name))

    def close(self) -> None:
        """See `Backend`."""
        self.inner.close()

    def _call(
        self, name: str, work: Callable[[], Result], answers: tuple[type[OSError], ...] = ()
    ) -> Result:
        url = f"{self.url}/{name}".rstrip("/")
        failures = 0
        while True:
            try:
                return work()
            except answers:
                raise
            except Exception as error:
                if not _of_the_store(error):
                    raise
                failures += 1
                text = in_words(error)
                if not is_transient(error):
                    raise PersistentError(f"{url}: {text}; {advice(error)}", url, False) from error
                if failures >= self.policy.tries:
                    raise PersistentError(
                        f"{url}: {text}; given up after {failures} tries",
                        url,
                        True,
                    ) from error
                wait = self.policy.wait_seconds(failures, self._uniform())
                self._on_retry(f"{url}: {text}; try {failures + 1} in {wait:.1f} s")
            self.sleep(wait)


def _of_the_store(error: Exception) -> bool:
    """True for errors of storage and its clients; other errors and bugs are not retried."""
    if isinstance(error, OSError):
        return not isinstance(error, PersistentError)
    return http_status(error) is not None or type(error).__module__.split(".")[0] in (
        "aiohttp",
        "fsspec",
    )
