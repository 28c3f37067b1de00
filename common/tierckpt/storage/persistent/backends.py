"""Selection of the backend for an address; packages add backends by entry points."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tierckpt._text import directory_of, is_url
from tierckpt.errors import ConfigError
from tierckpt.storage.files import answers

from . import object_stores
from .backend import Backend

GROUP = "tierckpt.backends"
"""Name of the group of entry points."""


def open_backend(path: str | os.PathLike[str], **storage_options: Any) -> Backend:
    """The backend of a directory, of a URL with its own entry point, or of a client's URL.

    An entry point of the group `tierckpt.backends`, named as the URL's scheme, is called with the
    URL and `storage_options`; else the options go to the client (keys, endpoint): obstore for the
    URLs of object stores, fsspec for all others. Raises ConfigError if a package that is needed for
    this kind of URL is not installed, or the entry point fails; `answers.NoAnswerError` for a
    place that is known to hang.
    """
    place = os.fspath(path) if is_url(path) else directory_of(path)
    if answers.is_silent(place):
        raise answers.NoAnswerError(place)
    if is_url(path):
        make_backend = _entry_point(os.fspath(path))
        if make_backend is not None:
            return make_backend(os.fspath(path), **storage_options)
        return _of_url(os.fspath(path), **storage_options)
    from .posix_backend import PosixBackend

    try:
        return PosixBackend(directory_of(path), **storage_options)
    except TypeError:
        names = ", ".join(sorted(storage_options))
        raise ConfigError(
            f"{path} is a directory: its storage options are direct and shared_writes, not {names}"
        ) from None


def _of_url(url: str, **storage_options: Any) -> Backend:
    if url.partition("://")[0] in object_stores.SCHEMES:
        from .object_stores.obstore_backend import ObstoreBackend

        return ObstoreBackend(url, **storage_options)
    from .object_stores.fsspec_backend import FsspecBackend

    return FsspecBackend(url, **storage_options)


def _entry_point(url: str) -> Callable[..., Backend] | None:
    from importlib.metadata import entry_points  # slow to import

    scheme = url.partition("://")[0]
    for point in entry_points(group=GROUP, name=scheme):
        try:
            return point.load()  # type: ignore[no-any-return]
        except Exception as error:  # any error of another package's import
            raise ConfigError(
                f"{url}: the backend for {scheme}:// ({point.value}) cannot be loaded: {error}"
            ) from error
    return None


__all__ = ["GROUP", "open_backend"]
