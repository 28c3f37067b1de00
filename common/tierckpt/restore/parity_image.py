"""Parity that a restart reads, wherever it lies: on this node's disk, or behind another's agent."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from tierckpt.format.ids import ParityKey
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.peer.parity_file import ParityManifest
from tierckpt.peer.read_client import RemoteFile, RemoteNode
from tierckpt.storage.files.mapped_file import MappedFile
from tierckpt.storage.inventory import FAR, Place
from tierckpt.storage.local.store import LocalStore

from .shard_image import OpenStore


class ParityFile(Protocol):
    """The bytes, in `view` once `bring` has returned for them; see `MappedFile`."""

    view: memoryview

    def ask(self, low: int = 0, high: int | None = None) -> None: ...

    def bring(self, low: int, high: int) -> None: ...

    def close(self) -> None: ...


def open_parity(
    key: ParityKey, place: Place, open_store: OpenStore
) -> tuple[ParityManifest, ParityFile]:
    """Nothing is checked but that the manifest is one. Raises what is in `images.LOST`."""
    if place.level not in FAR:
        store = LocalStore(place.where)
        record = ParityManifest.decode(store.read_manifest(key))
        return record, MappedFile(store.open_image(key))
    node = open_store(place)
    try:
        if not isinstance(node, RemoteNode):
            raise FileNotFoundError(f"{key} is not here any more: {place.where} has no parity")
        file = node.open_parity(key)
        record = ParityManifest.decode(file.manifest)
        return record, _Fetched(file, record.image_bytes, node.close)
    except BaseException:
        node.close()
        raise


class _Fetched:
    """Room in memory, that is filled block by block; each is fetched once. Any thread."""

    def __init__(self, file: RemoteFile, nbytes: int, then: Callable[[], None]) -> None:
        self._room = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._room)[:nbytes]
        self._file, self._then = file, then
        self._lock = threading.Lock()
        self._there: set[int] = set()
        """Blocks."""

    def ask(self, low: int = 0, high: int | None = None) -> None:
        """Nothing: what is fetched has one way to come."""

    def bring(self, low: int, high: int) -> None:
        """Fetch what is not there. Raises OSError, and EOFError."""
        with self._lock:
            for block in range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES)):
                if block not in self._there:
                    begin = block * BLOCK_BYTES
                    part = self.view[begin : begin + BLOCK_BYTES]
                    self._file.read_into(begin, part)
                    self._there.add(block)

    def close(self) -> None:
        self._then()
        with suppress(BufferError):  # somebody still has a part of it: freed with that
            self.view.release()
            self._room.close()
