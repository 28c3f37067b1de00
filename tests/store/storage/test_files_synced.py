"""Files survive a loss of power: no file gets its name before its bytes are durable."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import persistent_shards
from tests.support.persistent_shards import name_of
from tierckpt.format import GROUP, MANIFEST
from tierckpt.storage import LocalStore
from tierckpt.storage.persistent import PosixBackend
from tierckpt.testing import commit_one, content_of, key_of, manifest_of

Renames = list[tuple[str, list[str]]]


class Device:
    """Records the syncs and, whenever a file gets its name, the bytes that are not yet durable."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.named: Renames = []
        """The names in order, each with the files that were not durable then."""
        self._synced: set[int] = set()

        def watch(name: str, then: Callable[..., None]) -> None:
            plain = getattr(os, name)

            def watched(*args: Any, **options: Any) -> Any:
                done = plain(*args, **options)
                then(*args)
                return done

            monkeypatch.setattr(os, name, watched)

        for name in ("fsync", "fdatasync"):
            watch(name, lambda fd: self._synced.add(os.fstat(fd).st_ino))
        for name in ("pwrite", "ftruncate"):
            watch(name, lambda fd, *_: self._synced.discard(os.fstat(fd).st_ino))
        for name in ("rename", "link"):
            watch(name, self._look)

    def _look(self, _: Any, name: Any) -> None:
        self._synced.discard(Path(name).parent.stat().st_ino)
        if not Path(name).name.startswith("."):  # otherwise it is a temporary name
            self.named.append((Path(name).name, self.behind()))

    def has_names(self) -> bool:
        """Whether the names in the folder survive a loss of power."""
        return self.folder.stat().st_ino in self._synced

    def behind(self) -> list[str]:
        """Files that a loss of power might remove."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return [path.name for path in files if path.stat().st_ino not in self._synced]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    folder = tmp_path / "place"
    folder.mkdir()
    return Device(folder, monkeypatch)


def names_of(version: int) -> Renames:
    """The names of a shard of the local level and of its manifest, in order."""
    stem = key_of(version).stem
    return [(f"{stem}{suffix}", []) for suffix in (key_of(version).SUFFIX, ".manifest")]


def test_so_is_one_that_another_process_wrote_in_place(device: Device) -> None:
    store, slot = LocalStore(device.folder), device.folder / ".slot"
    slot.write_bytes(content_of(key_of(1)))
    assert device.behind() == [".slot"]
    store.commit_file(key_of(1), slot, manifest_of(key_of(1)))
    assert device.named == names_of(1)


@pytest.mark.parametrize("make", [persistent_shards.shared, persistent_shards.own])
def test_a_persistent_version_exists_when_all_its_parts_are_durable(
    make: Callable[[Path], persistent_shards.Shards], device: Device
) -> None:
    commit_one(make(device.folder), key_of(1))
    assert all(behind == [] for _, behind in device.named)
    assert [name for name, _ in device.named if name.endswith(GROUP)]
    assert device.named[-1] == (name_of(key_of(1)).stem + MANIFEST, [])


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_written_in_place_is_durable_on_return(direct: bool, device: Device) -> None:
    backend = PosixBackend(str(device.folder), direct=direct)
    for offset in (0, 3):
        backend.write_at("shards", offset, lambda: iter([memoryview(b"content")]))
        assert device.behind() == []
        assert device.has_names()


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_file_is_durable_before_it_has_its_name(exclusive: bool, device: Device) -> None:
    backend = PosixBackend(str(device.folder))
    backend.put("lease", lambda: iter([memoryview(b"content")]), 7, exclusive)
    assert device.named == [("lease", [])]
    assert device.has_names()
