"""Backend for object stores and all other URLs of fsspec.

An object appears when its upload is complete, so `put` needs neither a temporary name nor a rename.
Only this module imports fsspec (`pip install 'tierckpt[s3]'` installs it, with its part for S3).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import socket
from collections.abc import Iterator
from typing import Any

from tierckpt import _faults
from tierckpt.errors import ConfigError

from .backend import WINDOW_BYTES, Content

MOST_PARTS = 9_000
"""S3 accepts 10,000 parts for an upload; larger objects get larger parts."""
STALL_SECONDS = 30.0
"""Limit for the time that data sent to S3 may stay unacknowledged. The client's own time-outs do
not cover sending, and the kernel would retry for a quarter of an hour."""
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Kinds of stores in which a prefix need not exist, but its bucket must."""


class ObjectBackend:
    """Backend on fsspec, see `backend.Backend`. One per writing thread; threads may read at once.

    Memory: two windows, which fsspec copies into its buffer. Uploads are sent one part at a time.
    """

    shared_writes = False

    def __init__(self, url: str, **storage_options: Any) -> None:
        self.url = url.rstrip("/")
        options = {"use_listings_cache": False, "skip_instance_cache": True, **storage_options}
        if self.url.startswith(("s3:", "s3a:")):
            chosen = storage_options.get("config_kwargs", {})
            options["config_kwargs"] = {**_client_config(), **chosen}
        try:
            fsspec = importlib.import_module("fsspec")
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            raise ConfigError(
                f"the persistent path {url} needs a package that is not installed ({error}); for "
                "s3:// run: pip install 'tierckpt[s3]'"
            ) from error
        except (TypeError, ValueError) as error:  # for unknown protocols and options
            raise ConfigError(f"the persistent path {url} cannot be opened: {error}") from error
        self._s3 = "s3" in _protocols(self._fs)
        self._bucket_seen = BUCKETS.isdisjoint(_protocols(self._fs))
        """True if the bucket was seen, or this store has no buckets."""

    def create(self) -> None:
        """Does nothing: prefixes need no creation, and creating buckets is the user's decision."""

    def close(self) -> None:
        """Close the connections, if the file system supports it."""
        client = getattr(self._fs, "_s3", None)
        if self._s3 and client is not None:
            self._fs.close_session(self._fs.loop, client)

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
        """See `Backend.sizes`. Raises FileNotFoundError if the bucket does not exist: its name may
        be wrong, or it may belong to another account, whose contents cannot be seen."""
        self._fs.invalidate_cache()
        top = self._path(folder)
        try:
            entries = self._fs.ls(top, detail=True)
        except FileNotFoundError as error:
            self._check_bucket(error)
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

    def _check_bucket(self, error: FileNotFoundError) -> None:
        """Raise FileNotFoundError if the bucket is missing, and not only the prefix. Other errors
        of an existing bucket are left to the caller that meets them."""
        if error_code(error) != "NoSuchBucket":
            if self._bucket_seen:
                return
            try:
                self._look_for_bucket()
            except FileNotFoundError as gone:
                error = gone
            except PermissionError:  # the bucket exists: its contents were to be listed
                return
            else:
                self._bucket_seen = True
                return
        why = f"there is no bucket {self._bucket!r}, or it is another account's"
        raise FileNotFoundError(errno.ENOENT, why) from error

    def _look_for_bucket(self) -> None:
        if self._s3:
            self._fs.call_s3("head_bucket", Bucket=self._bucket)
        else:
            self._fs.ls(self._bucket, detail=False)

    @property
    def _bucket(self) -> str:
        if self._s3:
            return str(self._fs.split_path(self._root)[0])
        return str(self._root).lstrip("/").partition("/")[0]

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
        _faults.point("file", op="abort", target=folder)
        self._abort_uploads(folder, exact=False)
        with contextlib.suppress(FileNotFoundError):
            paths = self._fs.find(self._path(folder))
            if paths:
                _faults.point("file", op="delete", target=folder)
                self._fs.rm(paths)

    def discard(self, name: str) -> None:
        """See `Backend.discard`: aborts multipart uploads to exactly this name, which has one
        writer.

        Stores other than S3 expire unfinished uploads by themselves.
        """
        if name and not name.endswith("/"):  # writers of other uploads may be alive
            _faults.point("file", op="abort", target=name)
            self._abort_uploads(name, exact=True)

    def _abort_uploads(self, name: str, exact: bool) -> None:
        if not self._s3:
            return
        bucket, prefix, _ = self._fs.split_path(self._path(name))
        prefix = prefix if exact else f"{prefix}/"
        marker: dict[str, str] = {}
        while True:
            try:
                page = self._fs.call_s3(
                    "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marker
                )
            except FileNotFoundError:  # some servers report "no uploads" by this error
                return
            for upload in page.get("Uploads") or ():
                key = str(upload["Key"])
                if key == prefix or (not exact and key.startswith(prefix)):
                    self._fs.abort_mpu(bucket, key, upload["UploadId"])
            if not page.get("IsTruncated"):
                return
            marker = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


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
    """The S3 server's error code, such as `NoSuchBucket`; empty if there is none."""
    for each in _chain(error):
        response = getattr(each, "response", None)
        if isinstance(response, dict) and (code := response.get("Error", {}).get("Code")):
            return str(code)
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _protocols(fs: Any) -> tuple[str, ...]:
    found = fs.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def _client_config() -> dict[str, Any]:
    """Options of S3's client that differ from its defaults."""
    # This package compares its own checksums; and some servers answer a range with the checksum of
    # the whole object, which the client would then take for damage.
    config = {"response_checksum_validation": "when_required"}
    impatience = {"connector_args": {"socket_factory": _impatient}}
    try:
        importlib.import_module("aiobotocore.config").AioConfig(**impatience)
    except Exception:  # an older version; or none, reported when it is used
        return config
    return {**config, **impatience}


def _impatient(where: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(*where[:3])
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * STALL_SECONDS))
    return made
