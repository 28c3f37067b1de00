"""One rank cannot read copies that the others can, or fails by itself: no rank waits for it, and no
sound version is given up."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tierckpt
import tierckpt.coordination.settings_check
import tierckpt.restore.shards
import tierckpt.restore.verification
from tests.dist.peer import test_peer_level as peer
from tests.dist.storage import test_persistent_level as persistent
from tests.support import exact
from tests.support.training import (
    Place,
    attach,
    crash_after,
    make_job,
    rank,
    restored_into,
    working_in,
)
from tierckpt.storage import MappedFile
from tierckpt.storage.persistent import PosixBackend

STEPS = persistent.STEPS


def raiser(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def refuse(patch: pytest.MonkeyPatch, asked: list[str]) -> None:
    def read(backend: PosixBackend, name: str, *rest: Any) -> bytes:
        asked.append(name)
        raise PermissionError(errno.EACCES, "no right to read", name)

    patch.setattr(PosixBackend, "read", read)
    patch.setattr(PosixBackend, "read_into", read)


def hide(patch: pytest.MonkeyPatch, asked: list[str]) -> None:
    """The mount is missing: its mount point exists, and is empty."""

    def read(backend: PosixBackend, name: str, *rest: Any) -> bytes:
        asked.append(name)
        raise FileNotFoundError(errno.ENOENT, "not there", name)

    patch.setattr(PosixBackend, "read", read)
    patch.setattr(PosixBackend, "read_into", read)
    patch.setattr(PosixBackend, "size", read)


def hide_data(patch: pytest.MonkeyPatch, asked: list[str]) -> None:
    """The record of the shard's location can still be read, the shard cannot."""

    def refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(backend: PosixBackend, name: str, *rest: Any) -> Any:
            if not name.endswith(".shards"):
                return plain(backend, name, *rest)
            asked.append(name)
            raise PermissionError(errno.EACCES, "no right to read", name)

        return read

    for method in ("read", "read_into"):
        patch.setattr(PosixBackend, method, refusing(getattr(PosixBackend, method)))


VIEWS = {"refused": refuse, "not mounted": hide, "data refused": hide_data}


def with_a_view(place: Place, shared: str, view: str, blind: int) -> dict[str, Any]:
    """Restore; rank `blind` does not see the persistent level."""
    job = make_job(seed=2)
    more = persistent.settings(shared)
    attached = attach(job, place, memory_every_steps=0, **more)
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if rank() == blind:
            VIEWS[view](patch, asked)
        restored = attached.ckpt.restore()
    told = {
        "restored": (restored.version, restored.levels),
        "replicated": exact.digest(job.replicated()),
        "digest": job.digest(),
        "rejected": restored.rejected,
        "asked": len(asked),
    }
    attached.ckpt.abandon()
    return told


