"""Real jobs, as another process sees them: alive, killed, ended, and in the middle of a flush."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tierckpt.cli import run_command
from tierckpt.storage import JobDirectory, job_id_of
from tierckpt.testing import TinyJob, tiny_model
from tierckpt.watch import Observer, View

STEPS, FLUSHED = 8, 6
"""The version FLUSHED is known to be complete, and is flushed, at a later boundary."""
PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))


def train(path: str, channel: Connection, large: int, settings: dict[str, Any]) -> None:
    """A job that waits after its steps, and again after its flushes."""
    model = tiny_model()
    model.register_buffer("large", torch.zeros(large))
    with TinyJob(path, model=model, **settings) as job:
        for steps in (FLUSHED, STEPS):
            job.run(steps)
            job.checkpointer.wait()
        channel.send("there")
        channel.recv()
        job.checkpointer._agent.wait(None, everything=True)
        channel.send("flushed")
        channel.recv()


@dataclass
class Trainer:
    """A job's process, and the pipe over which it says how far it is."""

    process: ForkServerProcess
    channel: Connection

    def said(self, text: str) -> None:
        assert self.channel.poll(PATIENCE_SECONDS)
        assert self.channel.recv() == text

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


Run = Callable[..., Trainer]


@pytest.fixture
def run(tmp_path: Path, shm_dir: Path) -> Iterator[Run]:
    """`run(**settings)`: a job that has made its steps, and waits."""
    started = list[Trainer]()
    context = multiprocessing.get_context("forkserver")  # torch is imported once for all

    def start(large: int = 0, **settings: Any) -> Trainer:
        folders = {"events_dir": str(tmp_path / "events"), "shm_dir": str(shm_dir)}
        ours, theirs = context.Pipe()
        given = (str(tmp_path / "ckpts"), theirs, large, {**folders, **settings})
        started.append(Trainer(context.Process(target=train, args=given), ours))
        started[-1].process.start()
        theirs.close()
        started[-1].said("there")
        return started[-1]

    yield start
    for trainer in started:
        trainer.kill()
        trainer.process.close()
        trainer.channel.close()


