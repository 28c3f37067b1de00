"""Errors of object stores' clients: the server's status and error code, whichever client it was."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

_STATUS = re.compile(r"(?:status code: |status: )(\d{3})\b")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_OF_CREDENTIALS = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")
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


_KINDS = {401: RefusedError, 403: RefusedError, 404: MissingError}


def of_text(text: str, what: str) -> OSError:
    """The error that a client describes by `text` alone; `what` is the object, for messages.

    A failure without an answer of the server is a ConnectionError: it may pass.
    """
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    code = code_match[1] if (code_match := _CODE.search(text)) else ""
    if status is None and any(address in text for address in _OF_CREDENTIALS):
        return RefusedError(errno.EACCES, f"{what}: there are no credentials", 401)
    said = message[1] if (message := _MESSAGE.search(text)) else ""
    short = ": ".join(filter(None, (what, code, said))) if code else f"{what}: {_first_line(text)}"
    if status is not None:
        kind, number = _KINDS.get(status, StoreError), _NUMBERS.get(status, errno.EIO)
        return kind(number, f"HTTP status {status} for {short}", status, code)
    if "timed out" in text or "Timeout" in text:
        return TimeoutError(errno.ETIMEDOUT, short)
    if "Error performing" in text or "error sending request" in text or "HTTP error" in text:
        return ConnectionError(errno.ECONNABORTED, short)
    return OSError(errno.EINVAL, short)


_NUMBERS = {
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


__all__ = ["StoreError", "error_code", "http_status", "of_text"]
