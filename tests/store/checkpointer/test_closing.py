"""The end of a job if the live state is no version, or if other versions are to be kept in its
place."""

from __future__ import annotations

import importlib
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tierckpt
from tests.support.late_copies import copy_by_layer
from tests.support.tiny_course import STEPS, in_shm, versions_on_disk
from tests.support.warm_python.servers import PYTHON
from tierckpt import PinError, RestoreError, TierckptError
from tierckpt.checkpointer import PlainAdapter
from tierckpt.events import JobEnd
from tierckpt.storage import NoSlotError
from tierckpt.testing import TinyJob


@pytest.fixture
def settings(shm_dir: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir), "agent": "inline"}


def back_from(path: Path, settings: dict[str, Any]) -> tuple[int, dict[str, int], str]:
    """The version that a successor restores, and its state."""
    with TinyJob(path, seed=99, **settings) as job:
        restored = job.restore()
        return int(restored), restored.levels, job.fingerprint()


def said(job: TinyJob, text: str) -> bool:
    return any(text in event.message for event in job.events)


def test_a_look_at_an_older_version_costs_no_newer_one(
    path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    """Nor one in memory alone."""
    settings |= {"local_keep": 3}
    job = TinyJob(path, local_every_steps=2, **settings).run(STEPS + 1)
    job.checkpointer.wait()
    job.checkpointer.abandon()
    before = versions_on_disk(path), len(in_shm(shm_dir))
    with TinyJob(path, seed=99, **settings) as looking:
        assert looking.restore(version=STEPS - 2) == STEPS - 2
        assert looking.fingerprint() == course[STEPS - 2]
    assert said(looking, "newer versions stay")
    assert (versions_on_disk(path), len(in_shm(shm_dir))) == before
    assert back_from(path, settings) == (STEPS + 1, {"memory": 1}, course[STEPS + 1])


def test_a_run_that_trains_on_from_it_has_given_up_the_rest(
    path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    settings |= {"local_keep": 3}
    with TinyJob(path, **settings) as job:
        job.run(STEPS)
    with TinyJob(path, seed=99, **settings) as second:
        second.restore(version=STEPS - 2)
        second.run(STEPS - 1)
    assert in_shm(shm_dir) == []
    assert back_from(path, settings) == (STEPS - 1, {"local": 1}, course[STEPS - 1])


def fail_half_way(job: TinyJob) -> None:
    """Let an optimizer raise after it has changed some of its parameters."""
    job.checkpointer.wait()

    def step(*_: Any, **__: Any) -> None:
        for param in [*job.model.parameters()][:2]:
            torch.nn.init.zeros_(param)
        raise MemoryError

    adam = importlib.import_module("torch.optim.adam")
    with mock.patch.object(adam, "adam", step), pytest.raises(MemoryError):
        job.train_one()


@pytest.mark.parametrize("level", ["memory", "local"])
def test_half_of_a_step_is_no_version(
    level: str, path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    """The newest version in memory goes to disk; a version that was not taken at its boundary is
    not taken."""
    every = {"memory_every_steps": 3} if level == "memory" else {}
    with TinyJob(path, local_every_steps=100, **every, **settings) as job:
        job.run(STEPS)
        fail_half_way(job)
        job.checkpointer.save(now=True)
    assert said(job, "stores nothing: rank 0: the step of optimizer was interrupted")
    assert said(job, "no final checkpoint is taken")
    newest = STEPS if level == "local" else 6
    assert versions_on_disk(path) == [newest]
    assert in_shm(shm_dir)
    restored, _, state = back_from(path, settings)
    assert (restored, state) == (newest, course[newest])


def test_a_torn_state_is_no_version(
    path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    with TinyJob(path, **settings) as job:
        job.run(STEPS)
    with TinyJob(path, seed=99, **settings) as second:
        second.restore()
        second.run(STEPS + 1)
        second.checkpointer._state.torn = True
    assert said(second, "the live state is torn")
    restored, _, state = back_from(path, settings)
    assert (restored, state) == (STEPS + 1, course[STEPS + 1])


def test_durable_versions_do_not_depend_on_the_speed_of_other_levels(
    path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    """Ranks ask each other first: a store may take half an hour, in which their group's timeout
    expires."""
    with (
        mock.patch(
            "tierckpt.checkpointer.shutdown.Shutdown.await_others",
            side_effect=TimeoutError("a slow store"),
        ),
        TinyJob(path, **settings) as job,
    ):
        job.run(STEPS)
    assert said(job, "not all ranks end together: TimeoutError: a slow store")
    assert not said(job, "is not durable")
    assert in_shm(shm_dir) == []
    assert back_from(path, settings) == (STEPS, {"local": 1}, course[STEPS])


@pytest.fixture
def by_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is copied before a gradient's reduction is launched; here none is launched."""
    copy_by_layer(monkeypatch)
    with mock.patch.object(PlainAdapter, "releases_by_layer", True):
        yield


def fail_in_the_forward_pass(job: TinyJob) -> None:
    def forward(*_: Any) -> None:
        raise ConnectionError("the data is gone")

    job.run(STEPS)
    job.model[0].register_forward_pre_hook(forward)
    with pytest.raises(ConnectionError), job:
        job.run(STEPS + 1)


@pytest.mark.usefixtures("by_layer")
def test_an_exception_costs_no_version_not_copied_yet(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    job = TinyJob(path, **settings)
    fail_in_the_forward_pass(job)
    restored, levels, state = back_from(path, settings)
    assert (restored, state) == (STEPS, course[STEPS])
    assert levels == {"memory": 1}


@pytest.mark.usefixtures("by_layer")
def test_but_it_does_not_wait_for_a_copy_that_does_not_come(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    job = TinyJob(path, **settings).run(STEPS - 1)
    resume = threading.Event()

    def choose(*args: Any) -> None:
        if len(args) > 2:
            raise NoSlotError  # at once
        resume.wait()

    def choose_slot(*_: Any) -> Callable[..., Any]:
        return choose

    try:
        with (
            mock.patch.object(job.checkpointer._levels.slot_handoff, "chooser", choose_slot),
            mock.patch("tierckpt.checkpointer.loop.LAST_CHANCE_SECONDS", 0.01),
            mock.patch("tierckpt.snapshot.snapshot.JOIN_PATIENCE_SECONDS", 0.01),
        ):
            fail_in_the_forward_pass(job)
    finally:
        resume.set()
    restored, _, state = back_from(path, settings)
    assert (restored, state) == (STEPS - 1, course[STEPS - 1])


def end_by_itself(job: TinyJob, code: Any) -> None:
    def end(_: TinyJob) -> None:
        sys.exit(code)

    job.run(STEPS - 1)
    job.on_step = end
    with pytest.raises(SystemExit), job.checkpointer:
        job.run(STEPS)


@pytest.mark.parametrize(("code", "local"), [(None, True), (0, True), ("why", False)])
def test_a_script_that_ends_itself_well_is_closed(
    code: object, local: bool, path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    """Also inside the `with` block; any other way out of it leaves all versions to a successor."""
    job = TinyJob(path, local_every_steps=100, **settings)
    end_by_itself(job, code)
    assert job.checkpointer.closed
    assert (versions_on_disk(path), bool(in_shm(shm_dir))) == ([STEPS] if local else [], not local)
    level = "local" if local else "memory"
    assert back_from(path, settings) == (STEPS, {level: 1}, course[STEPS])


def test_but_not_without_the_other_ranks(
    path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    """Another rank may have failed: no rank waits for it, and the version in memory goes to
    disk."""
    job = TinyJob(path, local_every_steps=100, **settings)
    job.checkpointer.group.meet = lambda seconds: False  # type: ignore[method-assign]
    end_by_itself(job, 0)
    assert not job.heard("closed")
    assert versions_on_disk(path) == [STEPS]
    assert in_shm(shm_dir)


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_a_closed_checkpointer_refuses_at_once(
    end: str, path: Path, settings: Any, course: dict[int, str]
) -> None:
    """And a continuing loop is not disturbed."""
    job = TinyJob(path, **settings).run(STEPS - 1)
    job.train_one()  # and the boundary of this step comes after the end
    job.iteration += 1
    ckpt = job.checkpointer
    getattr(ckpt, end)()
    ckpt.step()
    job.run(STEPS + 2)
    calls: list[tuple[type[TierckptError], Callable[[], Any]]] = [
        (TierckptError, ckpt.save),
        (TierckptError, lambda: ckpt.save(now=True)),
        (RestoreError, ckpt.restore),
        (PinError, lambda: ckpt.pin(STEPS)),
        (PinError, lambda: ckpt.unpin(STEPS)),
    ]
    for kind, call in calls:
        with pytest.raises(kind, match=r"after close\(\) or abandon\(\)"):
            call()
    assert ckpt.wait() or end == "abandon"
    ckpt.close()
    ckpt.abandon()
    assert job.fingerprint() == course[STEPS + 2]


def test_a_run_that_restored_nothing_keeps_the_existing_versions(
    path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    """Also in a slot that the run does not use itself."""
    settings |= {"local_every_steps": 0}
    job = TinyJob(path, slots=3, **settings).run(STEPS)
    job.checkpointer.wait()
    job.checkpointer.abandon()
    sealed = job.checkpointer._resources.job.sealed()
    slots = {slot: manifest.id.version for slot, manifest in sealed}
    newest = max(slots, key=lambda slot: slots[slot])
    newest.rename(third := newest.with_name("r00000.2.kept"))
    for slot in newest.parent.glob("r00000.[0-2]"):
        slot.unlink()
    third.rename(third.with_suffix(""))
    left = in_shm(shm_dir)
    with TinyJob(path, slots=2, **settings):
        pass
    assert sorted(in_shm(shm_dir)) == sorted(left)
    assert back_from(path, {**settings, "slots": 3}) == (STEPS, {"memory": 1}, course[STEPS])


def test_a_restore_drops_gradients(path: Path, settings: Any) -> None:
    """In a loop that clears gradients after its steps, the next backward pass would add to them."""
    with TinyJob(path, **settings) as job:
        job.run(STEPS)
        for param in job.model.parameters():
            param.grad = torch.full_like(param, torch.nan)
        job.restore()
        assert [p.grad for p in job.model.parameters()] == [None] * len([*job.model.parameters()])


# --- from callbacks ------------------------------------------------------------------------------


def close_at(name: str, level: str | None = None) -> Callable[[TinyJob], None]:
    """Let a callback close the job's checkpointer at each such event."""

    def listen(job: TinyJob) -> None:
        def on_event(event: tierckpt.Event) -> None:
            if event.name == name and level in (None, event.level):
                job.checkpointer.close()

        job.checkpointer._log.add_callback(on_event)

    return listen


@pytest.mark.parametrize("name", ["sealed", "committed"])
def test_close_in_the_callback_of_an_event_is_done_at_a_boundary(
    name: str, path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    """The event may come during a step: the step is made, and training continues without
    checkpoints."""
    with TinyJob(path, **settings) as job:
        close_at(name)(job)
        job.checkpointer._reports.notice("one for the callback", logging.INFO)
        job.run(STEPS)
        assert job.checkpointer.closed
        (closed,) = job.heard("closed")
        assert 0 < closed.version < STEPS
        assert job.fingerprint() == course[STEPS]
    assert in_shm(shm_dir) == []
    assert back_from(path, settings) == (closed.version, {"local": 1}, course[closed.version])


def test_close_in_a_callback_that_close_itself_calls_changes_nothing(
    path: Path, settings: Any, course: dict[int, str], shm_dir: Path, caplog: Any
) -> None:
    job = TinyJob(path, local_every_steps=100, **settings)
    job.checkpointer.add_callbacks(closing := ClosingAtBoundaries(job, STEPS))
    close_at("closed")(job)
    close_at("committed")(job)
    job.run(STEPS - 1)
    job.train_one()
    job.checkpointer.close()
    assert closing.called == STEPS
    assert len(job.heard("closed")) == 1
    assert [r for r in caplog.records if r.exc_info] == []
    assert in_shm(shm_dir) == []
    assert back_from(path, settings)[2] == course[STEPS]


class ClosingAtBoundaries(tierckpt.Callbacks):
    """Close the checkpointer at boundaries from version `since` on."""

    def __init__(self, job: TinyJob, since: int) -> None:
        self.job, self.since, self.called = job, since, 0

    def on_step_boundary(self, version: int) -> None:
        self.called += 1
        if version >= self.since:
            self.job.checkpointer.close()


def test_close_where_a_boundary_is_over_is_done_at_once(
    path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    with TinyJob(path, **settings) as job:
        job.checkpointer.add_callbacks(ClosingAtBoundaries(job, 3))
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]
    assert [event.version for event in job.heard("closed")] == [3]
    assert in_shm(shm_dir) == []
    assert back_from(path, settings) == (3, {"local": 1}, course[3])


def test_a_save_at_the_last_boundary_is_completed_first(
    path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    with TinyJob(path, local_every_steps=100, **settings) as job:
        job.run(3)
        job.checkpointer.add_callbacks(ClosingAtBoundaries(job, 3))
        job.checkpointer.save(now=True)
        assert not job.checkpointer.closed
        assert versions_on_disk(path) == [3]
        job.run(STEPS)
        assert job.checkpointer.closed


@pytest.mark.parametrize("method", ["restore", "pin", "save"])
def test_a_collective_call_is_refused_in_an_event_callback(
    method: str, path: Path, settings: Any, course: dict[int, str]
) -> None:
    refused = []
    arguments: dict[str, Any] = {"pin": {"version": 1}, "unpin": {"version": 1}}
    arguments["save"] = {"now": True}

    with TinyJob(path, **settings) as job:

        def on_event(event: tierckpt.Event) -> None:
            try:
                getattr(job.checkpointer, method)(**arguments.get(method, {}))
            except TierckptError as error:
                refused.append(str(error))

        job.run(1)
        job.checkpointer._log.add_callback(on_event)
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]
        while_training = {*refused}
    (text,) = while_training
    assert "in the callback of an event" in text
    assert back_from(path, settings)[2] == course[STEPS]


ASKS_AT_THE_LAST_STEP = """
import sys
from tierckpt.checkpointer.adapter import PlainAdapter
from tierckpt.events import JobEnd
from tierckpt.testing import TinyJob

path, shm_dir, steps, fails = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
job = TinyJob(path, shm_dir=shm_dir, agent="inline", local_every_steps=100)
job.checkpointer._log.add_callback(lambda e: e.version == steps and job.checkpointer.close())
job.run(steps)
job.checkpointer._log.emit("notice", version=steps)
if fails:
    raise KeyError(fails)
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("fails", [False, True])
def test_close_that_no_boundary_follows_is_done_when_the_process_ends(
    fails: bool, path: Path, settings: Any, course: dict[int, str], shm_dir: Path
) -> None:
    """But not after an error, which leaves all versions to a successor."""
    command = [PYTHON, "-c", ASKS_AT_THE_LAST_STEP, path, shm_dir, str(STEPS)]
    ended = subprocess.run([*command, *["fail"][: int(fails)]], capture_output=True, timeout=120)
    assert ended.returncode == int(fails), ended.stderr
    assert bool(in_shm(shm_dir)) == fails
    level = "memory" if fails else "local"
    assert back_from(path, settings) == (STEPS, {level: 1}, course[STEPS])


NEVER_CLOSES = """
import sys
from tierckpt.testing import TinyJob

path, shm_dir, fails = sys.argv[1], sys.argv[2], sys.argv[3:]
job = TinyJob(path, shm_dir=shm_dir, agent="inline", local_every_seconds=0)
job.run(2)
if fails:
    raise KeyError(fails)
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("fails", [False, True])
def test_a_script_that_only_forgets_to_close_is_warned(
    fails: bool, path: Path, shm_dir: Path
) -> None:
    """A script that failed left its versions in memory on purpose."""
    command = [PYTHON, "-c", NEVER_CLOSES, path, shm_dir, *["fail"][: int(fails)]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == int(fails), ended.stderr
    assert ("the script ends without ckpt.close()" in ended.stderr) != fails
    assert in_shm(shm_dir)


# --- the last word -------------------------------------------------------------------------------

OVER = """
import sys
from tierckpt.checkpointer.checkpointer import close_at_exit
from tierckpt.testing import TinyJob
job = TinyJob(sys.argv[1], shm_dir=sys.argv[2], agent="inline", requeue_exit_status=9,
    persistent_path=sys.argv[3], persistent_every_steps=1)
if sys.argv[4] == "exit":
    close_at_exit(lambda: job.checkpointer)
job.run(5)
if sys.argv[4] == "close":
    job.checkpointer.close()
    print("not reached")
"""


def test_the_end_names_each_level_and_what_is_missing_there(
    path: Path, settings: Any, tmp_path: Path
) -> None:
    """The place of the last level is a file: its failures are not shown any more by then."""
    store = tmp_path / "store"
    far = {"persistent_path": str(store), "persistent_every_steps": 1}
    with TinyJob(path, **settings, **far) as job:
        job.run(STEPS)
    assert job.checkpointer.end == job.checkpointer.close()
    assert job.checkpointer.end == JobEnd(STEPS, {"local": STEPS, "persistent": STEPS})
    (event,) = job.heard("ended")
    assert event.message == f"the job ends: v{STEPS} is stored in {path} and {store}"
    shutil.rmtree(store)
    store.touch()
    with TinyJob(path, **settings, **far) as job:
        job.restore()
        last = job.run(STEPS + 5).checkpointer.version
    end = job.checkpointer.end
    assert end == JobEnd(last, {"local": last, "persistent": None}, ("persistent",))
    assert not end.complete
    (event,) = job.heard("ended")
    assert event.severity == logging.ERROR
    assert f"v{last} is missing: {store} has no version. It is stored in {path}" in event.message
    store.unlink()
    with TinyJob(path, **settings, **far) as job:
        assert job.restore() == last
        state = job.fingerprint()
    assert job.checkpointer.end == JobEnd(last, {"local": last, "persistent": last})
    shutil.rmtree(path)
    with TinyJob(path, **settings, **far) as job:
        assert job.restore() == last
        assert job.fingerprint() == state


def test_an_error_says_what_it_leaves(path: Path, settings: Any) -> None:
    job = TinyJob(path, **settings).run(STEPS)
    job.settle()
    job.run(STEPS + 2)  # a version's result is known two boundaries later
    job.__exit__(ValueError, ValueError(), None)
    (event,) = job.heard("ended")
    assert f"an error ends the training after v{STEPS + 2}; " in event.message
    assert f"memory has v{STEPS}, {path} has v{STEPS}" in event.message


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("how", ["close", "exit"])
def test_a_setting_makes_an_incomplete_end_an_exit_status(
    how: str, path: Path, tmp_path: Path, shm_dir: Path
) -> None:
    (store := tmp_path / "store").touch()
    command = [PYTHON, "-c", OVER, str(path), str(shm_dir), str(store), how]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (9, ""), ended.stderr
    assert f"v5 is missing: {store} has no version" in ended.stderr
