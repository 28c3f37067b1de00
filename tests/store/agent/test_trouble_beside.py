"""Trouble outside the training costs versions, but neither the training nor its end."""

from __future__ import annotations

import json
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.support import limits
from tests.support.tiny_course import STEPS, versions_on_disk
from tierckpt.agent import AgentClient
from tierckpt.testing import TinyJob, run_in_child


@pytest.mark.parametrize("when", ["from the beginning", "later"])
def test_no_thread_to_reach_the_agent_costs_versions_on_disk_and_no_more(
    when: str, path: Path, settings: Any, course: dict[int, str], monkeypatch: Any
) -> None:
    """Allow no more threads for a while, as in a limited container."""
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
            process = job.checkpointer._agent._connection._process
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


def test_a_failure_after_the_seal_costs_that_version_and_not_the_training(
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


def end_with_a_dead_disk(path: Path, settings: dict[str, Any], report: Path) -> None:
    """The agent, in its own process, does not answer any more, as if stuck in the kernel."""
    for limit in (limits.QUIET_LEVEL, limits.FINAL_NOTICE):
        limit.set(pytest.MonkeyPatch(), 0.2)
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
    assert all(f"{path} has not stored it in " in text for _, text in behind)
    assert f"v{STEPS} is not durable" in told[-2][3]
    assert told[-1][0] == "ended"
    assert f"v{STEPS} is missing" in told[-1][3]
    with TinyJob(path, seed=99, **settings) as job:
        assert job.restore() == STEPS
        assert job.checkpointer.restored.levels == {"memory": 1}
        assert job.fingerprint() == course[STEPS]


class FailsOnce:
    """A loader without a known position, once."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        self.calls += 1
        if self.calls == 5:
            raise ValueError("no position yet")
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load nothing."""


def test_a_state_dict_that_raises_within_a_step_costs_a_version(
    tmp_path: Path, shm_dir: Path
) -> None:
    """The callback is called before the step returns, in a loop without `step()`."""
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    events: list[tierckpt.Event] = []
    with tierckpt.Checkpointer(
        net,
        optimizer,
        path=tmp_path,
        shm_dir=shm_dir,
        agent="inline",
        boundary="forward",
        halt_signals="",
        extra_per_rank={"loader": FailsOnce()},
        local_every_steps=1,
        local_every_seconds=0,
        when_busy="wait",
        on_event=events.append,
    ) as ckpt:
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    lost = [e.version for e in events if "no position yet" in e.message]
    assert len(lost) == 1
    assert ckpt.version == 10
