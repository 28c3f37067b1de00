"""Ranged reads of one stored shard."""

from __future__ import annotations

from tierckpt.format.version_records import ShardRecord

from . import shard_parts
from .backend import Backend
from .shard_groups import check_stored


class ShardReader:
    """Bytes of one stored shard. Threads may read at once.

    Reads are unchecked: the shard's own manifest has a checksum for every block, and the user of a
    range compares those. `verify` checks all stored bytes.
    """

    def __init__(self, backend: Backend, path: str, record: ShardRecord) -> None:
        self._backend, self._path, self._record = backend, path, record

    @property
    def manifest(self) -> bytes:
        """The shard's own manifest; its only check is that of the record that contains it."""
        return self._record.manifest

    @property
    def nbytes(self) -> int:
        """Length of the shard."""
        return self._record.nbytes

    @property
    def where(self) -> str:
        """Location, for messages."""
        first = self._record.offset
        return f"{self._backend.url}/{self._path}, bytes {first} to {first + self.nbytes}"

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Read a range of the shard. Raises EOFError if the file has become shorter."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        begin = self._begin_of(offset, nbytes)
        data = shard_parts.read(self._backend, self._path, begin, nbytes)
        self._see_that_all_came(len(data), nbytes)
        return data

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` of the shard; otherwise as `read`."""
        begin = self._begin_of(offset, len(into))
        came = shard_parts.read_into(self._backend, self._path, begin, into)
        self._see_that_all_came(came, len(into))

    def _begin_of(self, offset: int, nbytes: int) -> int:
        """Offset in the file."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of {self.nbytes}")
        return self._record.offset + offset

    def _see_that_all_came(self, came_bytes: int, nbytes: int) -> None:
        if came_bytes != nbytes:
            raise EOFError(f"truncated: {self.where} has {came_bytes} of {nbytes} bytes")

    def verify(self) -> None:
        """Check every byte against the checksum that was taken when it was written.

        Raises CorruptShardError.
        """
        r = self._record
        check_stored(self._backend, self._path, r.offset, r.nbytes, r.digest)
