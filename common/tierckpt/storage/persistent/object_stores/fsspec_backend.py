"""Backend for URLs of fsspec: all that have no backend of their own.

A file appears when its upload is complete, so `put` needs neither a temporary name nor a rename.
Only this module imports fsspec.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from tierckpt import _faults
from tierckpt.errors import ConfigError
from tierckpt.storage.persistent.backend import WINDOW_BYTES, Content

from .client_errors import http_status

MOST_PARTS = 9_000
"""S3 accepts 10,000 parts for an upload; larger objects get larger parts."""


class FsspecBackend:
    """Backend on fsspec, see `backend.Backend`. One per writing thread; threads may read at once.

    Memory: two windows, which fsspec copies into its buffer. Uploads are sent one part at a time.
    """

    shared_writes = in_parts = False

    def __init__(self, url: str, **storage_options: Any) -> None:
        self.url = url.rstrip("/")
        options = {"use_listings_cache": False, "skip_instance_cache": True, **storage_options}
        try:
            fsspec = importlib.import_module("fsspec")
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            raise ConfigError(
                f"the persistent path {url} needs a package that is not installed ({error}); "
                "fsspec's documentation names the one for each kind of URL"
            ) from error
        except (TypeError, ValueError) as error:  # for unknown protocols and options
            raise ConfigError(f"the persistent path {url} cannot be opened: {error}") from error

    def create(self) -> None:
        """Does nothing: prefixes need no creation, and creating buckets is the user's decision."""

    def close(self) -> None:
        """Does nothing: fsspec closes the connections."""

    # --- writing -------------------------------------------------------------------------------

    def put(self, name: str, content: Content, nbytes: int, exclusive: bool = False) -> None:
        """See `Backend.put`. Content that fits into a window is one request, longer content a
        multipart upload.

        `exclusive` uses a conditional request if the store supports it. Some stores ignore the
        condition; for those, only the check before the request helps.
        """
        if nbytes <= WINDOW_BYTES:
            self._put_small(name, content, exclusive)
        else:
            self._upload(name, content, nbytes)

    def _put_small(self, name: str, content: Content, exclusive: bool) -> None:
        data = bytearray()
        for window in content():  # not joined: each is valid until the next
            data += window
        _faults.point("file", op="put", target=name)
        if not exclusive:
            self._fs.pipe_file(self._path(name), bytes(data))
            return
        self._fs.invalidate_cache()
        if self._fs.exists(self._path(name)):
            raise FileExistsError(f"{self.url}/{name} exists")
        try:
            self._fs.pipe_file(self._path(name), bytes(data), mode="create")
        except OSError as error:
            if isinstance(error, FileExistsError) or http_status(error) in (409, 412):
                raise FileExistsError(f"{self.url}/{name} exists") from error
            raise

    def _upload(self, name: str, content: Content, nbytes: int) -> None:
        part_bytes = max(WINDOW_BYTES, nbytes // MOST_PARTS)
        _faults.point("file", op="open", target=name)
        file = self._fs.open(self._path(name), "wb", block_size=part_bytes, autocommit=False)
        try:
            for window in content():
                _faults.point("file", op="write", offset=file.tell())
                file.write(window)
            _faults.point("file", op="close")
            file.close()
            _faults.point("file", op="complete")
            file.commit()
        except BaseException:
            # Never only `close`: some file systems would complete the upload as it is.
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(AttributeError):  # a buffer of fsspec's own cannot be marked
                file.closed = True
            raise

    def write_at(self, name: str, offset: int, content: Content) -> None:
        """Raises NotImplementedError: objects cannot be written in part."""
        raise NotImplementedError(f"{self.url}: objects are written whole")

    # --- reading -------------------------------------------------------------------------------

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Backend.read`."""
        if nbytes == 0:  # HTTP has no such range
            return b""
        end = None if nbytes is None else offset + nbytes
        data: bytes = self._fs.cat_file(self._path(name), start=offset or None, end=end)
        return data

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """See `Backend.read_into`. Copies: clients cannot read into a buffer."""
        data = self.read(name, offset, len(into))
        into[: len(data)] = data
        return len(data)

    def size(self, name: str) -> int:
        """See `Backend.size`."""
        self._fs.invalidate_cache()
        return int(self._fs.size(self._path(name)))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """See `Backend.sizes`."""
        self._fs.invalidate_cache()
        top = self._path(folder)
        try:
            entries = self._fs.ls(top, detail=True)
        except FileNotFoundError:
            return {}
        found = {}
        for entry in entries:
            path = str(entry["name"]).rstrip("/")
            name = path.rsplit("/", 1)[-1]
            if path == top or name.startswith("."):
                continue
            is_folder = entry["type"] == "directory"
            found[f"{name}/" if is_folder else name] = 0 if is_folder else int(entry["size"])
        return found

    # --- removing ------------------------------------------------------------------------------

    def delete(self, *names: str) -> None:
        """See `Backend.delete`."""
        for name in names:
            _faults.point("file", op="delete", target=name)
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    def delete_folder(self, folder: str) -> None:
        """See `Backend.delete_folder`. One request removes many objects, if the store supports
        it."""
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            paths = self._fs.find(self._path(folder))
            if paths:
                _faults.point("file", op="delete", target=folder)
                self._fs.rm(paths)

    def discard(self, name: str) -> None:
        """Does nothing: stores expire unfinished uploads by themselves."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")
