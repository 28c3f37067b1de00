"""Storage backends: named bytes in folders; their failures, retries and rate limits. Backends know
nothing about checkpoints.

Names are paths with slashes, relative to the backend's root. Every backend guarantees:

- `put` is atomic: readers see the old content or the whole new one, also if the writer dies;
- when `put` or `write_at` returns, the bytes are durable;
- names with a dot first are work in progress and are never listed.

`testing.BackendConformance` checks this. Before each operation that changes something,
`faults.point("file", op=...)` is called, so that tests can fail or kill there.

Failures: which ones are transient and tried again, advice to the user for the others, and the
server's status and error code, whichever client an error comes from.

Rate limits of a node's flushes are checked before every window, and so is their cancellation.
Clocks are arguments, so that tests of waiting do not wait.
"""

from __future__ import annotations

import errno
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from msgspec import Struct

from tierckpt._text import error_text
from tierckpt.errors import FlushCancelledError, PersistentError

__all__ = ["StoreError", "error_code", "error_of_text", "http_status"]


Content = Callable[[], Iterator[memoryview]]
"""Yields the windows to write, in order; called again for every attempt. A window is at most
WINDOW_BYTES long, belongs to the caller, and its bytes do not change."""

WINDOW_BYTES = 8 << 20


class Backend(Protocol):
    """Interface of a backend; the module's docstring has its guarantees. Methods raise OSError, and
    FileNotFoundError for missing names."""

    url: str
    """Address for messages; contains no credentials."""
    shared_writes: bool
    """Several writers may write disjoint ranges of one file (`write_at`)."""
    in_parts: bool
    """Many files do no harm, and are written faster than one; `put` is called by several threads
    then. False if each `put` may be long."""

    def create(self) -> None:
        """Create the root if it can be created."""
        ...

    def put(self, name: str, content: Content, nbytes: int, exclusive: bool = False) -> None:
        """Write `content`, about `nbytes` long, as the whole file. With `exclusive`, raises
        FileExistsError if the file exists, and of several concurrent calls exactly one succeeds, if
        the store supports that."""
        ...

    def write_at(self, name: str, offset: int, content: Content) -> None:
        """Overwrite a range of a file, creating it if necessary; others may write other ranges."""
        ...

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A range; shorter where the file ends. Threads may read at once."""
        ...

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """Read a range into `into`; returns the number of bytes read. Threads may read at once."""
        ...

    def size(self, name: str) -> int:
        """Length of a file."""
        ...

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Length of every file directly in `folder`; folders are named `name/` and have length 0.
        Empty for a missing folder."""
        ...

    def delete(self, *names: str) -> None:
        """Remove files; missing ones are ignored."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Remove a folder, its contents, and all unfinished writes to it."""
        ...

    def discard(self, name: str) -> None:
        """Remove unfinished writes of `name` by dead writers, never those of living ones.

        `folder/`, or an empty name for the root, stands for all files in it, as far as their
        writers are known to be dead.
        """
        ...

    def close(self) -> None:
        """Close connections."""
        ...


class Clock(Protocol):
    """Time and sleep of one clock."""

    def now(self) -> float:
        """Unix time in seconds, to compare between machines."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...


class SystemClock:
    """The clock of this machine."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


_STATUS = re.compile(r"(?:status code: |status: )(\d{3})\b")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_CREDENTIAL_HOSTS = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")
"""Addresses that a client without keys asks for some."""


class StoreError(OSError):
    """An error of a client that has errors without attributes. `status` and `error_code` are the
    server's; None and empty if it gave no answer."""

    def __init__(self, number: int, text: str, status: int | None = None, code: str = "") -> None:
        super().__init__(number, text)
        self.status, self.error_code = status, code


class MissingError(StoreError, FileNotFoundError):
    """The server has no such object or bucket."""


class RefusedError(StoreError, PermissionError):
    """The server does not know the credentials, or they lack the right."""


_ERROR_KINDS = {401: RefusedError, 403: RefusedError, 404: MissingError}


