"""Folders survive a loss of power: the syncs and their order."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierckpt.storage import REFUSALS, LocalStore, Need, check_directory, make
from tierckpt.storage.persistent import PosixBackend

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The operations on folders, in order, with the folders' last names."""
    found: Calls = []

    def record(what: str, name: str, path_of: Callable[[Any], str]) -> None:
        plain = getattr(os, name)

        def recorded(target: Any, *args: Any, **options: Any) -> Any:
            done = plain(target, *args, **options)
            if os.path.isdir(path := path_of(target)):
                found.append((what, os.path.basename(path)))
            return done

        monkeypatch.setattr(os, name, recorded)

    record("made", "mkdir", os.fspath)
    record("synced", "fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    return found


MADE: Calls = [("made", "a"), ("synced", "root"), ("made", "b"), ("synced", "a")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


def test_an_existing_folder_is_synced_for_a_creator_that_did_not_finish(
    root: Path, calls: Calls
) -> None:
    make(root)
    assert calls == [("synced", root.parent.name)]


def test_the_local_level_makes_its_folder_durable_and_looks_no_more(
    root: Path, calls: Calls
) -> None:
    store = LocalStore(root / "a" / "b")
    for _ in range(3):  # before every commit
        store.create()
    assert calls == MADE
    store.directory.rmdir()
    store.create()
    assert calls == [*MADE, *MADE[2:]]


def test_the_persistent_level_makes_its_own_folder_durable_and_no_other(
    root: Path, calls: Calls
) -> None:
    PosixBackend(str(root / "a")).create()
    assert calls == MADE[:2]
    with pytest.raises(FileNotFoundError, match="is it mounted"):
        PosixBackend(str(root / "not mounted" / "a")).create()
    assert calls == MADE[:2]


def test_so_does_the_check_of_a_nodes_health_that_comes_before(root: Path, calls: Calls) -> None:
    """It would give the level an existing folder, not its own."""
    assert check_directory(Need(str(root / "a" / "b"), make=True)) == ""
    assert calls == MADE


@pytest.mark.parametrize("code", sorted(REFUSALS), ids=errno.errorcode.__getitem__)
def test_a_file_system_that_syncs_no_folders_is_used_nevertheless(
    code: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    make(root / "a" / "b")
    assert (root / "a" / "b").is_dir()


def test_a_device_that_fails_is_no_refusal(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        make(root / "a" / "b")
    assert not (root / "a" / "b").exists()
