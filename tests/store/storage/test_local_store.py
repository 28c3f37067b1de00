"""The local level's store: the conformance suite of all stores, and its own tests."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import end, python
from tierckpt import _faults
from tierckpt.storage import LocalStore, durable
from tierckpt.testing import StoreConformance, commit_one, content_of, is_sound, key_of


class TestLocalStore(StoreConformance):
    factory = "tierckpt.storage.local:LocalStore"


def made(directory: Path) -> LocalStore:
    store = LocalStore(directory)
    store.create()
    return store


def test_a_retired_file_is_written_over_by_the_next_version(tmp_path: Path) -> None:
    store = made(tmp_path)
    commit_one(store, key_of(1), pages=5)
    inode = store._data(key_of(1)).stat().st_ino
    store.retire(key_of(1))
    commit_one(store, key_of(2), pages=2)
    assert store._data(key_of(2)).stat().st_ino == inode
    assert store._data(key_of(2)).read_bytes() == content_of(key_of(2), pages=2)


def test_one_retired_file_is_kept_and_a_restart_does_not_take_it_for_rubbish(
    tmp_path: Path,
) -> None:
    store = made(tmp_path)
    for version in (1, 2, 3):
        commit_one(store, key_of(version))
    for version in (1, 2):
        store.retire(key_of(version))
    names = [p.name for p in tmp_path.iterdir()]
    assert len(names) == 3
    assert made(tmp_path).clean(0) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


def test_a_file_that_a_living_writer_has_open_is_not_cleaned_away(tmp_path: Path) -> None:
    """The agent of a trainer that was just killed may still be writing its last version."""
    temp = tmp_path / f".{key_of(7).stem}.tmp"
    writer = python(
        "import sys; from pathlib import Path; "
        "from tierckpt.storage.durable import DirectFile\n"
        "with DirectFile(Path(sys.argv[1])): print('open', flush=True); sys.stdin.read()",
        temp,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        assert made(tmp_path).clean(0) == []
        assert temp.exists()
    finally:
        end(writer)
    assert made(tmp_path).clean(0) == [temp.name]


WRITER = """
import sys
from tierckpt.storage.local import LocalStore
from tierckpt.testing.fault_injection import commit_one, key_of
commit_one(LocalStore(sys.argv[1]), key_of(7), edition=1)
"""


def wait_for_the_stop(process: subprocess.Popen[str], marks: Path) -> None:
    """The one by the fault, which leaves a mark: anybody may stop a process, and wake it."""
    fired = False
    while not fired:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        fired = any(marks.iterdir())


@pytest.mark.parametrize(
    ("phase", "spare"), [("write", False), ("rename", True), ("fsync_manifest", False)]
)
def test_a_version_that_a_living_writer_is_writing_is_not_started_by_another(
    spare: bool, phase: str, tmp_path: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent with a hanging disk is passed over, and its successor is given the same slot. Each
    would rename or remove the other's files, and a manifest would stand for other bytes."""
    store = made(tmp_path / "ckpts")
    with monkeypatch.context() as patch:
        patch.setenv(_faults.FAULTS_VARIABLE, f"stop@file:op={phase}")
        patch.setenv(_faults.FIRED_VARIABLE, str(marks))
        hangs = python(WRITER, store.directory)
    try:
        wait_for_the_stop(hangs, marks)
        if spare:
            commit_one(store, key_of(1))
            store.retire(key_of(1))
        with pytest.raises(BlockingIOError, match="another process is still writing v7 shard 0"):
            commit_one(store, key_of(7))
        assert not store.has(key_of(7))
    finally:
        hangs.send_signal(signal.SIGCONT)
        end(hangs)
    assert hangs.returncode == 0
    assert is_sound(store, key_of(7))
    commit_one(store, key_of(7))
    assert is_sound(store, key_of(7)), "nobody is at it any more"


def test_a_file_that_a_hung_writer_has_open_is_not_kept_for_reuse(
    tmp_path: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier run that hangs, and wakes: its successor has retired the version it just
    committed."""
    store = made(tmp_path / "ckpts")
    with monkeypatch.context() as patch:
        patch.setenv(_faults.FAULTS_VARIABLE, "stop@file:op=fsync_directory,hit=2")
        patch.setenv(_faults.FIRED_VARIABLE, str(marks))
        hangs = python(WRITER, store.directory)
    try:
        wait_for_the_stop(hangs, marks)
        assert is_sound(store, key_of(7))
        os.link(store._data(key_of(7)), tmp_path / "kept")
        (tmp_path / "kept").rename(store._spare(key_of(7)))  # as an earlier tierckpt would
        with pytest.raises(BlockingIOError, match="another process is still writing"):
            commit_one(store, key_of(8))
        store.retire(key_of(7))
        commit_one(store, key_of(8))
        assert is_sound(store, key_of(8))
    finally:
        hangs.send_signal(signal.SIGCONT)
        end(hangs)
    assert hangs.returncode == 0
    assert is_sound(store, key_of(8))


def test_unaligned_memory_is_written_nevertheless(tmp_path: Path) -> None:
    """Direct I/O refuses it; the page cache does not."""
    store = made(tmp_path)
    shifted = memoryview(bytearray(b"x" + content_of(key_of(1))))[1:]
    times = store.commit(key_of(1), shifted, b"whatever")
    assert not times.direct or times.write_seconds >= 0
    assert store._data(key_of(1)).read_bytes() == content_of(key_of(1))


@pytest.mark.parametrize(("write_bytes", "writes"), [(durable.WRITE_BYTES, 1), (8192, 3)])
def test_a_shard_is_one_write_if_it_is_no_longer_than_that(
    write_bytes: int, writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two writes the device would wait for the thread."""
    sizes: list[int] = []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return os_pwrite(fd, data, offset)

    os_pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(durable, "WRITE_BYTES", write_bytes)
    store = LocalStore(tmp_path)
    commit_one(store, key_of(1), pages=5)
    assert len(sizes) == writes
    assert sum(sizes) == 5 * 4096
    assert is_sound(store, key_of(1))


def test_names_of_others_are_no_shards(tmp_path: Path) -> None:
    store = made(tmp_path)
    commit_one(store, key_of(1))
    for name in ("notes.manifest", ".v0000000002.g000001.s00000of00001.manifest", "v3.manifest"):
        (tmp_path / name).write_text("")
    assert store.keys() == [key_of(1)]
    assert is_sound(store, key_of(1))
