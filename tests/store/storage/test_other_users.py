"""Two users of a group share a directory: never both at once, and one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import limits
from tierckpt.cli import run_command
from tierckpt.format import PAGE_BYTES, ShardKey, VersionId
from tierckpt.storage import DirectoryClaim, LocalPins, LocalStore
from tierckpt.storage.persistent import PosixBackend
from tierckpt.testing import TinyJob, run_in_child

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")

GROUP, ANNA, BEN = 54321, 54322, 54323
"""Numbers without a name: messages then contain the number."""
KILLED = 3


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory of the group; its new files are the group's, too."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        folder = Path(made, "shared")
        folder.mkdir()
        os.chown(folder, ANNA, GROUP)
        folder.chmod(0o2775)
        yield folder


@pytest.fixture
def memory(shm_dir: Path) -> Path:
    shm_dir.chmod(0o1777)
    return shm_dir


def become(user: int, umask: int) -> None:
    os.setgroups([])
    os.setgid(GROUP)
    os.setuid(user)
    os.umask(umask)


# --- one after the other -------------------------------------------------------------------------


def run_id(user: int, umask: int, place: Path, memory: Path, until: int, kill: bool) -> None:
    """One run of the job; its report is in a file of its user. Ends with status KILLED if it is to
    leave everything as a killed process does."""
    with TinyJob(memory / f"warm{user}", shm_dir=str(memory), agent="inline") as warm:
        warm.run(1)  # imports everything first: another user may not read the modules
    become(user, umask)
    job = TinyJob(place / "made" / "ckpts", shm_dir=str(memory), agent="inline")
    started = int(job.restore())
    job.run(until)
    job.settle()
    wrong = [f"{e.name}: {e.message}" for e in job.events if e.name in ("failed", "rejected")]
    hidden = [e for e in job.heard("notice") if "which this user cannot read" in e.message]
    told = {
        "begun": started,
        "committed": len(job.heard("committed", "local")),
        "wrong": wrong,
        "hidden": [
            e.message.partition(", which belongs to ")[2].partition(" and ")[0] for e in hidden
        ],
    }
    (memory / f"told{user}").write_text(json.dumps(told))
    if kill:
        os._exit(KILLED)
    job.checkpointer.close()


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_the_next_user_resumes_and_loses_nothing(umask: int, shared: Path, memory: Path) -> None:
    def run(user: int, until: int, kill: bool) -> tuple[Any, ...]:
        status = run_in_child(run_id, user, umask, shared, memory, until, kill)
        assert status == (KILLED if kill else 0)
        told = json.loads((memory / f"told{user}").read_text())
        return told["begun"], told["committed"], told["wrong"], told["hidden"]

    def after(user: int) -> list[str]:
        return [f"user {user}"]

    assert run(ANNA, 4, True) == (0, 4, [], [])
    listing = memory / "listing"
    assert run_in_child(list_as_ben, shared, listing, shm=memory) == 0
    said = listing.read_text()
    assert f"cannot be read: {memory}/tierckpt-{ANNA}/ckpts-" in said
    assert "another user's" in said
    assert run(BEN, 8, True) == (4, 4, [], after(ANNA))
    assert run(ANNA, 9, False) == (8, 1, [], after(BEN))
    made = shared / "made" / "ckpts"
    for path in shared.rglob("*"):
        found = path.stat()
        assert found.st_gid == GROUP
        assert found.st_mode & stat.S_IWGRP, path
    assert not list(made.glob(".claim.*")), "those of both users' dead runs"


def list_as_ben(place: Path, out: Path, shm: Path) -> None:
    """There may be more than Ben can see: an error, after everything that he can."""
    become(BEN, 0o022)
    os.environ["TIERCKPT_SHM_DIR"] = str(shm)
    with out.open("w") as file, contextlib.redirect_stdout(file):
        assert run_command(["list", str(place / "made" / "ckpts")]) == 1


# --- never both ----------------------------------------------------------------------------------


def ask(place: Path, answer: Path) -> None:
    become(BEN, 0o022)
    for limit in (limits.CLAIM_HERE, limits.CLAIM_ELSEWHERE):
        limit.set(pytest.MonkeyPatch(), 0.2)
    made = DirectoryClaim(place, "bens", 0, lambda *_: None)
    answer.write_text(made.stake())
    made.release()


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_a_living_claim_counts_even_if_only_others_may_open_it(
    mode: int, shared: Path, memory: Path
) -> None:
    answer, other = memory / "answer", DirectoryClaim(shared, "roots", 0, lambda *_: None)
    assert other.stake() == ""
    (claim,) = shared.glob(".claim.*")
    assert stat.S_IMODE(claim.stat().st_mode) == 0o664, "the group's"
    claim.chmod(mode)
    try:
        assert run_in_child(ask, shared, answer) == 0
        assert "another job uses" in (said := answer.read_text())
        assert "of user root" in said
        assert f"remove {claim}" in said
        assert claim.exists()
    finally:
        other.release()
    assert run_in_child(ask, shared, answer) == 0
    assert answer.read_text() == ""


def test_a_user_without_write_permission_is_refused_nevertheless(
    shared: Path, memory: Path
) -> None:
    shared.chmod(0o2755)
    answer, other = memory / "answer", DirectoryClaim(shared, "roots", 0, lambda *_: None)
    assert other.stake() == ""
    try:
        assert run_in_child(ask, shared, answer) == 0
        assert "another job uses" in answer.read_text()
    finally:
        other.release()


# --- spare files ---------------------------------------------------------------------------------


def commit_beside(place: Path, sticky: bool) -> None:
    become(BEN, 0o022)
    store = LocalStore(place)
    for version in (2, 3):
        key = ShardKey(VersionId(1, version), 0, 1)
        store.commit(key, memoryview(bytes(PAGE_BYTES)), b"manifest")
    assert store.keys()[1:] == [ShardKey(VersionId(1, version), 0, 1) for version in (2, 3)]
    store.clean(0)
    store.retire(ShardKey(VersionId(1, 2), 0, 1))
    spares = list(place.glob(".spare*"))
    assert [spare.stat().st_uid for spare in spares] == [0 if sticky else BEN]


@pytest.mark.parametrize("sticky", [False, True])
def test_a_spare_file_of_another_user_is_not_taken(sticky: bool, shared: Path) -> None:
    store, key = LocalStore(shared), ShardKey(VersionId(1, 1), 0, 1)
    for version in (1, 0):
        made = ShardKey(VersionId(1, version), 0, 1)
        store.commit(made, memoryview(bytes(PAGE_BYTES)), b"manifest")
    store.retire(made)
    (spare,) = shared.glob(".spare*")
    spare.chmod(0o644)
    shared.chmod(0o3775 if sticky else 0o2775)
    assert run_in_child(commit_beside, shared, sticky) == 0
    assert store.keys() == [key, ShardKey(VersionId(1, 3), 0, 1)]


def test_the_mark_of_another_users_pin_can_be_set_again(shared: Path) -> None:
    pins = LocalPins(shared)
    pins.pin([VersionId(1, 1)])
    assert run_in_child(pin_as_ben, shared) == 0
    assert pins.everywhere(VersionId(1, 1))


def pin_as_ben(place: Path) -> None:
    become(BEN, 0o022)
    LocalPins(place).pin([VersionId(1, 1)], everywhere=True)


def put_far(user: int, place: Path, name: str) -> None:
    become(user, 0o022)
    backend = PosixBackend(str(place / "far"))
    backend.create()
    backend.put(name, lambda: iter([memoryview(b"x")]), 1)
    backend.write_at("v1/shared", 0, lambda: iter([memoryview(b"x")]))


def remove_far(user: int, place: Path) -> None:
    become(user, 0o022)
    PosixBackend(str(place / "far")).delete_folder("v1")


def test_versions_on_a_parallel_file_system_are_the_groups(shared: Path) -> None:
    assert run_in_child(put_far, ANNA, shared, "v1/a") == 0
    assert run_in_child(put_far, BEN, shared, "v1/b") == 0
    assert sorted((shared / "far/v1").iterdir()) == [
        shared / "far/v1" / n for n in ("a", "b", "shared")
    ]
    assert run_in_child(remove_far, BEN, shared) == 0
    assert not list((shared / "far").iterdir())
