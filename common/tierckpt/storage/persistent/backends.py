"""Backends: which one serves an address; others come by entry points."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tierckpt._text import directory_of, is_url
from tierckpt.errors import ConfigError

from .backend import Backend

GROUP = "tierckpt.backends"
"""Of entry points."""


def open_backend(path: str | os.PathLike[str], **storage_options: Any) -> Backend:
    """The backend of a directory, of a URL of somebody's own, or of any that fsspec knows.

    An entry point of the group `tierckpt.backends`, named as the URL's scheme, is called with the
    URL and `storage_options`; else these go to fsspec (keys, endpoint). Raises ConfigError when
    fsspec, or what it needs for this kind of URL, is not installed, or the entry point is broken.
    """
    if is_url(path):
        theirs = _entry_point(os.fspath(path))
        if theirs is not None:
            return theirs(os.fspath(path), **storage_options)
        from .fsspec_backend import ObjectBackend

        return ObjectBackend(os.fspath(path), **storage_options)
    from .posix_backend import PosixBackend

    try:
        return PosixBackend(directory_of(path), **storage_options)
    except TypeError:
        names = ", ".join(sorted(storage_options))
        raise ConfigError(
            f"{path} is a directory, whose storage options are direct and shared_writes; given "
            f"are: {names}"
        ) from None


def _entry_point(url: str) -> Callable[..., Backend] | None:
    from importlib.metadata import entry_points  # which is slow to import

    scheme = url.partition("://")[0]
    for point in entry_points(group=GROUP, name=scheme):
        try:
            return point.load()  # type: ignore[no-any-return]
        except Exception as error:  # whatever somebody else's package does when it is imported
            raise ConfigError(
                f"{url}: the backend for {scheme}:// ({point.value}) cannot be loaded: {error}"
            ) from error
    return None


__all__ = ["GROUP", "open_backend"]
