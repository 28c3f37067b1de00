"""Pins: marks for retention, set by a job or from the command line."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support import limits
from tests.support.shards import IMAGE_BYTES, manifest
from tierckpt import PinError
from tierckpt.cli import run_command
from tierckpt.config import load_config
from tierckpt.coordination import mark_everywhere
from tierckpt.format import ShardKey, VersionId
from tierckpt.group import Node
from tierckpt.storage import LocalPins, LocalStore, PersistentPins
from tierckpt.storage.persistent import PersistentStore, PosixBackend, VersionName
from tierckpt.testing import ThreadGroup, TinyJob, run_ranks

PATIENCE_SECONDS = 60.0


def on_local(path: Path) -> list[int]:
    return sorted({key.id.version for key in LocalStore(path).keys()})  # noqa: SIM118


def on_persistent(path: Path) -> list[int]:
    return [name.id.version for name in PersistentStore(str(path)).versions()]


def pinned_far(path: Path) -> list[int]:
    return sorted(name.id.version for name in PersistentPins(PersistentStore(str(path))).marked())


def key_of(version: int) -> ShardKey:
    return ShardKey(VersionId(1, version), 0, 1)


def commit(store: LocalStore, version: int) -> None:
    store.commit(key_of(version), memoryview(bytes(IMAGE_BYTES)), manifest(version).encode())


@pytest.fixture
def job(tmp_path: Path, shm_dir: Path) -> Any:
    """`job(**settings)`: the same job again, with the same paths."""

    def start(**settings: Any) -> TinyJob:
        given = {
            "shm_dir": str(shm_dir),
            "agent": "inline",
            "local_keep": 1,
            "persistent_path": str(tmp_path / "shared"),
            "persistent_every_steps": 2,
            "persistent_keep": 1,
            **settings,
        }
        return TinyJob(tmp_path / "ckpts", **given)

    return start


def test_a_pinned_version_stays_on_both_levels_until_it_is_unpinned(
    job: Any, tmp_path: Path
) -> None:
    local, shared = tmp_path / "ckpts", tmp_path / "shared"
    with job() as first:
        first.run(2)
        first.checkpointer.save(now=True)
        assert first.checkpointer.pin(2) == ("local", "persistent")
        first.run(6)
        first.checkpointer.save(now=True)
    assert on_persistent(shared) == [2, 6]
    assert {1, 2, 3} & set(on_local(local)) == {2}
    with job() as second:  # also by another run
        second.restore()
        second.run(8)
        second.checkpointer.save(now=True)
        assert {2, 8} <= set(on_local(local))
        assert second.checkpointer.unpin(2) == ("local", "persistent")
        second.run(10)
    assert on_persistent(shared) == [10]
    assert not {2, 3} & set(on_local(local))
    assert not list(tmp_path.rglob("*.pin"))


def test_pin_waits_for_versions_in_progress(job: Any) -> None:
    """A sealed version not on the persistent level yet is not lost from there."""
    with job(persistent_bytes_per_second=2_000_000) as first:
        first.run(2)
        first.checkpointer.save(now=True)
        assert first.checkpointer.pin(2) == ("local", "persistent")


def test_a_version_is_pinned_before_it_continues_to_the_persistent_level(
    job: Any, tmp_path: Path
) -> None:
    """Only the next boundary has it flushed; the one after that would have it removed."""
    with job(agent="process") as first:
        first.run(2)
        first.settle()
        assert first.checkpointer.pin(2) == ("local",)
        first.run(6)
    assert on_persistent(tmp_path / "shared") == [2, 6]
    assert pinned_far(tmp_path / "shared") == [2]
    with job(agent="process") as second:
        second.restore()
        assert second.checkpointer.unpin(2) == ("local", "persistent")
        second.run(8)
    assert on_persistent(tmp_path / "shared") == [8]


A_MOMENT_SECONDS = 0.3


def test_all_nodes_are_marked_before_anybody_looks_on_the_persistent_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slow node could complete, unmarked, a version that was not found before."""
    nodes, shared = ("node0", "node1"), str(tmp_path / "shared")
    order: list[str] = []
    looked, pin, named = threading.Event(), LocalPins.pin, PersistentPins.named

    def slow_pin(pins: LocalPins, *what: Any, **how: Any) -> set[VersionId]:
        if pins._store.directory == tmp_path / "node1":
            looked.wait(A_MOMENT_SECONDS)
        done = pin(pins, *what, **how)
        order.append("marked")
        return done

    def look(pins: PersistentPins, number: int) -> set[VersionName]:
        order.append("looked")
        looked.set()
        return named(pins, number)

    monkeypatch.setattr(LocalPins, "pin", slow_pin)
    monkeypatch.setattr(PersistentPins, "named", look)
    for node in nodes:
        store = LocalStore(tmp_path / node)
        store.create()
        commit(store, 1)

    def program(group: ThreadGroup) -> tuple[str, ...]:
        config = load_config({"path": tmp_path / nodes[group.rank], "persistent_path": shared}, {})
        return mark_everywhere("pin", 1, config, group, Node.of(nodes[group.rank], nodes))

    assert run_ranks(2, program) == [("local",)] * 2
    assert order == ["marked", "marked", "looked"]


