"""One process, start to end: killed anywhere, it goes on as if it never had been."""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tierckpt import ending, patience, snapshot
from tierckpt.agentclient import AgentClient
from tierckpt.errors import RestoreError, StateMismatchError
from tierckpt.naming import FORMAT_MAJOR, ShardKey
from tierckpt.snapshot import Snapshot
from tierckpt.testing import TinyJob, run_in_child
from tierckpt.testing.jobs import fired, tiny_model, train

STEPS = 8


@pytest.fixture(scope="module")
def course() -> dict[int, str]:
    """Fingerprints after every step of a job that has no Checkpointer at all."""
    job = TinyJob(None)
    found: dict[int, str] = {}
    for iteration in range(1, 2 * STEPS + 1):
        job.run(iteration)
        found[iteration] = job.fingerprint()
    return found


@pytest.fixture
def settings(shm_dir: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ckpts"


def versions_on_disk(path: Path) -> list[int]:
    keys = (ShardKey.parse(p.name.removesuffix(".manifest")) for p in path.glob("*.manifest"))
    return sorted(key.id.version for key in keys if key)


def in_shm(shm_dir: Path) -> list[str]:
    return [p.name for p in shm_dir.rglob("*")]


# --- the plain way -------------------------------------------------------------------------------


def test_checkpointing_changes_nothing(path: Path, settings: Any, course: dict[int, str]) -> None:
    with TinyJob(path, **settings) as job:
        for step in range(1, STEPS + 1):
            job.run(step)
            assert job.fingerprint() == course[step]


@pytest.mark.parametrize("release", ["backward", "forward"])
def test_a_job_that_was_closed_goes_on(
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


def test_closing_leaves_files_and_nothing_in_memory(
    path: Path, settings: Any, shm_dir: Path
) -> None:
    with TinyJob(path, **settings) as job:
        job.run(STEPS)
        assert in_shm(shm_dir)
    assert in_shm(shm_dir) == []
    assert versions_on_disk(path)[-1] == STEPS


def test_closing_without_a_step_leaves_nothing_at_all(
    path: Path, settings: Any, shm_dir: Path
) -> None:
    with TinyJob(path, **settings):
        pass
    assert in_shm(shm_dir) == []
    assert versions_on_disk(path) == []


def test_letting_go_leaves_the_newest_version_in_memory(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    job = TinyJob(path, local_every_steps=0, **settings)
    job.run(STEPS)
    job.checkpointer.save(now=True)  # the last version is whole, and stays in its slot
    job.checkpointer.abandon()
    assert versions_on_disk(path) == []
    with TinyJob(path, seed=99, local_every_steps=0, **settings) as second:
        restored = second.restore()
        assert (int(restored), restored.levels) == (STEPS, {"memory": 1})
        assert second.fingerprint() == course[STEPS]


def test_an_exception_leaves_everything_for_the_successor(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    def train_and_fail() -> None:
        with TinyJob(path, **settings) as job:
            job.run(STEPS)
            job.train_one()  # the barrier: what was being copied is complete
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    with TinyJob(path, seed=99, **settings) as second:
        restored = second.restore()
        assert (int(restored), restored.levels) == (STEPS, {"memory": 1})
        second.run(STEPS + 2)
        assert second.fingerprint() == course[STEPS + 2]


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
        job.checkpointer.save(now=True)  # once more of the same: nothing to do, no harm
        assert versions_on_disk(path) == [3]
        assert not job.heard("failed")


def test_saving_now_waits_for_a_copier_that_is_slow_to_hand_over(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TinyJob(path, local_every_steps=0, local_every_seconds=1e9, **settings) as job:
        job.run(2)
        job.settle()
        pool, work = job.checkpointer._pool, Snapshot.work

        def filled_late(*arguments: Any) -> None:
            time.sleep(0.3)
            original(*arguments)

        def work_in_copier(self: Snapshot) -> bool:
            return threading.current_thread() is not threading.main_thread() and work(self)

        original = pool.filled
        monkeypatch.setattr(pool, "filled", filled_late)
        monkeypatch.setattr(Snapshot, "work", work_in_copier)
        job.train_one()
        job.checkpointer.save(now=True)
        assert versions_on_disk(path) == [3]


def test_saving_later_happens_at_the_next_boundary_but_one(path: Path, settings: Any) -> None:
    with TinyJob(path, local_every_steps=0, local_every_seconds=1e9, **settings) as job:
        job.run(3)
        job.checkpointer.save()
        job.run(7)
        job.settle()
        assert len(versions_on_disk(path)) == 1
        assert versions_on_disk(path)[0] in (4, 5)


def test_restoring_twice_is_restoring_once(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    with TinyJob(path, **settings) as job:
        job.run(STEPS)
    with TinyJob(path, seed=99, **settings) as job:
        assert [int(job.restore()), int(job.restore())] == [STEPS, STEPS]
        assert job.fingerprint() == course[STEPS]
        job.run(STEPS + 3)
        assert job.fingerprint() == course[STEPS + 3]


# --- killed --------------------------------------------------------------------------------------

VERSION = 5
KILLS = [
    # (where, oldest version that may be left): v4 is complete in memory before v5 is begun with
    (f"kill@barrier:version={VERSION}", VERSION - 1),
    (f"kill@refill:version={VERSION}", VERSION - 1),
    (f"kill@copy:version={VERSION}", VERSION - 1),
    (f"kill@copy:version={VERSION},hit=2", VERSION - 1),
    (f"kill@tree:version={VERSION}", VERSION - 1),
    (f"kill@seal:version={VERSION}", VERSION - 1),
    (f"kill@sealed:version={VERSION}", VERSION),
]


@pytest.mark.parametrize("release", ["backward", "forward"])
@pytest.mark.parametrize(("rules", "oldest"), KILLS, ids=[k for k, _ in KILLS])
def test_killed_anywhere_it_resumes_bit_for_bit(
    rules: str,
    oldest: int,
    release: str,
    path: Path,
    marks: Path,
    settings: Any,
    course: dict[int, str],
) -> None:
    settings["release"] = release
    status = run_in_child(train, str(path), STEPS, settings, rules=rules, marks=marks)
    assert (status, len(fired(marks))) == (-signal.SIGKILL, 1)
    with TinyJob(path, seed=99, **settings) as job:
        restored = job.restore()
        assert oldest <= restored <= VERSION
        assert restored.rejected == ()
        assert job.fingerprint() == course[int(restored)]
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]


@pytest.mark.parametrize("rules", [f"kill@agent:version={VERSION}", "kill@file:hit=25"])
def test_a_killed_agent_costs_no_step_and_is_replaced(
    rules: str, path: Path, marks: Path, settings: Any, course: dict[int, str]
) -> None:
    status = run_in_child(train, str(path), STEPS, settings, rules=rules, marks=marks)
    assert (status, len(fired(marks))) == (0, 1)
    assert versions_on_disk(path)[-1] == STEPS
    with TinyJob(path, seed=99, **settings) as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == course[STEPS]


def test_memory_lost_too_it_resumes_from_disk(
    path: Path, marks: Path, settings: Any, shm_dir: Path, course: dict[int, str]
) -> None:
    """A reboot: what was in memory is gone."""
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


def test_killed_twice_it_still_resumes(
    path: Path, marks: Path, settings: Any, course: dict[int, str]
) -> None:
    rules = "kill@seal:version=3;kill@refill:version=6"
    for life, count in enumerate((1, 2)):
        status = run_in_child(
            train, str(path), STEPS, settings, restore=life > 0, rules=rules, marks=marks
        )
        assert (status, len(fired(marks))) == (-signal.SIGKILL, count)
    with TinyJob(path, seed=99, **settings) as job:
        restored = job.restore()
        assert restored == 5
        assert restored.generation == 2
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]


# --- lives ---------------------------------------------------------------------------------------


def test_going_back_makes_the_versions_in_between_nobodys_past(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    settings["local_keep_last"] = 20
    with TinyJob(path, **settings) as first:
        first.run(STEPS)
    with TinyJob(path, seed=99, **settings) as second:
        assert second.restore(version=3) == 3
        assert second.fingerprint() == course[3]
        torch.manual_seed(1234)  # from here on another history
        second.run(5)
        other = second.fingerprint()
        assert other != course[5]
    with TinyJob(path, seed=98, **settings) as third:
        restored = third.restore()
        assert (int(restored), restored.generation) == (5, 2)
        assert third.fingerprint() == other
        with pytest.raises(RestoreError, match="v7"):
            third.restore(version=7)  # of the history that was given up
        assert third.restore(version=2) == 2
        assert third.fingerprint() == course[2]


def test_going_back_within_one_life(path: Path, settings: Any, course: dict[int, str]) -> None:
    with TinyJob(path, local_keep_last=20, **settings) as job:
        job.run(STEPS)
        job.settle()
        assert job.restore(version=4) == 4
        assert job.fingerprint() == course[4]
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]


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
            assert given_up.wait(60)
            return choose(*arguments)

        monkeypatch.setattr(pool, "choose", choose_late)
        job.run(3)
        assert job.checkpointer._underway.snapshot is not None
        job.checkpointer._underway.snapshot.fail(RuntimeError("as restore() and a time-out do"))
        given_up.set()
        job.run(STEPS)
        assert job.heard("sealed")[-1].version >= STEPS - 1
    assert versions_on_disk(path)[-1] == STEPS


def test_a_version_that_is_not_there_is_an_error_and_changes_nothing(
    path: Path, settings: Any, course: dict[int, str]
) -> None:
    with TinyJob(path, **settings) as job:
        job.run(3)
        job.settle()
        with pytest.raises(RestoreError, match="no complete, sound v77"):
            job.restore(version=77)
        assert job.fingerprint() == course[3]
        job.run(STEPS)
        assert job.fingerprint() == course[STEPS]
    assert versions_on_disk(path)[-1] == STEPS


def test_a_fresh_start_beside_old_files_keeps_them_and_says_so(path: Path, settings: Any) -> None:
    with TinyJob(path, local_keep_last=1, **settings) as old:
        old.run(STEPS)
    before = {p.name: p.read_bytes() for p in path.glob("v*")}
    with TinyJob(path, seed=5, local_keep_last=1, **settings) as fresh:
        fresh.run(4)
        expected = fresh.fingerprint()
        assert any("starts afresh" in e.message for e in fresh.heard("notice"))
    assert {n: (path / n).read_bytes() for n in before} == before
    with TinyJob(path, seed=99, **settings) as third:
        assert third.restore() == 4
        assert third.fingerprint() == expected


# --- structure -----------------------------------------------------------------------------------


@pytest.fixture
def closed(path: Path, settings: Any) -> Path:
    with TinyJob(path, **settings) as job:
        job.run(3)
    return path


def widened() -> torch.nn.Module:
    model = tiny_model()
    model[4] = torch.nn.Linear(24, 5)
    model.add_module("extra", torch.nn.Identity())
    return model


def test_another_structure_is_refused_difference_by_difference(closed: Path, settings: Any) -> None:
    torch.manual_seed(1)
    with TinyJob(closed, model=widened(), **settings) as job:
        before = job.fingerprint()
        with pytest.raises(StateMismatchError) as caught:
            job.restore()
        assert job.fingerprint() == before
        assert caught.value.differences == (
            "model/4.bias is float32[4] in the checkpoint, float32[5] live",
            "model/4.weight is float32[4, 24] in the checkpoint, float32[5, 24] live",
        )
        assert "nothing was changed" in str(caught.value)
        assert "strict=False" in str(caught.value)


def test_missing_and_surplus_parts_are_named(closed: Path, settings: Any) -> None:
    model = tiny_model()
    model[0] = torch.nn.Linear(12, 24, bias=False)
    model.add_module("new", torch.nn.BatchNorm1d(3))
    with (
        TinyJob(closed, model=model, **settings) as job,
        pytest.raises(StateMismatchError) as caught,
    ):
        job.restore()
    said = "\n".join(caught.value.differences)
    assert "model/0.bias float32[24] is in the checkpoint, not in the model" in said
    assert "model/new.weight is in the model, not in the checkpoint" in said
    assert "buffer/new.running_mean is in the model" in said
    assert "optimizer group 0: without 0.bias with new new.bias, new.weight" in said


def test_not_strict_loads_what_fits_and_leaves_the_rest(
    closed: Path, settings: Any, course: dict[int, str]
) -> None:
    with TinyJob(closed, seed=99, **settings) as reference:
        reference.restore()
        saved = {n: t.clone() for n, t in reference.model.state_dict().items()}
    torch.manual_seed(1)
    model = widened()
    own_head = model[4].weight.detach().clone()
    with TinyJob(closed, model=model, **settings) as job:
        restored = job.restore(strict=False)
        assert restored == 3
        for name, tensor in job.model.state_dict().items():
            if name.startswith("4."):
                continue
            assert torch.equal(tensor, saved[name])
        assert torch.equal(job.model[4].weight, own_head)
        accepted = [e.message for e in job.heard("notice") if "accepted" in e.message]
        assert len(accepted) == 2
        job.run(6)


def test_the_first_released_block_wakes_the_copier_and_the_boundary_does_not(
    path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the boundary it would take the interpreter from the forward pass, for nothing yet."""
    monkeypatch.setattr(snapshot, "QUIET_SECONDS", 1e6)
    # Not "auto": on a busy machine that would begin to copy early.
    with TinyJob(path, local_every_steps=0, release="backward", **settings) as job:
        checkpointer, woken = job.checkpointer, list[int]()
        checkpointer._underway.release_early = False  # as where an adapter releases by layer
        submit = checkpointer._underway._copier.submit

        def watched(snapshot: Snapshot) -> None:
            woken.append(snapshot.head.version)
            submit(snapshot)

        monkeypatch.setattr(checkpointer._underway._copier, "submit", watched)
        job.run(2)
        assert woken == [1, 2]  # at once, as slots are to be made, which takes longer
        job.run(3)
        assert woken == [1, 2]
        for parameter in job.model.parameters():
            checkpointer.release([parameter])
            assert woken == [1, 2, 3]
        job.run(5)  # nothing is released but by the barrier
        assert woken == [1, 2, 3, 4]
        assert [e.version for e in job.heard("sealed")] == [1, 2, 3, 4]


def test_a_hooked_model_can_be_copied_and_saved(tmp_path: Path, shm_dir: Path) -> None:
    """An EMA copy of the model must not drag the checkpointer along, or call it."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tierckpt.Checkpointer(
        model, optimizer, path=tmp_path / "c", shm_dir=shm_dir, boundary="forward"
    ) as ckpt:
        ckpt.restore()
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "whole.pt")
        loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
        for each in (twin, loaded):
            assert torch.equal(each(torch.ones(3)), model(torch.ones(3)))
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        twin(torch.ones(3))
        assert ckpt.version == 0  # the twin's forward pass is no boundary of ours
        model(torch.ones(3))
        assert ckpt.version == 1


@pytest.mark.parametrize("keyword", [False, True])
def test_a_loop_whose_forward_is_in_the_optimizers_closure(
    keyword: bool, path: Path, settings: Any
) -> None:
    """No forward pass between two steps: the boundary is where the next step begins."""
    with TinyJob(path, boundary="forward", **settings) as job:
        inputs, target = torch.randn(8, 12), torch.zeros(8, dtype=torch.int64)

        def closure() -> torch.Tensor:
            job.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(job.model(inputs), target)
            loss.backward()
            return loss

        for _ in range(5):
            job.optimizer.step(closure=closure) if keyword else job.optimizer.step(closure)
        assert job.checkpointer.version == 4
        job.checkpointer.wait()
        assert [e.version for e in job.heard("sealed")] == [1, 2, 3, 4]


@pytest.mark.parametrize("given", ["the one that steps", "another one"])
def test_an_optimizer_that_never_steps_is_told_of(
    given: str,
    path: Path,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's optimizer is not the checkpointer's: nothing would ever be saved, silently."""
    monkeypatch.setattr("tierckpt.iterations.STEPLESS_CALLS", 20)
    model = torch.nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    watched = optimizer if given == "the one that steps" else other
    with tierckpt.Checkpointer(model, watched, path=path, **settings) as checkpointer:
        for call in range(1, 61):
            model(torch.ones(1, 2)).sum().backward()
            if call % 20 == 0:  # as many micro-batches as there may be without a word
                optimizer.step()
            checkpointer.step()
        version = checkpointer.version
    said = [r for r in caplog.records if "made no step" in r.getMessage()]
    if given == "the one that steps":
        assert (version, said) == (3, [])
    else:
        assert version == 0
        assert [r.levelname for r in said] == ["ERROR"], "once, and loudly"


@pytest.mark.parametrize("when", ["from the beginning", "later"])
def test_no_thread_to_reach_the_agent_costs_versions_on_disk_and_no_more(
    when: str, path: Path, settings: Any, course: dict[int, str], monkeypatch: Any
) -> None:
    """As where a container allows no more threads; then it does again."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "tierckpt-agent-reach":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        if when == "from the beginning":
            patch.setattr(threading.Thread, "start", refused)
        job = TinyJob(path, local_every_steps=1, **settings)
        job.run(2)
        if when == "later":
            assert job.checkpointer.wait()
            patch.setattr(threading.Thread, "start", refused)
            process = job.checkpointer._agent._process
            assert process is not None
            process.kill()
            process.wait()
        job.run(STEPS)
    with job:
        job.run(STEPS + 2)
        assert job.checkpointer.wait()
        job.run(STEPS + 4)
    assert job.fingerprint() == course[STEPS + 4]
    assert any("start new thread" in event.text() for event in job.events)
    assert STEPS + 4 in versions_on_disk(path)


def test_what_fails_after_the_seal_costs_that_version_and_not_the_training(
    path: Path, settings: Any, course: dict[int, str], monkeypatch: Any
) -> None:
    with TinyJob(path, local_every_steps=1, **settings) as job:
        job.run(2)
        assert job.checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(AgentClient, "commit", lambda *_: 1 / 0)
            job.run(4)
            assert job.checkpointer.wait()
        job.run(STEPS)
        assert job.checkpointer.wait()
        failed = [event.version for event in job.heard("failed", "local")]
        assert failed == [3, 4]
        assert all("ZeroDivisionError" in event.text() for event in job.heard("failed", "local"))
    assert job.fingerprint() == course[STEPS]
    assert STEPS in versions_on_disk(path)


def test_a_version_of_a_newer_format_ends_the_restart(
    path: Path, settings: Any, course: dict[int, str], monkeypatch: Any
) -> None:
    with TinyJob(path, local_every_steps=1, local_keep_last=8, **settings) as job:
        job.run(2)
    with monkeypatch.context() as patch:
        for module in ("naming", "sealed", "shardfile"):
            patch.setattr(f"tierckpt.{module}.FORMAT_MAJOR", FORMAT_MAJOR + 1)
        kept = {"local_every_steps": 1, "local_keep_last": 8, "agent": "inline"}
        with TinyJob(path, **kept, **settings) as job:
            job.restore()
            job.run(3)
    with TinyJob(path, local_keep_last=8, **settings) as job:
        before = job.fingerprint()
        with pytest.raises(
            RestoreError, match=r"newer tierckpt was here: .*/v0*3\..*format version 2"
        ):
            job.restore()
        assert job.fingerprint() == before
        assert job.restore(version=2).version == 2
        assert job.fingerprint() == course[2]


def end_with_a_dead_disk(path: Path, settings: dict[str, Any], report: Path) -> None:
    """In a process of its own: the agent answers no more, as one that is stuck in the kernel."""
    patience.QUIET_SECONDS = ending.NOTICE_SECONDS = 0.2
    with TinyJob(path, **settings) as job:
        job.run(2)
        job.settle()
        agent = job.checkpointer._agent
        pid = agent.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        agent.close = partial(agent.close, 0.2)  # type: ignore[method-assign]
        job.run(STEPS)
    os.kill(pid, signal.SIGKILL)
    told = [(e.name, e.version, e.level, e.message) for e in job.events if e.severity > 30]
    report.write_text(json.dumps(told))


def test_a_dead_disk_does_not_keep_the_job_from_ending(
    path: Path, settings: Any, tmp_path: Path, course: dict[int, str]
) -> None:
    settings = {**settings, "when_busy": "skip", "slots": 3}
    assert run_in_child(end_with_a_dead_disk, path, settings, tmp_path / "report") == 0
    told = json.loads((tmp_path / "report").read_text())
    assert STEPS not in versions_on_disk(path)
    behind = [(v, text) for name, v, level, text in told if (name, level) == ("failed", "local")]
    assert STEPS in [v for v, _ in behind]
    assert all(f"{path} does not answer, and the job ends" in text for _, text in behind)
    assert f"v{STEPS} is not durable everywhere" in told[-1][3]
    with TinyJob(path, seed=99, **settings) as job:
        assert job.restore() == STEPS
        assert job.checkpointer.restored.levels == {"memory": 1}
        assert job.fingerprint() == course[STEPS]
