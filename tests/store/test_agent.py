"""The node's agent: one for all its trainers, found again, and gone when it is not needed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.processes import end, python
from tierckpt import agent, agentclient
from tierckpt.agent import Place
from tierckpt.agentclient import AgentClient, AgentSettings
from tierckpt.desk import DeskSettings
from tierckpt.slots import JobDirectory
from tierckpt.testing import TinyJob

PATIENCE_SECONDS = 60.0

TRAINER = """
import json, sys, time
from tierckpt.agentclient import AgentClient, AgentSettings
from tierckpt.desk import DeskSettings
agent, desk = (json.loads(text) for text in sys.argv[1:3])
client = AgentClient(AgentSettings(**agent), DeskSettings(**desk))
client.start()
while client.pid is None:
    time.sleep(0.005)
print(client.pid, flush=True)
for line in sys.stdin:
    if line.strip() == "close":
        client.close()
        print("closed", flush=True)
"""


@pytest.fixture
def node(shm_dir: Path, tmp_path: Path) -> Callable[..., tuple[AgentSettings, DeskSettings]]:
    """`node(shard)`: settings of a trainer, in a job that has this node for itself."""
    job = JobDirectory.at(shm_dir, "job")
    job.create()

    def settings(shard: int, linger: float = 0.0) -> tuple[AgentSettings, DeskSettings]:
        desk = DeskSettings(str(tmp_path / "ckpts"), shard, 2, keep_last=2, keep_every=0)
        return AgentSettings(str(job.root), job.path.name, linger_seconds=linger), desk

    return settings


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def reach(client: AgentClient) -> int:
    """Its agent's process id."""
    client.start()
    until(lambda: client.pid is not None)
    assert client.pid is not None
    return client.pid


def alive(pid: int) -> bool:
    try:
        return b"tierckpt.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def trainer(settings: tuple[AgentSettings, DeskSettings]) -> Any:
    return python(TRAINER, *(json.dumps(vars(each)) for each in settings))


def test_all_trainers_of_a_node_have_the_same_agent(node: Any) -> None:
    first, second = AgentClient(*node(0)), AgentClient(*node(1))
    pid = reach(first)
    assert reach(second) == pid
    assert (first.starts, second.starts) == (1, 0)
    first.close()
    assert alive(pid), "it serves the other"
    second.close()
    until(lambda: not alive(pid))


