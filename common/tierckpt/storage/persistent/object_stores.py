"""Backends for URLs: object stores through obstore (Amazon S3 and servers like it, Google Cloud
Storage, Azure Blob), and all others through fsspec.

Only this module imports the two clients, obstore (`pip install 'tierckpt[s3]'`) and fsspec, and
only when a backend is made. An object or file appears when all of it has arrived, so `put` needs
neither a temporary name nor a rename.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from tierckpt import _faults
from tierckpt.errors import ConfigError
from tierckpt.storage.persistent.backend import WINDOW_BYTES, Content

from .backend import StoreError, error_of_text, http_status

__all__ = ["ObstoreBackend"]


SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl"})
"""URLs of the stores that `ObstoreBackend` serves."""


REQUEST_SECONDS = 120.0
"""Limit for a request, with its body: a connection that moves nothing must end some time, and a
part must pass over a slow link that all parts share."""
RETRIES = 3
"""Retries of one request by the client, at once and without a notice. `retry` does the others."""
RETRY_SECONDS = 20.0
"""The client does not repeat a request that started longer ago: one that took REQUEST_SECONDS."""
S3_OPTIONS = {"checksum_algorithm": "crc64nvme", "unsigned_payload": True}
"""Servers compare this checksum with what arrived. The alternative, a signature over the SHA-256 of
all bytes, takes four fifths of the CPU time of an upload."""
STREAM_BYTES = 1 << 20
"""Least size of the pieces in which an answer comes."""


class ObstoreBackend:
    """Backend on obstore, see `backend.Backend`. Any thread.

    Each `put` is one request: nothing of it remains if the writer dies. Bytes are sent from their
    place, without a copy.
    """

    shared_writes, in_parts = False, True

    def __init__(self, url: str, **storage_options: Any) -> None:
        self.url = url.rstrip("/")
        try:
            self._client: Any = importlib.import_module("obstore")
            stores = importlib.import_module("obstore.store")
            self._errors = importlib.import_module("obstore.exceptions")
        except ImportError as error:
            raise ConfigError(
                f"the persistent path {url} needs a package that is not installed ({error}); run: "
                "pip install 'tierckpt[s3]'"
            ) from error
        options = {**_defaults(storage_options), **storage_options}
        if self.url.startswith(("s3:", "s3a:")):
            options = {**S3_OPTIONS, **options}
        address = self.url.replace("gcs://", "gs://", 1)
        try:
            self._store = stores.from_url(address, **options)
        except (self._errors.BaseError, TypeError, ValueError) as error:
            text = " ".join(str(error).partition("\n\n")[0].split())
            raise ConfigError(f"the persistent path {url} cannot be opened: {text}") from None

    def create(self) -> None:
        """Does nothing: prefixes need no creation, and creating buckets is the user's decision."""

    def close(self) -> None:
        """Does nothing: connections that are not used end by themselves."""

    # --- writing -------------------------------------------------------------------------------

    def put(self, name: str, content: Content, nbytes: int, exclusive: bool = False) -> None:
        """See `Backend.put`. `exclusive` uses a conditional request. Some stores ignore the
        condition; for those, only the check before the request helps.
        """
        windows = list(content())
        mode = "create" if exclusive else "overwrite"
        try:
            _faults.point("file", op="put", target=name)
            if exclusive and self._exists(name):
                raise FileExistsError(errno.EEXIST, f"{self.url}/{name} exists")
            with self._translated(name):
                self._client.put(self._store, name, windows, mode=mode, use_multipart=False)
        except StoreError as error:
            if exclusive and error.status in (409, 412):
                raise FileExistsError(errno.EEXIST, f"{self.url}/{name} exists") from error
            raise
        finally:
            windows.clear()  # or a traceback would keep the memory in use

    def _exists(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def write_at(self, name: str, offset: int, content: Content) -> None:
        """Raises NotImplementedError: objects cannot be written in part."""
        raise NotImplementedError(f"{self.url}: objects are written whole")

    # --- reading -------------------------------------------------------------------------------

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Backend.read`."""
        if nbytes == 0:  # HTTP has no such range
            return b""
        with self._translated(name):
            return bytes(self._get(name, offset, nbytes).bytes())

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """See `Backend.read_into`."""
        if not len(into):
            return 0
        done = 0
        with self._translated(name):
            for piece in self._get(name, offset, len(into)).stream(min_chunk_size=STREAM_BYTES):
                into[done : done + len(piece)] = piece
                done += len(piece)
        return done

    def _get(self, name: str, offset: int, nbytes: int | None) -> Any:
        options: dict[str, Any] = {}
        if nbytes is not None:
            options["range"] = (offset, offset + nbytes)
        elif offset:
            options["range"] = {"offset": offset}
        return self._client.get(self._store, name, options=options)

    def size(self, name: str) -> int:
        """See `Backend.size`."""
        with self._translated(name):
            return int(self._client.head(self._store, name)["size"])

    def sizes(self, folder: str = "") -> dict[str, int]:
        """See `Backend.sizes`. Raises FileNotFoundError if the bucket does not exist: its name may
        be wrong, or it may belong to another account."""
        try:
            with self._translated(folder):
                found = self._client.list_with_delimiter(self._store, folder or None)
        except FileNotFoundError as error:
            why = f"there is no bucket {self._bucket!r}, or it is another account's"
            raise FileNotFoundError(errno.ENOENT, why) from error
        paths = {f"{path}/": 0 for path in found["common_prefixes"]}
        paths |= {entry["path"]: int(entry["size"]) for entry in found["objects"]}
        names = {_last(path): nbytes for path, nbytes in paths.items()}
        return {name: nbytes for name, nbytes in names.items() if not name.startswith(".")}

    @property
    def _bucket(self) -> str:
        return self.url.partition("://")[2].partition("/")[0]

    # --- removing ------------------------------------------------------------------------------

    def delete(self, *names: str) -> None:
        """See `Backend.delete`."""
        for name in names:
            _faults.point("file", op="delete", target=name)
            with contextlib.suppress(FileNotFoundError), self._translated(name):
                self._client.delete(self._store, name)

    def delete_folder(self, folder: str) -> None:
        """See `Backend.delete_folder`. One request removes many objects, if the store supports
        it."""
        with self._translated(folder):
            for page in self._client.list(self._store, f"{folder}/"):
                _faults.point("file", op="delete", target=folder)
                with contextlib.suppress(FileNotFoundError), self._translated(folder):
                    self._client.delete(self._store, [entry["path"] for entry in page])

    def discard(self, name: str) -> None:
        """Does nothing: a request that was not finished leaves nothing."""

    @contextlib.contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Raise the client's errors as OSError."""
        try:
            yield
        except StoreError:
            raise
        except (self._errors.BaseError, FileNotFoundError) as error:
            raise error_of_text(str(error), f"{self.url}/{name}".rstrip("/")) from None


def _last(path: str) -> str:
    """The last component, with the slash of a folder."""
    return path[path.rstrip("/").rfind("/") + 1 :]


def _defaults(chosen: dict[str, Any]) -> dict[str, Any]:
    """Options of the client that differ from its own defaults. Options for requests and retries
    are tables, taken out of `chosen`: what is there replaces single entries."""
    names = [name for name in chosen if name.endswith(("endpoint", "endpoint_url"))]
    environment = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    endpoint = str(chosen[names[0]]) if names else environment
    client = {"timeout": f"{REQUEST_SECONDS:g}s", "allow_http": endpoint.startswith("http://")}
    retry = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    return {
        "client_options": {**client, **chosen.pop("client_options", {})},
        "retry_config": {**retry, **chosen.pop("retry_config", {})},
    }


MAX_PARTS = 9_000
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
        part_bytes = max(WINDOW_BYTES, nbytes // MAX_PARTS)
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