def error_of_text(text: str, what: str) -> OSError:
    """The error that a client describes by `text` alone; `what` is the object, for messages.

    A failure without an answer of the server is a ConnectionError: it may pass.
    """
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    code = code_match[1] if (code_match := _CODE.search(text)) else ""
    if status is None and any(address in text for address in _CREDENTIAL_HOSTS):
        return RefusedError(errno.EACCES, f"{what}: there are no credentials", 401)
    said = message[1] if (message := _MESSAGE.search(text)) else ""
    short = ": ".join(filter(None, (what, code, said))) if code else f"{what}: {_first_line(text)}"
    if status is not None:
        kind, number = _ERROR_KINDS.get(status, StoreError), _ERRNOS.get(status, errno.EIO)
        return kind(number, f"HTTP status {status} for {short}", status, code)
    if "timed out" in text or "Timeout" in text:
        return TimeoutError(errno.ETIMEDOUT, short)
    if "Error performing" in text or "error sending request" in text or "HTTP error" in text:
        return ConnectionError(errno.ECONNABORTED, short)
    return OSError(errno.EINVAL, short)


_ERRNOS = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    409: errno.EEXIST,
    412: errno.EEXIST,
    507: errno.ENOSPC,
}


def _first_line(text: str) -> str:
    return " ".join(text.strip().partition("\n\n")[0].split())[:500]


def http_status(error: BaseException | None) -> int | None:
    """HTTP status of the server's answer, from anywhere in the chain of causes."""
    for each in _chain(error):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            found = getattr(each, "status", None) or getattr(each, "code", None)
        if isinstance(found, int):
            return found
    return None


def error_code(error: BaseException | None) -> str:
    """The server's error code, such as `NoSuchBucket`; empty if there is none."""
    for each in _chain(error):
        if isinstance(each, StoreError):
            return each.error_code
        response = getattr(each, "response", None)
        if isinstance(response, dict) and (code := response.get("Error", {}).get("Code")):
            return str(code)
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
_CREDENTIAL_CODES = {"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
"""Error codes of S3 servers for credentials, some with status 400."""
_LESS = "keep fewer versions (one more than persistent_keep says must fit)"
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
    status = 401 if error_code(error) in _CREDENTIAL_CODES else http_status(error)
    if status in _STATUS_ADVICE:
        return _STATUS_ADVICE[status]
    if type(error).__name__ == "NoCredentialsError":
        return _STATUS_ADVICE[401]
    code = error.errno if isinstance(error, OSError) else None
    if code is None:
        code = errno.EACCES if isinstance(error, PermissionError) else None
        code = errno.ENOENT if isinstance(error, FileNotFoundError) else code
    return _ADVICE.get(code or 0, "see the store's own documentation for this error")


class RetryPolicy(Struct, frozen=True):
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
    operation of a backend may be repeated: a put starts again and is atomic, a range is written
    again. An exclusive put may find the file of its own earlier attempt; the caller recognizes it
    by the content. `sleep` may raise, to give up (see `pacer.FlushPacer.sleep`).
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
                text = error_text(error)
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


NAP_SECONDS = 0.5
"""Longest single sleep: a flush that is given up ends within this time."""


class Throttle:
    """A token bucket over bytes: the node's share of the store's bandwidth.

    Bytes let through by any moment t are at most `burst_bytes` + `rate` * (t - start). One per
    node; threads may share it.
    """

    def __init__(self, bytes_per_second: float, burst_bytes: int, now: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a bandwidth of {bytes_per_second} bytes a second is not positive")
        self.rate, self.burst_bytes = bytes_per_second, burst_bytes
        self._tokens, self._at = float(burst_bytes), now
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, now: float) -> float:
        """Take `nbytes` from the bucket; returns the seconds to wait before they may be sent."""
        with self._lock:
            gained = max(0.0, now - self._at) * self.rate
            self._tokens = min(float(self.burst_bytes), self._tokens + gained) - nbytes
            self._at = max(self._at, now)
            return max(0.0, -self._tokens / self.rate)


class FlushPacer:
    """Called with the size of every window before it is sent; returns when it may be sent.

    Raises FlushCancelledError as soon as `cancelled()` is True. Calls `keep` while waiting, for
    regular work during a flush (`Lease.keep`). One per node.
    """

    def __init__(
        self,
        throttle: Throttle | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        keep: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self.throttle = throttle
        self.cancelled, self.keep = cancelled, keep
        self.clock: Clock = clock or SystemClock()

    def __call__(self, nbytes: int) -> None:
        """Wait for bandwidth."""
        self.sleep(0.0)
        if self.throttle:
            self.sleep(self.throttle.reserve(nbytes, self.clock.monotonic()))

    def sleep(self, seconds: float) -> None:
        """Sleep in short steps, with a check in each; also used between two attempts of a call."""
        end = self.clock.monotonic() + seconds
        while True:
            if self.cancelled():
                raise FlushCancelledError("the flush was given up")
            self.keep()
            left = end - self.clock.monotonic()
            if left <= 0:
                return
            self.clock.sleep(min(left, NAP_SECONDS))