@pytest.mark.parametrize(
    ("view", "now", "blind"),
    [("refused", 2, 1), ("not mounted", 3, 2), ("data refused", 3, 2)],
)
def test_a_shard_that_one_rank_cannot_see_is_read_by_the_others(
    now: int, blind: int, view: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """If a rank's blindness counted as damage, every copy of every version would be rejected: all
    are on that level."""
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    before = ranks(3).run(persistent.train_and_close, place, shared, {})
    persistent.lose_the_nodes(place)
    told = ranks(now).run(with_a_view, place, shared, view, blind)
    assert told[blind]["asked"] > 0, "the fault fired"
    for number, each in enumerate(told):
        assert each["restored"] == (STEPS, {"persistent": 3})
        assert each["replicated"] == before[0]["replicated"]
        if now == 3:
            assert each["digest"] == before[number]["course"][STEPS]
        assert each["rejected"]
        assert all(f"as rank {blind} found, on node " in text for text in each["rejected"])


def test_a_part_that_nobody_sees_is_damage(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """The newest version's manifest exists, but a file that it names does not: the version before
    is restored, and no rank is taken for blind."""
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    before = ranks(2).run(persistent.train_and_close, place, shared, {})
    persistent.lose_the_nodes(place)
    newest = persistent.PersistentStore(shared).versions()[-1]
    for file in (tmp_path / "shared" / newest.stem).glob("*.shards"):
        file.unlink()
    for number, told in enumerate(ranks(2).run(persistent.come_back, place, shared)):
        assert told["restored"] == (8, {"persistent": 2})
        assert told["digest"] == before[number]["course"][8]
        assert len(told["rejected"]) == 2
        assert all("a part of it is missing" in text for text in told["rejected"])


# --- retired between look and read ---------------------------------------------------------------


def come_back_while_it_is_retired(
    place: Place, shared: str, comes: str, goes: str
) -> dict[str, Any]:
    """An agent of the run before still works: after the plan was made, one version reaches the
    persistent level, and another is retired for it."""
    job = make_job(seed=2)
    attached = attach(job, place, memory_every_steps=0, **persistent.settings(shared))
    plain, opened = tierckpt.restore.shards.Reads.open, list[Any]()

    def open_late(reads: Any, version: Any, *rest: Any) -> None:
        opened.append(version.version)
        if len(opened) == 1:
            if rank() == 0:
                move(Path(shared), comes, back=True)
                move(Path(shared), goes)
            attached.ckpt.group.barrier()
        plain(reads, version, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tierckpt.restore.shards.Reads, "open", open_late)
        told = restored_into(job, attached)
    attached.ckpt.abandon()
    return told | {"opened": opened}


def move(shared: Path, stem: str, back: bool = False) -> None:
    """Move a version out of the level's sight, manifest first; or back, manifest last."""
    aside = shared.parent / "aside"
    aside.mkdir(exist_ok=True)
    names = sorted(p.name for p in (aside if back else shared).glob(f"{stem}*")) if stem else []
    for name in names if back else reversed(names):
        (aside if back else shared).joinpath(name).rename((shared if back else aside) / name)


def test_a_version_retired_since_the_scan_is_scanned_for_once_more(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """The newer version is restored."""
    place, shared = Place.under(tmp_path, shm_dir), tmp_path / "shared"
    keep = {"persistent_keep": 3}
    before = ranks(2).run(persistent.train_and_close, place, str(shared), keep)
    persistent.lose_the_nodes(place)
    oldest, planned, newest = [n.stem for n in persistent.PersistentStore(str(shared)).versions()]
    move(shared, newest)
    move(shared, oldest)
    told = ranks(2).run(come_back_while_it_is_retired, place, str(shared), newest, planned)
    for number, each in enumerate(told):
        assert each["opened"] == [8, STEPS]
        assert each["restored"] == (STEPS, {"persistent": 2})
        assert each["digest"] == before[number]["course"][STEPS]
        assert each["rejected"] == ()


# --- a rank that fails by itself -----------------------------------------------------------------


FAULTS: dict[str, tuple[str, Exception]] = {
    "no descriptors": (
        "tierckpt.restore.shards.in_memory",
        OSError(errno.EMFILE, "Too many open files"),
    ),
    "a client's own": (
        "tierckpt.restore.shards.check_header",
        RuntimeError("ticket has expired"),
    ),
    "opening": ("tierckpt.restore.verification.Reads.open", RuntimeError("can't start new thread")),
}


def fail_and_try_again(
    place: Place, more: dict[str, Any], failing: tuple[str, Exception] | None
) -> dict[str, Any]:
    """Restore twice; the first time `failing` fails on rank 1."""
    job = make_job(seed=2)
    untouched = job.digest()
    node = {"node": f"node{rank()}"} if "node" in more else {}
    attached = attach(job, place, memory_every_steps=0, **more | node)
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1 and failing is not None:
            patch.setattr(failing[0], raiser(failing[1]))
        with pytest.raises(tierckpt.RestoreError) as caught:
            attached.ckpt.restore()
    same = job.digest() == untouched
    restored = attached.ckpt.restore()
    told = {
        "error": str(caught.value),
        "same": same,
        "restored": restored.version,
        "levels": restored.levels,
        "digest": job.digest(),
        "rejected": restored.rejected,
    }
    attached.ckpt.abandon()
    return told


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_cannot_read_at_all_ends_the_restore_on_all(
    fault: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """No copy is at fault: no older version is restored, and afterwards all copies still exist.
    test_one_rank_fails lacks memory in any call."""
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    before = ranks(2).run(persistent.train_and_close, place, shared, {})
    persistent.lose_the_nodes(place)
    more = persistent.settings(shared)
    for number, told in enumerate(ranks(2).run(fail_and_try_again, place, more, FAULTS[fault])):
        assert "rank 1 could not read its share" in told["error"]
        assert str(FAULTS[fault][1].args[-1]) in told["error"]
        assert told["same"]
        assert told["restored"] == STEPS
        assert told["digest"] == before[number]["course"][STEPS]
        assert told["rejected"] == ()


def test_so_it_does_where_shards_are_rebuilt(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    place = peer.place_of(tmp_path, shm_dir)
    before = ranks(3).run(peer.leave_behind, place, "xor")
    peer.lose(place, tmp_path, 0)
    fault = ("tierckpt.peer.parity_file.check_parity", MemoryError("no more"))
    told = ranks(3).run(fail_and_try_again, place, peer.settings("xor", 0), fault)
    for number, each in enumerate(told):
        assert "rank 1 could not read its share" in each["error"]
        assert each["same"]
        assert each["restored"] == peer.STEPS
        assert each["levels"] == {"local": 2, "peer": 1}
        assert each["digest"] == before[number]["course"][peer.STEPS]


def look_with_a_client_that_fails(place: Place, shared: str) -> str:
    attached = attach(make_job(seed=2), place, **persistent.settings(shared))
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 0:
            fail = raiser(RuntimeError("ticket has expired"))
            patch.setattr("tierckpt.storage.persistent.PersistentStore.versions", fail)
        with pytest.raises(tierckpt.RestoreError) as caught:
            attached.ckpt.restore()
    attached.ckpt.abandon()
    return str(caught.value)


def test_a_client_that_fails_on_rank_0_leaves_nobody_waiting(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    ranks(2).run(persistent.train_and_close, place, shared, {})
    persistent.lose_the_nodes(place)
    for text in ranks(2).run(look_with_a_client_that_fails, place, shared):
        assert f"could not be read: {shared}: RuntimeError: ticket has expired" in text


# --- what was verified and cannot be read again --------------------------------------------------


@contextmanager
def disk_that_fails_while_loading(at: int) -> Iterator[None]:
    """On rank `at`, from the first shown window on."""
    loading: list[bool] = []
    visit, bring = tierckpt.restore.verification.VerifiedVersion.visit, MappedFile.bring

    def visited(attempt: Any, *shown: Any) -> None:
        loading.append(True)
        visit(attempt, *shown)

    def brought(file: MappedFile, low: int, high: int) -> None:
        if loading and rank() == at:
            raise OSError(errno.EIO, f"bytes {low} to {high} cannot be read: the disk fails")
        bring(file, low, high)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tierckpt.restore.verification.VerifiedVersion, "visit", visited)
        patch.setattr(MappedFile, "bring", brought)
        yield


def load_from_a_failing_disk(root: Path, machines: bool, crash: bool) -> dict[str, Any]:
    folder = root / f"host{rank() if machines else 0}"
    with working_in(folder), pytest.MonkeyPatch.context() as patch:
        if machines:
            patch.setattr(
                tierckpt.coordination.settings_check, "host_id", lambda node: f"host{rank()}"
            )
        Path("memory").mkdir(exist_ok=True)
        job = make_job(seed=1 if crash else 2)
        attached = attach(job, Place("disk", "memory"), local_every_steps=2)
        if crash:
            crash_after(job, attached, 2)
            return {"replicated": exact.digest(job.replicated())}
        with disk_that_fails_while_loading(1), pytest.raises(tierckpt.StateTornError) as caught:
            attached.ckpt.restore()
        torn = attached.ckpt._state.torn
        restored = attached.ckpt.restore()
        told = {
            "error": str(caught.value),
            "torn": torn,
            "restored": restored.version,
            "levels": restored.levels,
            "torn after": attached.ckpt._state.torn,
            "digest": job.digest(),
        }
        attached.ckpt.abandon()
        return told


@pytest.mark.parametrize(
    ("machines", "torn"), [(True, [True, True]), (False, [False, True])], ids=["sent", "mapped"]
)
def test_a_disk_that_fails_after_the_check_is_an_error_on_all_ranks(
    machines: bool, torn: list[bool], ranks: Any, tmp_path: Path
) -> None:
    """Verified bytes are read again if they left memory. A rank that was sent the unreadable bytes
    is torn like the rank that could not read them; a rank with only sound bytes is not."""
    ranks(2).run(load_from_a_failing_disk, tmp_path, machines, True)
    for memory in tmp_path.glob("host*/memory"):
        shutil.rmtree(memory, ignore_errors=True)
    told = ranks(2).run(load_from_a_failing_disk, tmp_path, machines, False)
    for each in told:
        assert "can no longer be read (rank 1): " in each["error"]
        assert "the disk fails" in each["error"]
        assert each["restored"] == 2
        assert each["levels"] == {"local": 2}
        assert not each["torn after"]
    assert [each["torn"] for each in told] == torn
