"""One process from start to end: after a kill at any point it continues as if nothing had
happened."""

from __future__ import annotations

import logging
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.late_copies import copy_in_the_copier_only
from tests.support.tiny_course import STEPS, in_shm, versions_on_disk
from tierckpt.errors import RestoreError, StateMismatchError
from tierckpt.format import FORMAT_MAJOR
from tierckpt.snapshot import ENGINE_VARIABLE
from tierckpt.storage import NoSlotError
from tierckpt.testing import TinyJob, fired, run_in_child, tiny_model, train

# --- the plain way -------------------------------------------------------------------------------


@pytest.mark.usefixtures("inline_agent")
def test_checkpointing_changes_nothing(path: Path, settings: Any, course: dict[int, str]) -> None:
    with TinyJob(path, **settings) as job:
        for step in range(1, STEPS + 1):
            job.run(step)
            assert job.fingerprint() == course[step]


@pytest.mark.usefixtures("inline_agent")
@pytest.mark.parametrize("what", ["the folder", "the newest version"])
def test_versions_that_another_program_removed_are_named(
    what: str, path: Path, settings: Any
) -> None:
    """They were reported as there. The training continues, and so do versions."""
    with TinyJob(path, **settings | {"local_every_steps": 1}) as job:
        job.run(1)
        job.checkpointer.save(now=True)
        if what == "the folder":
            shutil.rmtree(path)
        else:
            for file in path.glob("v0000000001*"):
                file.unlink()
        job.run(2)
        job.checkpointer.save(now=True)
        job.run(3)
    told = [e.message for e in job.heard("notice") if "was removed" in e.message]
    assert len(told) == 1
    assert str(path) in told[0]
    assert "v1 was removed by another program" in told[0]
    with TinyJob(path, **settings) as again:
        assert again.restore() == 3


@pytest.mark.parametrize("release", ["backward", "forward"])
def test_a_job_that_was_closed_continues(
    path: Path, settings: Any, course: dict[int, str], release: str
) -> None:
    with TinyJob(path, release=release, **settings) as first:
        first.run(STEPS)
    with TinyJob(path, seed=99, release=release, **settings) as second:
        restored = second.restore()
        assert restored == STEPS
        assert (restored.version, restored.levels) == (STEPS, {"local": 1})
        assert second.fingerprint() == course[STEPS]
        second.run(2 * STEPS)
        assert second.fingerprint() == course[2 * STEPS]


@pytest.mark.usefixtures("inline_agent")
def test_closing_without_a_step_leaves_nothing_at_all(
    path: Path, settings: Any, shm_dir: Path
) -> None:
    with TinyJob(path, **settings):
        pass
    assert in_shm(shm_dir) == []
    assert versions_on_disk(path) == []