def test_a_version_found_nowhere_cannot_be_pinned(job: Any) -> None:
    with job() as first:
        first.run(2)
        with pytest.raises(PinError, match="cannot pin v77: there is no such version on any level"):
            first.checkpointer.pin(77)
        with pytest.raises(PinError, match="cannot unpin v2: no such version is pinned"):
            first.checkpointer.unpin(2)


def test_a_level_that_cannot_be_asked_is_named(job: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with job(persistent_path=str(tmp_path / "file")) as first:
        first.run(2)
        with pytest.raises(PinError, match=f"rank 0 cannot reach its pins.*{tmp_path / 'file'}"):
            first.checkpointer.pin(2)


def test_a_level_that_hangs_is_named(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First while it is flushed to, then when it is to be marked there."""
    hangs, resume = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        resume.wait(PATIENCE_SECONDS)

    limits.QUIET_LEVEL.set(monkeypatch, 0.5)
    with job() as first:
        first.run(1)
        with monkeypatch.context() as patch:
            patch.setattr(PosixBackend, "write_at", hang)
            first.run(2)
            first.checkpointer.save(now=True)
            assert hangs.wait(PATIENCE_SECONDS)
            with pytest.raises(PinError, match="nothing has moved to persistent for"):
                first.checkpointer.pin(2)
            resume.set()
            first.checkpointer._agent.wait(PATIENCE_SECONDS, everything=True)
        resume.clear()
        with monkeypatch.context() as patch:
            patch.setattr(PosixBackend, "sizes", hang)
            with pytest.raises(PinError, match=f"{tmp_path / 'shared'} has not answered for"):
                first.checkpointer.pin(1)
            resume.set()
        first.checkpointer.abandon()


# --- the command ---------------------------------------------------------------------------------


def test_the_command_pins_at_one_place(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local, shared = tmp_path / "ckpts", tmp_path / "shared"
    with job() as first:
        first.run(2)
        first.checkpointer.save(now=True)
        first.checkpointer.wait()
        assert run_command(["pin", str(local), "2"]) == 0
        assert "pinned v2" in capsys.readouterr().out
        first.run(4)
    assert {1, 2, 3, 4} & set(on_local(local)) == {2, 4}
    assert on_persistent(shared) == [4]
    assert run_command(["pin", str(shared), "4"]) == 0
    assert pinned_far(shared) == [4]
    assert run_command(["unpin", str(shared), "4"]) == 0
    assert pinned_far(shared) == []
    assert run_command(["unpin", str(local), "2"]) == 0
    assert LocalPins(local).marked() == set()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["pin", "ckpts", "9"], "there is no such version as v9; there: v1, v2"),
        (["unpin", "ckpts", "1"], "no such version is pinned as v1; there: none"),
        (["pin", "empty", "1"], "there is no such version as v1; there: none"),
        (["pin", "nowhere", "1"], "nowhere is not a directory; give a job's path"),
        (["unpin", "nowhere", "1"], "nowhere is not a directory; give a job's path"),
        (["pin", "file", "1"], "file is not a directory; give a job's path"),
    ],
)
def test_the_command_lists_the_existing_versions_instead(
    line: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "empty").mkdir()
    store = LocalStore("ckpts")
    store.create()
    for version in (1, 2):
        commit(store, version)
    assert run_command(line) == 1
    assert said in capsys.readouterr().err
    assert sorted(os.listdir()) == ["ckpts", "empty", "file"], "nothing is made for a mistyped path"


def test_no_versions_are_marked_without_making_a_directory(tmp_path: Path) -> None:
    """An unmounted persistent path must not look like a mounted one."""
    assert LocalPins(tmp_path / "not" / "mounted").pin([]) == set()
    assert os.listdir(tmp_path) == []


# --- at once with a removal ----------------------------------------------------------------------


def test_a_pin_in_the_middle_of_a_removal_waits_and_then_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remover has looked for a pin, and has not removed yet."""
    store, pins = LocalStore(tmp_path), LocalPins(tmp_path)
    commit(store, 1)
    flock, coming = fcntl.flock, threading.Event()
    found: list[set[VersionId]] = []

    def flock_and_say(fd: int, how: int) -> None:
        coming.set()
        flock(fd, how)

    pinner = threading.Thread(target=lambda: found.append(pins.pin([key_of(1).id])))
    with pins.spared(key_of(1).id) as pinned:
        assert not pinned
        monkeypatch.setattr(fcntl, "flock", flock_and_say)
        pinner.start()
        assert coming.wait(60)
        assert not found
        store.retire(key_of(1))
    pinner.join()
    assert found == [set()]


def test_marks_are_distinguished_from_all_other_files(tmp_path: Path) -> None:
    pins = LocalPins(tmp_path / "new")
    assert pins.marked() == pins.versions() == set()
    pins.pin([VersionId(3, 12)])
    (tmp_path / "new" / "v0000000001.g000001.of00002.5eed.pin").touch()
    (tmp_path / "new" / "notes.pin").touch()
    assert pins.marked() == {VersionId(3, 12)}
    assert pins.named(12) == {VersionId(3, 12)}
    pins.pin([VersionId(3, 13)], everywhere=True)
    pins.pin([VersionId(3, 13)])
    assert pins.marked() == {VersionId(3, 12), VersionId(3, 13)}
    assert [pins.everywhere(VersionId(3, version)) for version in (12, 13, 14)] == [0, 1, 0]
    assert LocalStore(tmp_path / "new").clean(0) == []
