"""Suite for every backend of the persistent level (`tierckpt.storage.persistent.backend`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tierckpt.storage.persistent.backend import WINDOW_BYTES, Backend, Content


def windows(data: bytes, size: int = WINDOW_BYTES) -> Content:
    """`data` as content of a put: new windows for every attempt."""

    def content() -> Iterator[memoryview]:
        for offset in range(0, len(data), size):
            yield memoryview(data)[offset : offset + size]

    return content


def put(backend: Backend, name: str, data: bytes, **options: Any) -> None:
    """Call `Backend.put` with plain bytes."""
    backend.put(name, windows(data), len(data), **options)


class BackendConformance:
    """Subclass it with a fixture `backend`: an empty one. Set missing capabilities to False."""

    exclusive_is_atomic = True
    """Of several exclusive puts at once exactly one succeeds. False: two jobs that begin within
    about a second are not kept apart (see `storage.persistent.lease`)."""

    def test_a_file_is_read_back_whole_and_in_ranges(self, backend: Backend) -> None:
        """Reads past the end are short."""
        put(backend, "a/b/c", bytes(range(256)))
        assert backend.read("a/b/c") == bytes(range(256))
        assert backend.read("a/b/c", 10, 5) == bytes(range(10, 15))
        assert backend.read("a/b/c", 250, 100) == bytes(range(250, 256))
        assert backend.size("a/b/c") == 256

    def test_a_range_comes_into_memory_that_is_there(self, backend: Backend) -> None:
        """Up to the end of the file; the rest of the memory stays as it was."""
        put(backend, "file", bytes(range(256)))
        into = bytearray(b"-" * 20)
        window = memoryview(into)[5:15]
        assert backend.read_into("file", 10, window) == 10
        assert into == b"-" * 5 + bytes(range(10, 20)) + b"-" * 5
        assert backend.read_into("file", 253, window) == 3
        assert into[5:8] == bytes(range(253, 256))
        assert into[:5] == into[15:] == b"-" * 5
        assert backend.read_into("file", 0, window[:0]) == 0

    def test_content_of_many_windows_and_a_bit_is_whole(self, backend: Backend) -> None:
        """Windows are not mixed up."""
        data = b"".join(bytes([i]) * WINDOW_BYTES for i in range(3)) + b"end"
        put(backend, "large", data)
        assert backend.size("large") == len(data)
        assert backend.read("large") == data

    def test_the_number_of_bytes_announced_need_not_be_right(self, backend: Backend) -> None:
        """It is an estimate; too small or too large."""
        for announced in (1, 100, 3 * WINDOW_BYTES):
            backend.put("about", windows(b"x" * 1000, 100), announced)
            assert backend.read("about") == b"x" * 1000

    def test_an_empty_file_is_a_file(self, backend: Backend) -> None:
        """Marks have no content."""
        put(backend, "mark", b"")
        assert backend.sizes() == {"mark": 0}
        assert backend.read("mark") == b""

    def test_a_later_put_replaces_the_earlier(self, backend: Backend) -> None:
        """With longer, then shorter content."""
        for data in (b"one", b"the second", b"3"):
            put(backend, "name", data)
            assert backend.read("name") == data

    def test_a_put_that_fails_in_the_middle_leaves_the_old_file(self, backend: Backend) -> None:
        """With small and large content, over an existing file and without one."""

        def broken() -> Iterator[memoryview]:
            yield memoryview(bytes(WINDOW_BYTES))
            yield memoryview(bytes(WINDOW_BYTES))
            raise RuntimeError("the slot was refilled")

        put(backend, "old", b"old")
        for name in ("old", "new"):
            for announced in (100, 4 * WINDOW_BYTES):
                with pytest.raises(RuntimeError, match="refilled"):
                    backend.put(name, broken, announced)
        assert backend.sizes() == {"old": 3}
        assert backend.read("old") == b"old"

    def test_an_exclusive_put_does_not_replace(self, backend: Backend) -> None:
        """It creates a missing file."""
        put(backend, "lease", b"first", exclusive=True)
        with pytest.raises(FileExistsError):
            put(backend, "lease", b"second", exclusive=True)
        assert backend.read("lease") == b"first"
        backend.delete("lease")
        put(backend, "lease", b"third", exclusive=True)
        assert backend.read("lease") == b"third"

    def test_of_exclusive_puts_at_once_one_succeeds(self, backend: Backend) -> None:
        """From several threads, in several turns."""
        if not self.exclusive_is_atomic:
            pytest.skip("several exclusive puts at once may succeed here")
        together = threading.Barrier(4)

        def wins(name: str, number: int) -> bool:
            together.wait()
            with contextlib.suppress(FileExistsError):
                put(backend, name, bytes([number]), exclusive=True)
                return True
            return False

        with ThreadPoolExecutor(together.parties) as pool:
            for turn in range(5):
                won = [
                    *pool.map(wins, [f"lease{turn}"] * together.parties, range(together.parties))
                ]
                assert won.count(True) == 1
                assert backend.read(f"lease{turn}") == bytes([won.index(True)])

    def test_folders_list_their_direct_entries(self, backend: Backend) -> None:
        """Files with their sizes, folders with a slash; nothing for a missing folder."""
        for name in ("top", "v1/a", "v1/b", "v1/deep/c", "v10/a"):
            put(backend, name, name.encode())
        assert backend.sizes() == {"top": 3, "v1/": 0, "v10/": 0}
        assert backend.sizes("v1") == {"a": 4, "b": 4, "deep/": 0}
        assert backend.sizes("nowhere") == {}

    def test_a_missing_one_is_reported(self, backend: Backend) -> None:
        """FileNotFoundError; deleting a missing file does nothing."""
        with pytest.raises(FileNotFoundError):
            backend.read("nothing")
        with pytest.raises(FileNotFoundError):
            backend.read_into("nothing", 0, memoryview(bytearray(1)))
        with pytest.raises(FileNotFoundError):
            backend.size("nothing")
        backend.delete("nothing", "neither/here")
        backend.delete_folder("nothing")
        backend.discard("nothing")

    def test_deleting_removes_only_the_named_file(self, backend: Backend) -> None:
        """Names with the same beginning stay."""
        for name in ("v1/a", "v1/deep/b", "v10/a", "v1.manifest"):
            put(backend, name, b"x")
        backend.delete_folder("v1")
        assert backend.sizes() == {"v10/": 0, "v1.manifest": 1}
        backend.delete("v1.manifest", "v10/a")
        with pytest.raises(FileNotFoundError):
            backend.size("v10/a")

    def test_ranges_of_one_file_are_written_in_any_order(self, backend: Backend) -> None:
        """Only for a backend with `shared_writes`."""
        if not backend.shared_writes:
            with pytest.raises(NotImplementedError):
                backend.write_at("shared", 0, windows(b"x"))
            return
        backend.write_at("v1/shared", 4096, windows(b"second" * 1000, 4096))
        backend.write_at("v1/shared", 0, windows(b"first"))
        assert backend.read("v1/shared", 0, 5) == b"first"
        assert backend.read("v1/shared", 4096, 6000) == b"second" * 1000
        assert backend.size("v1/shared") == 4096 + 6000