def until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill(pid: int | None) -> None:
    """Kill a process, no child of this one, and wait for its end."""
    assert pid is not None
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        until(lambda: not _lives(pid))
    finally:
        os.close(fd)


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert run_command(["watch", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_job_from_its_steps_to_the_death_of_its_processes(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, ckpts = tmp_path / "shared", tmp_path / "ckpts"
    trainer = run(persistent_path=str(shared), persistent_every_steps=FLUSHED)
    trainer.channel.send("go on")
    trainer.said("flushed")
    view = json.loads(printed(capsys, ckpts, "--once", "--json"))

    assert view["schema"] == 1
    assert view["paths"] == [str(ckpts), str(shared)], "the job names the second one"
    job = view["job"]
    assert (job["state"], job["trainers_here"]) == ("runs", 1)
    assert job["restart"] == {**job["restart"], "version": STEPS, "levels": ["memory"]}
    assert job["steps_per_second"] > 0
    levels = {each["level"]: each for each in view["levels"]}
    assert {name: each["version"] for name, each in levels.items()} == {
        "memory": STEPS,
        "local": STEPS,
        "persistent": FLUSHED,
    }
    assert all(each["shards_seen"] == each["shards"] == 1 for each in levels.values())
    assert levels["memory"]["durable_since_seconds"] is None
    assert levels["persistent"]["durable_since_seconds"] <= view["time_seconds"]
    assert levels["local"]["write_bytes_per_second"] > 0
    assert levels["memory"]["stored"] == STEPS
    [agent] = view["agents"]
    assert (agent["state"], agent["trainers"], agent["waiting"]) == ("runs", [0], {})
    assert [(node["pid"], node["lives"]) for node in view["nodes"]] == [(trainer.process.pid, True)]
    assert view["events"]["files"] == 1
    assert view["events"]["stall_seconds"] > 0
    assert view["work"] == view["problems"] == view["notes"] == []

    kill(agent["pid"])
    text = printed(capsys, ckpts)  # no terminal: once
    assert f"process {agent['pid']}: gone, it was killed" in text
    assert "runs (1 on this machine)" in text

    trainer.kill()
    view = json.loads(printed(capsys, ckpts, "--once", "--json"))
    assert view["job"]["state"] == "stopped"
    assert view["job"]["evidence"].startswith("killed")
    assert view["job"]["restart"]["version"] == STEPS
    assert [node["lives"] for node in view["nodes"]] == [False]


def test_a_flush_to_a_slow_store(run: Run, tmp_path: Path) -> None:
    """The store takes one window at once, and then a byte a second."""
    settings = {"persistent_path": str(tmp_path / "shared"), "persistent_every_steps": FLUSHED}
    trainer = run(large=4_000_000, persistent_bytes_per_second=1, local_every_steps=3, **settings)
    observer = Observer([str(tmp_path / "ckpts")])
    views = list[View]()

    def moved() -> bool:
        views.append(observer.look())
        return any(work.done_bytes for work in views[-1].work)

    until(moved)
    work = next(each for each in views[-1].work if each.total_bytes)
    assert (work.level, work.version) == ("persistent", FLUSHED)
    assert 0 < work.done_bytes < work.total_bytes
    assert work.total_bytes > 16_000_000
    assert "persistent" not in {level.level for level in views[-1].levels}
    # A process that sees only the store knows that the job lives, and what is missing.
    far = Observer([str(tmp_path / "shared")]).look()
    assert far.job.state == "runs"
    assert far.job.restart is None
    assert [(each.done_shards, each.total_shards) for each in far.work] == [(0, 1)]

    # The trainer is killed: the agent still works on the flush.
    trainer.kill()
    until(lambda: observer.look().job.state == "ending")
    view = observer.look()
    [agent] = view.agents
    assert agent.trainers == ()
    assert any(each.total_bytes for each in view.work)
    kill(agent.pid)
    assert observer.look().job.state == "stopped"


def test_without_events_the_rest_is_shown_and_their_use_is_said(run: Run, tmp_path: Path) -> None:
    run(events_dir="")
    view = Observer([str(tmp_path / "ckpts")]).look()
    assert view.events is None
    assert [level.version for level in view.levels] == [STEPS, STEPS]
    assert view.levels[0].skipped is None
    [note] = view.notes
    assert "events_dir" in note


def test_a_job_that_has_ended(tmp_path: Path) -> None:
    events = str(tmp_path / "events")
    with TinyJob(tmp_path / "ckpts", agent="inline", events_dir=events) as job:
        job.run(STEPS)
    closed = Observer([str(tmp_path / "ckpts")], events).look()
    assert (closed.job.state, closed.job.evidence) == ("stopped", "closed: the training's end")
    assert closed.job.restart is not None
    assert (closed.job.restart.version, closed.job.restart.levels) == (STEPS, ("local",))
    view = Observer([str(tmp_path / "ckpts")]).look()
    assert (view.job.state, view.agents, view.nodes) == ("stopped", (), ())
    by_events = Observer([events]).look()
    assert by_events.job.evidence == "closed: the training's end"
    tmp_path.joinpath("empty").mkdir()
    [note, *_] = Observer([str(tmp_path / "ckpts")], str(tmp_path / "empty")).look().notes
    assert note.startswith(f"no events: {tmp_path}/empty has none, or is not visible here")


def test_a_watcher_is_no_trainer_for_the_agent(run: Run, tmp_path: Path, shm_dir: Path) -> None:
    """The agent ends with its last trainer, however often it was asked."""
    trainer = run()
    observer = Observer([str(tmp_path / "ckpts")])
    for _ in range(20):
        assert observer.look().agents[0].trainers == (0,)
    trainer.channel.send("go on")
    trainer.said("flushed")
    trainer.channel.send("end")
    trainer.process.join(PATIENCE_SECONDS)
    assert trainer.process.exitcode == 0
    folder = JobDirectory.at(shm_dir, job_id_of(tmp_path / "ckpts")).path
    assert not folder.exists()


def test_a_wrong_interval_and_a_wrong_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.joinpath("ckpts").mkdir()
    (tmp_path / "file").touch()
    for given, text in (
        (["--events", str(tmp_path / "file")], "file is not a directory; give a job's events_dir"),
        (["--interval-seconds", "0"], "--interval-seconds is 0; it must be from 0.1"),
        (["--interval-seconds", "nan"], "--interval-seconds is nan; it must be from 0.1"),
        (["--events", "/no/such"], "--events /no/such is not a directory"),
    ):
        assert run_command(["watch", str(tmp_path / "ckpts"), *given]) == 1
        assert text in capsys.readouterr().err


def test_a_missing_job_is_reported_once_until_it_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            tmp_path.joinpath("ckpts").mkdir()
        elif looks == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("tierckpt.cli.watch.time.sleep", sleep)
    assert (
        run_command(["watch", str(tmp_path / "ckpts"), "--json", "--interval-seconds", "1"]) == 130
    )
    said = capsys.readouterr()
    assert said.err.count("waiting for the job") == 1
    assert len(said.out.splitlines()) == 2