@pytest.mark.parametrize("when", ["before it looked", "later"])
def test_an_agent_whose_starter_died_without_a_word_waits_no_longer_than_it_lingers(
    when: str, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = node(0)
    starter = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if when == "before it looked":
        starter.communicate()
    monkeypatch.setattr(agent, "FIRST_CLIENT_SECONDS", 10 * PATIENCE_SECONDS)
    monkeypatch.setattr(agent, "lower_priority", lambda nice: None)  # it would be ours
    thread = threading.Thread(target=agent.run, args=(settings, starter.pid), daemon=True)
    thread.start()
    until(lambda: settings.place().address.exists() or not thread.is_alive())
    if when == "later":
        assert thread.is_alive()
        starter.communicate()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def test_a_restarted_trainer_finds_the_agent_of_the_killed_one(node: Any) -> None:
    killed = trainer(node(0, linger=PATIENCE_SECONDS))
    pid = int(killed.stdout.readline())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    end(killed)
    successor = AgentClient(*node(0))
    assert reach(successor) == pid
    assert successor.starts == 0
    successor.close()
    until(lambda: not alive(pid))


def test_a_launcher_need_not_wait_for_one_that_lingers(node: Any) -> None:
    """It reads the job's output until nobody has the other end any more."""
    killed = trainer(node(0, linger=PATIENCE_SECONDS))
    pid = int(killed.stdout.readline())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert killed.stdout.read() == ""
    assert alive(pid)
    end(killed)
    successor = AgentClient(*node(0))
    assert reach(successor) == pid
    successor.close()
    until(lambda: not alive(pid))


def test_it_does_not_wait_longer_than_it_was_told(node: Any) -> None:
    killed = trainer(node(0, linger=0.2))
    pid = int(killed.stdout.readline())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    end(killed)
    until(lambda: not alive(pid))


def test_it_outlives_the_process_group_of_its_trainers(node: Any) -> None:
    """torchrun kills groups."""
    other = trainer(node(1))
    pid = int(other.stdout.readline())
    assert os.getpgid(pid) == pid == os.getsid(pid)
    mine = AgentClient(*node(0))
    assert reach(mine) == pid
    other.send_signal(signal.SIGKILL)
    other.wait()
    end(other)
    assert reach(mine) == pid
    mine.close()


def test_one_that_does_not_answer_is_passed_over(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agentclient, "ANSWER_SECONDS", 0.2)
    other = trainer(node(1))
    stuck = int(other.stdout.readline())
    os.kill(stuck, signal.SIGSTOP)
    client = AgentClient(*node(0))
    pid = reach(client)
    assert pid != stuck
    assert client.settings.index == 1
    client.close()
    until(lambda: not alive(pid))
    os.kill(stuck, signal.SIGCONT)
    other.stdin.write("close\n")
    other.stdin.flush()
    assert other.stdout.readline() == "closed\n"
    end(other)
    until(lambda: not alive(stuck))


def test_an_agent_of_another_protocol_is_left_alone(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade, an agent of the older version may still serve."""
    monkeypatch.setattr(agentclient, "ANSWER_SECONDS", 0.2)
    other = trainer(node(1))
    old = int(other.stdout.readline())
    monkeypatch.setattr(agentclient, "PROTOCOL", 0)
    client = AgentClient(*node(0))
    client.start()
    until(lambda: client._channel is not None)
    until(lambda: client._channel is None)
    assert client.pid is None
    client.close()
    assert alive(old)
    end(other)
    until(lambda: not alive(old))


def test_garbage_on_its_socket_does_not_disturb_it(node: Any) -> None:
    client = AgentClient(*node(0))
    pid = reach(client)
    for garbage in (b"", b"{", b"[]", b'{"op": "commit"}', b"\xff" * 1000):
        place: Place = client.settings.place()
        stranger = place.connect()
        assert stranger is not None
        if garbage:
            stranger.send(garbage)
        stranger.settimeout(PATIENCE_SECONDS)
        if garbage:
            assert stranger.recv(100) == b"", "shown the door"
        stranger.close()
    assert reach(client) == pid
    client.close()
    until(lambda: not alive(pid))


def test_its_folder_is_private_and_its_socket_checked(node: Any, shm_dir: Path) -> None:
    client = AgentClient(*node(0))
    pid = reach(client)
    place = client.settings.place()
    assert place.job.path.stat().st_mode & 0o077 == 0
    assert place.address.is_socket()
    client.close()
    until(lambda: not alive(pid))
    assert not place.address.exists()
    assert not place.lock.exists()


def test_a_dead_ones_socket_is_replaced(node: Any) -> None:
    first = AgentClient(*node(0))
    os.kill(reach(first), signal.SIGKILL)
    until(lambda: [m for m in first.poll() if "ended unexpectedly" in m.get("error", "")])
    assert first.settings.place().address.exists(), "left behind"
    second = AgentClient(*node(1))
    pid = reach(second)
    assert reach(first) == pid
    first.close()
    second.close()
    until(lambda: not alive(pid))


def test_paths_may_be_longer_than_a_socket_address(shm_dir: Path, tmp_path: Path) -> None:
    job = JobDirectory.at(shm_dir, "j" * 120)
    job.create()
    desk = DeskSettings(str(tmp_path), 0, 1, 2, 0)
    client = AgentClient(AgentSettings(str(job.root), job.path.name, linger_seconds=0), desk)
    pid = reach(client)
    assert len(str(client.settings.place().address)) > 108
    client.close()
    until(lambda: not alive(pid))


def test_inline_there_is_no_other_process(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    with TinyJob(tmp_path / "ckpts", shm_dir=shm_dir, agent="inline") as job:
        job.run(5)
        job.settle()
        assert job.heard("committed", "local")[-1].version == 5
        digest = job.fingerprint()
    with TinyJob(tmp_path / "ckpts", seed=1, shm_dir=shm_dir, agent="inline") as again:
        assert again.restore() == 5
        assert again.fingerprint() == digest


def test_a_connection_is_a_message_socket(node: Any) -> None:
    """A message is whole or not there at all."""
    client = AgentClient(*node(0))
    pid = reach(client)
    assert client._channel is not None
    assert client._channel.type == socket.SOCK_SEQPACKET
    client.close()
    until(lambda: not alive(pid))
