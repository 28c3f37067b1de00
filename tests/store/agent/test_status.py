"""The agent's answers to watchers: counters, tasks, and a socket of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import end, python
from tierckpt.agent import (
    GONE,
    RUNS,
    SILENT,
    Activity,
    AgentFiles,
    AgentStatus,
    CommitFailed,
    Committed,
    Flushed,
    FlushFailed,
    Problem,
    StatusServer,
    Task,
    find_agents,
)
from tierckpt.format import VersionId
from tierckpt.storage import JobDirectory, holder

HOLDER = """
import sys
from pathlib import Path
from tierckpt.storage.job_directory import take_lock

fd = take_lock(Path(sys.argv[1]))
print("busy" if fd is None else "held", flush=True)
sys.stdin.read()
"""
V7, V8 = VersionId(1, 7), VersionId(1, 8)


@pytest.fixture
def place(shm_dir: Path) -> AgentFiles:
    job = JobDirectory.at(shm_dir, "job")
    job.create()
    return AgentFiles(job, 0)


STATUS = AgentStatus(4242, "here", 1.0, tuple(range(3000)), (), False, 0.0, (), ())
"""Longer than a packet."""


def test_each_connection_gets_the_status(place: AgentFiles) -> None:
    server = StatusServer(place.listen_for_watchers(), lambda: STATUS)
    try:
        for _ in range(3):
            [agent] = find_agents(place.job)
            assert (agent.state, agent.pid, agent.status) == (RUNS, 4242, STATUS)
    finally:
        server.close()
    assert find_agents(place.job) == []


def test_a_watcher_that_hangs_up_does_not_end_the_answers(place: AgentFiles) -> None:
    server = StatusServer(place.listen_for_watchers(), lambda: STATUS)
    try:
        for _ in range(3):
            channel = place.connect_as_watcher()
            assert channel is not None
            channel.close()
        assert find_agents(place.job)[0].status == STATUS
    finally:
        server.close()


def test_an_error_costs_one_answer(place: AgentFiles) -> None:
    answers = iter([RuntimeError("changed size"), STATUS])

    def status() -> AgentStatus:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    server = StatusServer(place.listen_for_watchers(), status)
    try:
        assert find_agents(place.job) == []
        assert find_agents(place.job)[0].status == STATUS
    finally:
        server.close()


def test_an_agent_that_left_its_lock_was_killed(place: AgentFiles) -> None:
    place.lock.write_text("777")
    [agent] = find_agents(place.job)
    assert (agent.state, agent.pid, agent.status) == (GONE, 777, None)


@pytest.fixture
def other(place: AgentFiles) -> Iterator[int]:
    """Another process, which has the lock of the agent: this one would drop its own by looking."""
    process = python(HOLDER, place.lock)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process.pid
    end(process)


def test_an_unknown_answer_is_none(place: AgentFiles, other: int) -> None:
    with place.listen_for_watchers() as listener:

        def garbage() -> None:
            channel, _ = listener.accept()
            channel.send(b"{}")
            channel.close()

        thread = threading.Thread(target=garbage)
        thread.start()
        [agent] = find_agents(place.job)
        thread.join()
    assert (agent.state, agent.pid) == (SILENT, other)
    assert "unknown message" in agent.why


def test_a_lock_is_looked_at_without_being_taken(
    place: AgentFiles, request: pytest.FixtureRequest
) -> None:
    place.lock.touch()
    assert holder(place.lock) is None
    other = request.getfixturevalue("other")  # it gets the lock
    assert holder(place.lock) == other
    assert find_agents(place.job)[0].state == SILENT


def test_results_are_counted_by_level() -> None:
    activity = Activity()
    activity.record(Committed(V7, 100, 0.5, 0.25, True))
    activity.record(Committed(V7, 300, 0.5, 0.5, True))
    activity.record(CommitFailed(V8, "OSError: full"))
    activity.record(FlushFailed(V7, "a newer one came", superseded=True))
    activity.record(Flushed(V8, 400, 2.0, complete=False))
    activity.record(Problem("no result"))
    local, persistent = activity.levels({"persistent": 2})
    assert (local.stored, local.failed, local.stored_bytes) == (2, 1, 400)
    assert (local.newest, local.last_bytes, local.last_seconds) == (V7, 300, 1.0)
    assert local.last_failure == "v8: OSError: full"
    assert (persistent.stored, persistent.superseded, persistent.waiting) == (1, 1, 2)
    assert persistent.failed == 0


def test_commits_are_tasks_while_they_last() -> None:
    activity = Activity()
    with activity.commit(V7, 3, 1000):
        [task] = activity.commits()
        assert (task.level, task.id, task.shard, task.total_bytes) == ("local", V7, 3, 1000)
    assert activity.commits() == []


def test_an_order_is_quiet_from_the_first_look_at_a_thread_that_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    activity = Activity()
    began, over = threading.Event(), threading.Event()

    def wait() -> None:
        with activity.order():
            began.set()
            over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    began.wait()
    work = iter(["as it began", "as it began", "more"])
    monkeypatch.setattr("tierckpt.agent.status._work_of", lambda thread: next(work))
    quiet = []
    for now[0] in (3.0, 8.0, 9.0):
        quiet.append(activity.local_quiet_seconds())
    over.set()
    thread.join()
    assert quiet == [0.0, 5.0, 0.0]


def test_a_task_counts_each_attempt_from_zero() -> None:
    task = Task("persistent", V7)
    assert task.status().total_bytes == 0
    task.restart(100)
    task.advance(60)
    task.advance(60)
    assert task.status().done_bytes == 100, "the total is an upper bound of windows, too"
    task.restart(80)
    assert (task.status().done_bytes, task.status().total_bytes) == (0, 80)