def test_an_exception_leaves_everything_for_the_successor(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    def train_and_fail() -> None:
        with TinyJob(path, **settings) as job:
            job.run(STEPS)
            job.train_one()  # the barrier: the copy is complete
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    with TinyJob(path, seed=99, **settings) as second:
        restored = second.restore()
        assert (int(restored), restored.levels) == (STEPS, {"memory": 1})
        second.run(STEPS + 2)
        assert second.fingerprint() == course[STEPS + 2]


@pytest.mark.usefixtures("inline_agent")
def test_nothing_to_restore_is_a_fresh_start(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    with TinyJob(path, **settings) as job:
        restored = job.restore()
        assert (restored, restored.version, restored.levels) == (0, 0, {})
        job.run(3)
        assert job.fingerprint() == course[3]


def test_saving_now_is_durable_when_it_returns(path: Path, settings: Any) -> None:
    with TinyJob(path, local_every_steps=0, local_every_seconds=1e9, **settings) as job:
        job.run(3)
        assert versions_on_disk(path) == []
        job.checkpointer.save(now=True)
        assert versions_on_disk(path) == [3]
        job.checkpointer.save(now=True)  # once more: nothing to do, no harm
        assert versions_on_disk(path) == [3]
        assert not job.heard("failed")


@pytest.mark.usefixtures("inline_agent")
def test_saving_now_waits_for_a_copier_slow_to_hand_over(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TinyJob(path, local_every_steps=0, local_every_seconds=1e9, **settings) as job:
        job.run(2)
        job.settle()
        pool = job.checkpointer._pool

        def filled_late(*arguments: Any) -> None:
            time.sleep(0.3)
            original(*arguments)

        original = pool.filled
        monkeypatch.setattr(pool, "filled", filled_late)
        copy_in_the_copier_only(monkeypatch)
        job.train_one()
        job.checkpointer.save(now=True)
        assert versions_on_disk(path) == [3]


@pytest.mark.usefixtures("inline_agent")
def test_saving_later_happens_at_the_next_boundary_but_one(path: Path, settings: Any) -> None:
    with TinyJob(path, local_every_steps=0, local_every_seconds=1e9, **settings) as job:
        job.run(3)
        job.checkpointer.save()
        job.run(7)
        job.settle()
        assert len(versions_on_disk(path)) == 1
        assert versions_on_disk(path)[0] in (4, 5)


# --- killed --------------------------------------------------------------------------------------


VERSION = 5
KILLS = [
    # (point, release, copies, oldest version that may be left)
    # v4 is complete in memory before v5 is started.
    (f"kill@barrier:version={VERSION}", "backward", "native", VERSION - 1),
    (f"kill@refill:version={VERSION}", "forward", "native", VERSION - 1),
    (f"kill@copy:version={VERSION}", "backward", "torch", VERSION - 1),
    (f"kill@copy:version={VERSION},hit=2", "forward", "native", VERSION - 1),
    (f"kill@tree:version={VERSION}", "backward", "native", VERSION - 1),
    (f"kill@seal:version={VERSION}", "backward", "torch", VERSION - 1),
    (f"kill@sealed:version={VERSION}", "forward", "native", VERSION),
]


@pytest.mark.parametrize(
    ("rules", "release", "copies", "oldest"), KILLS, ids=["-".join(each[:3]) for each in KILLS]
)
def test_killed_anywhere_it_resumes_bit_for_bit(
    rules: str,
    oldest: int,
    release: str,
    copies: str,
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    marks: Path,
    settings: Any,
    course: dict[int, str],
) -> None:
    settings["release"] = release
    monkeypatch.setenv(ENGINE_VARIABLE, copies)
    status = run_in_child(train, str(path), STEPS, settings, rules=rules, marks=marks)
    assert (status, len(fired(marks))) == (-signal.SIGKILL, 1)
    with TinyJob(path, seed=99, **settings) as job:
        restored = job.restore()
        assert oldest <= restored <= VERSION
        assert restored.rejected == ()
        assert job.fingerprint() == course[int(restored)]
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]


def test_memory_lost_too_it_resumes_from_disk(
    path: Path, marks: Path, settings: Any, shm_dir: Path, course: dict[int, str]
) -> None:
    """After a reboot the versions in memory are lost."""
    rules = f"kill@barrier:version={VERSION}"
    assert run_in_child(train, str(path), STEPS, settings, rules=rules, marks=marks) < 0
    settings["shm_dir"] = str(shm_dir / "after reboot")
    (shm_dir / "after reboot").mkdir()
    with TinyJob(path, seed=99, **settings) as job:
        restored = job.restore()
        assert restored.levels == {"local": 1}
        assert 3 <= restored <= VERSION
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]


# --- runs ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("inline_agent")
def test_going_back_makes_the_versions_in_between_nobodys_past(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    settings["local_keep"] = 20
    with TinyJob(path, **settings) as first:
        first.run(STEPS)
    with TinyJob(path, seed=99, **settings) as second:
        assert second.restore(version=3) == 3
        assert second.fingerprint() == course[3]
        torch.manual_seed(1234)  # a new history starts here
        second.run(5)
        other = second.fingerprint()
        assert other != course[5]
    with TinyJob(path, seed=98, **settings) as third:
        restored = third.restore()
        assert (int(restored), restored.generation) == (5, 2)
        assert third.fingerprint() == other
        with pytest.raises(RestoreError, match="v7"):
            third.restore(version=7)  # of the abandoned history
        assert third.restore(version=torch.tensor(2)) == 2, "whatever is a whole number"
        assert third.fingerprint() == course[2]


@pytest.mark.usefixtures("inline_agent")
def test_going_back_within_one_run(path: Path, settings: Any, course: dict[int, str]) -> None:
    with TinyJob(path, local_keep=20, **settings) as job:
        job.run(STEPS)
        job.settle()
        assert job.restore(version=4) == 4
        assert job.fingerprint() == course[4]
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]


@pytest.mark.usefixtures("inline_agent", "by_layer")
def test_a_snapshot_given_up_before_it_has_a_slot_does_not_take_the_slot_with_it(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TinyJob(path, **settings) as job:
        job.run(2)
        job.settle()
        given_up = threading.Event()
        pool = job.checkpointer._pool
        choose = pool.choose

        def choose_late(*arguments: Any) -> Any:
            if len(arguments) > 4:
                raise NoSlotError  # at once; the copier waits
            assert given_up.wait(60)
            return choose(*arguments)

        monkeypatch.setattr(pool, "choose", choose_late)
        job.run(3)
        assert job.checkpointer._active.snapshot is not None
        job.checkpointer._active.snapshot.fail(RuntimeError("as restore() and a time-out do"))
        given_up.set()
        job.run(STEPS)
        assert job.heard("sealed")[-1].version >= STEPS - 1
    assert versions_on_disk(path)[-1] == STEPS


@pytest.mark.usefixtures("inline_agent")
def test_a_missing_version_is_an_error_and_changes_nothing(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    with TinyJob(path, **settings) as job:
        job.run(3)
        job.settle()
        with pytest.raises(RestoreError, match="no complete, sound v77") as caught:
            job.restore(version=77)
        assert re.search(r"The nearest complete ones are .*v2, v3;", str(caught.value))
        assert f"tierckpt list {path}" in str(caught.value)
        for wrong in ("ckpts", str(path), 3.0, True):
            with pytest.raises(TypeError, match=r"restore\(version=...\) takes a version's number"):
                job.restore(version=wrong)  # type: ignore[arg-type]
        for wrong in ("ckpts", 1, None):
            with pytest.raises(TypeError, match=r"save\(now=...\) is True or False"):
                job.checkpointer.save(wrong)  # type: ignore[arg-type]
        assert job.fingerprint() == course[3]
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]
    assert versions_on_disk(path)[-1] == STEPS


@pytest.mark.usefixtures("inline_agent")
def test_a_fresh_start_beside_old_files_keeps_them_with_a_report(path: Path, settings: Any) -> None:
    with TinyJob(path, local_keep=1, **settings) as old:
        old.run(STEPS)
    before = {p.name: p.read_bytes() for p in path.glob("v*")}
    with TinyJob(path, seed=5, local_keep=1, **settings) as fresh:
        fresh.run(4)
        expected = fresh.fingerprint()
        assert any("starts afresh" in e.message for e in fresh.heard("notice"))
    assert {n: (path / n).read_bytes() for n in before} == before
    with TinyJob(path, seed=99, **settings) as third:
        assert third.restore() == 4
        assert third.fingerprint() == expected


@pytest.mark.parametrize("committed", [True, False])
def test_a_removed_directory_is_no_fresh_start_and_versions_in_memory_are_reported(
    path: Path, settings: Any, committed: bool
) -> None:
    """The directory is emptied, if a version is known to have been in it; else it is removed."""
    settings |= {"agent": "inline", "local_every_steps": 1 if committed else 1000}
    first = TinyJob(path, **settings).run(STEPS - 4)
    first.settle()
    first.run(STEPS).checkpointer.abandon()
    shutil.rmtree(path)
    if committed:
        path.mkdir()
    with TinyJob(path, **settings) as second:
        assert second.restore() == STEPS
        (said,) = [e.message for e in second.heard("notice") if e.severity == logging.WARNING]
        memory = second.checkpointer._resources.job.path
    assert f"v{STEPS} was restored from memory" in said
    assert f"rm -r {path} {memory}" in said


def test_versions_in_memory_beside_a_removed_directory_are_reported_to_a_changed_model_too(
    path: Path, settings: Any
) -> None:
    """A user with a changed model probably wants to start afresh."""
    settings |= {"agent": "inline", "local_every_steps": 1000}
    TinyJob(path, **settings).run(STEPS).checkpointer.abandon()
    shutil.rmtree(path)
    wider = tiny_model()
    wider.append(torch.nn.Linear(4, 5))
    with TinyJob(path, model=wider, **settings) as second:
        with pytest.raises(StateMismatchError):
            second.restore()
        (said,) = [e.message for e in second.heard("notice") if e.severity == logging.WARNING]
        second.checkpointer.abandon()
    assert f"v{STEPS} was restored from memory" in said
    assert "If it was emptied for a fresh start" in said


OFF = {"local_every_steps": 0, "local_every_seconds": 0.0}


@pytest.mark.parametrize("before", [OFF, {"local_every_steps": 1000}, {"local_every_steps": 1}])
def test_a_directory_that_never_was_another_lifes_is_not_missed(
    path: Path, settings: Any, before: dict[str, Any]
) -> None:
    """The local level was off in that run, or the job came to this path with its name."""
    settings |= {"agent": "inline", "job_id": "job"}
    other = path if before is OFF else path.with_name("elsewhere")
    first = TinyJob(other, **settings, **before).run(STEPS - 2)
    first.settle()
    first.run(STEPS).checkpointer.abandon()
    assert not path.exists()
    with TinyJob(path, local_every_steps=1000, **settings) as second:
        assert second.restore().levels == {"memory": 1}
        assert not [e for e in second.heard("notice") if e.severity == logging.WARNING]


def test_a_version_that_was_not_yet_on_disk_is_not_missed(path: Path, settings: Any) -> None:
    settings |= {"agent": "inline", "local_every_steps": 1000}
    TinyJob(path, **settings).run(STEPS).checkpointer.abandon()
    with TinyJob(path, **settings) as second:
        assert second.restore().levels == {"memory": 1}
        assert not [e for e in second.heard("notice") if e.severity == logging.WARNING]


@pytest.mark.usefixtures("inline_agent")
def test_a_version_of_a_newer_format_ends_the_restart(
    path: Path, settings: Any, course: dict[int, str], monkeypatch: Any
) -> None:
    with TinyJob(path, local_every_steps=1, local_keep=8, **settings) as job:
        job.run(2)
    with monkeypatch.context() as patch:
        for module in ("ids", "records", "shard_file"):
            patch.setattr(f"tierckpt.format.{module}.FORMAT_MAJOR", FORMAT_MAJOR + 1)
        kept = {"local_every_steps": 1, "local_keep": 8, "agent": "inline"}
        with TinyJob(path, **kept, **settings) as job:
            job.restore()
            job.run(3)
    with TinyJob(path, local_keep=8, **settings) as job:
        before = job.fingerprint()
        with pytest.raises(
            RestoreError, match=r"newer tierckpt wrote here: .*/v0*3\..*format version 2"
        ):
            job.restore()
        assert job.fingerprint() == before
        assert job.restore(version=2).version == 2
        assert job.fingerprint() == course[2]
