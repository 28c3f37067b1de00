"""The node's agent: one for all trainers, found again by later ones, and gone when not needed."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from tests.support.processes import end, python
from tierckpt.agent import (
    PROTOCOL,
    AgentAddress,
    AgentClient,
    AgentFiles,
    AgentSettings,
    Bye,
    Finished,
    Hello,
    Introduce,
    KnownNodes,
    ListenSettings,
    PartySettings,
    PersistentSettings,
    Problem,
    ProtectFailed,
    ServedPlaces,
    SessionSettings,
    encode_message,
    process,
    receive_message,
    send_message,
)
from tierckpt.agent import server as agent
from tierckpt.config import YEAR_SECONDS
from tierckpt.format import VersionId
from tierckpt.peer import RemoteNode
from tierckpt.restore import Loader
from tierckpt.storage import JobDirectory
from tierckpt.testing import TinyJob

PATIENCE_SECONDS = 60.0

TRAINER = """
import json, sys, time
from tierckpt.agent.client import AgentClient, AgentSettings
from tierckpt.agent.protocol import FlushOrder, decode
from tierckpt.format.ids import VersionId
from tests.support.facts import facts_of
session = decode(sys.argv[2].encode()).session
client = AgentClient(AgentSettings(**json.loads(sys.argv[1])), session)
client.start()
while client.pid is None:
    time.sleep(0.005)
print(client.pid, flush=True)
for line in sys.stdin:
    if line.strip() == "close":
        client.close()
        print("closed", flush=True)
    if line.strip() == "flush":
        facts = facts_of(VersionId(1, 1), 2)
        client.flush(FlushOrder(session.directory, (0,), facts, 1000, "here"))
        print("flushing", flush=True)
"""


@pytest.fixture
def node(shm_dir: Path, tmp_path: Path) -> Callable[..., tuple[AgentSettings, SessionSettings]]:
    """`node(shard)`: settings of a trainer, in a job that has this node for itself."""
    job = JobDirectory.at(shm_dir, "job")
    job.create()

    def settings(shard: int, linger: float = 0.0) -> tuple[AgentSettings, SessionSettings]:
        session = SessionSettings(str(tmp_path / "ckpts"), shard, 2, keep="2")
        return AgentSettings(str(job.root), job.path.name, linger_seconds=linger), session

    return settings


def until(true: Callable[[], Any], patience_seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + patience_seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def reach(client: AgentClient) -> int:
    """Connect; returns the agent's process id."""
    client.start()
    until(lambda: client.pid is not None)
    assert client.pid is not None
    return client.pid


def alive(pid: int) -> bool:
    try:
        return b"tierckpt.agent.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def trainer(settings: tuple[AgentSettings, SessionSettings]) -> Any:
    found, session = settings
    hello = encode_message(Hello(PROTOCOL, session)).decode()
    return python(TRAINER, json.dumps(asdict(found)), hello)


def of_killed(settings: tuple[AgentSettings, SessionSettings]) -> int:
    """The process id of the agent of a trainer that was killed."""
    killed = trainer(settings)
    pid = int(killed.stdout.readline())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    end(killed)
    return pid


def ends(client: AgentClient, pid: int) -> None:
    """Close the client, the last one of this agent, which ends."""
    client.close()
    until(lambda: not alive(pid))


def test_a_restore_has_the_cores_for_itself(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that must be started is started after everything is loaded."""
    with TinyJob(tmp_path / "ckpts", shm_dir=shm_dir) as job:
        job.run(2)
        job.settle()
    seen = []
    finish = Loader.finish

    def look(each: Loader) -> None:
        seen.append(again.checkpointer._agent.starts)
        finish(each)

    monkeypatch.setattr(Loader, "finish", look)
    with TinyJob(tmp_path / "ckpts", seed=1, shm_dir=shm_dir) as again:
        assert again.restore() == 2
        assert (seen, again.checkpointer._agent.starts) == ([0], 1)


def test_an_agent_with_a_dead_starter_and_no_request_waits_no_longer_than_it_lingers(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = node(0)
    starter = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(agent, "FIRST_CLIENT_SECONDS", 10 * PATIENCE_SECONDS)
    monkeypatch.setattr(process, "lower_priority", lambda: None)  # else it would be this process's
    monkeypatch.setattr(process, "_detach_output", lambda: None)  # the same
    thread = threading.Thread(target=process.run, args=(settings, starter.pid), daemon=True)
    thread.start()
    until(lambda: settings.place().address.exists() or not thread.is_alive())
    assert thread.is_alive()
    starter.communicate()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def test_a_restarted_trainer_finds_the_agent_of_the_killed_one(node: Any) -> None:
    killed = trainer(node(0, linger=YEAR_SECONDS))
    pid = int(killed.stdout.readline())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert killed.stdout.read() == "", "the agent has let go of it: now it waits"
    end(killed)
    successor = AgentClient(*node(0))
    assert reach(successor) == pid
    assert successor.starts == 0
    ends(successor, pid)


def test_a_launcher_need_not_wait_for_one_that_flushes(node: Any, tmp_path: Path) -> None:
    """The agent is one of two nodes without the other, which takes a minute."""
    settings, session = node(0)
    place = PersistentSettings(str(tmp_path / "far"), node=1)
    killed = trainer((settings, replace(session, persistent=place)))
    pid = int(killed.stdout.readline())
    killed.stdin.write("flush\n")
    killed.stdin.flush()
    assert killed.stdout.readline() == "flushing\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert killed.stdout.read() == ""
    assert alive(pid), "as long as the flush is under way"
    end(killed)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))


def test_a_dead_ranks_launcher_need_not_wait_for_those_that_live(node: Any) -> None:
    """Horovod's has a pipe for each rank, and notices a rank's death when the pipe is closed."""
    killed = trainer(node(0, linger=PATIENCE_SECONDS))
    pid = int(killed.stdout.readline())
    living = AgentClient(*node(1))
    assert reach(living) == pid
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    ended, _, _ = select.select([killed.stdout], [], [], PATIENCE_SECONDS)
    assert ended, "the agent has let go of it"
    assert killed.stdout.read() == ""
    end(killed)
    successor = AgentClient(*node(0))
    assert reach(successor) == pid
    successor.close()
    ends(living, pid)


def test_an_agent_waits_no_longer_than_requested(node: Any) -> None:
    pid = of_killed(node(0, linger=0.2))
    until(lambda: not alive(pid))


def test_a_killed_one_that_has_its_successor_already_is_not_waited_for(node: Any) -> None:
    """A launcher starts the next run before the kernel has torn down the last one."""
    killed = trainer(node(0, linger=10 * PATIENCE_SECONDS))
    pid = int(killed.stdout.readline())
    successor = AgentClient(*node(0))
    assert reach(successor) == pid
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    end(killed)
    ends(successor, pid)


@pytest.mark.parametrize(("since", "last"), [(1.0, True), (-PATIENCE_SECONDS, False)])
def test_the_last_trainer_learns_of_its_agents_end_and_waits_for_it(
    since: float, last: bool, node: Any
) -> None:
    """No killed trainer is expected any more: its time is over."""
    _, session = node(0)
    with closing(agent.Agent(linger_seconds=0.0)) as server:
        server._missed[session.directory, 1] = time.monotonic() - since
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            thread = server.attend(theirs)
            send_message(ours, Hello(PROTOCOL, session))
            send_message(ours, Bye())
            said = [receive_message(ours)[0] for _ in ("welcome", "bye")]
            thread.join(PATIENCE_SECONDS)
        assert said[-1] == Finished(last)


def test_a_rank_of_another_environment_leaves_the_start_to_the_first(node: Any) -> None:
    """Its own agent would appear to have the first rank's keys and credentials."""
    first = AgentClient(*node(0), environment="the first rank's")
    other = AgentClient(*node(1), environment="the first rank's", may_start=False)
    pid = reach(first)
    assert reach(other) == pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: first.poll() and not first.pid)
    until(lambda: other.poll() and not other.pid)
    with other._lock:
        other._connection.ready()
        assert other.starts == 0
        other._connection._at = replace(other._connection._at, start_after=0.0)
        with pytest.raises(TimeoutError, match="the node's first rank"):
            other._connection.ready()
    pid = reach(first)
    assert reach(other) == pid
    assert other.starts == 0
    first.close()
    ends(other, pid)


def met(client: AgentClient) -> KnownNodes:
    """Introduce its agent to those of other nodes; returns the known nodes."""
    where = ListenSettings("secret", "lo", 0, "localhost")
    client.listen(where, PATIENCE_SECONDS)
    known_nodes = KnownNodes(1, ())
    client.introduce(where, [], known_nodes)
    return known_nodes


def test_one_that_has_met_others_waits_for_a_job_that_was_abandoned(node: Any) -> None:
    """Its node may be left out of the next run, which asks it."""
    client, other = (AgentClient(*node(shard, linger=PATIENCE_SECONDS)) for shard in (0, 1))
    pid = reach(client)
    assert reach(other) == pid
    known_nodes = met(client)
    client.close(abandoned=True)
    other.close(abandoned=True)
    settings, session = node(0)
    successor = AgentClient(settings, replace(session, ranks=(0,)))
    assert reach(successor) == pid
    assert successor.known_nodes(PATIENCE_SECONDS) == known_nodes
    ends(successor, pid)


def test_one_that_has_met_nobody_does_not(node: Any) -> None:
    """The next run finds slots and files without it."""
    client = AgentClient(*node(0, linger=10 * PATIENCE_SECONDS))
    pid = reach(client)
    client.close(abandoned=True)
    until(lambda: not alive(pid))


class Flush:
    """A flush in progress."""

    def __init__(self, progress_at: float) -> None:
        self.progress_at = progress_at

    def busy(self) -> bool:
        return True

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("hangs", [True, False])
def test_it_waits_for_a_flush_as_long_as_that_gets_on(
    hangs: bool, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than it lingers; but not for ever, if a store hangs and no trainer is left to see
    it."""
    settings, _ = node(0)
    now = time.monotonic()
    flush: Any = Flush(now - agent.STUCK_SECONDS if hangs else now)
    server = agent.Agent(linger_seconds=0.0)
    server._flushers[flush] = flush
    unneeded = threading.Event()
    listener = settings.place().listen()
    thread = threading.Thread(target=server.serve, args=(listener, unneeded.set), daemon=True)
    thread.start()
    if not hangs:
        thread.join(0.5)
        assert thread.is_alive()
        flush.progress_at -= agent.STUCK_SECONDS
        server._wake.send(b"\0")
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert unneeded.is_set(), "a reader of the job's output need not wait for the store"
    server.close()
    listener.close()


def test_one_on_another_node_now_is_not_waited_for(node: Any) -> None:
    """A job continued with fewer nodes, where this one's rank has another number."""
    settings, session = node(1, linger=10 * PATIENCE_SECONDS)
    pid = of_killed((settings, replace(session, ranks=(1,))))
    successor = AgentClient(settings, replace(session, shard=0, ranks=(0,)))
    assert reach(successor) == pid
    ends(successor, pid)


def test_an_agent_waits_on_while_nodes_read_the_slots_of_killed_ranks(
    node: Any, tmp_path: Path
) -> None:
    """The agent waits as long as for those ranks, and for no other rank than before."""
    settings, _ = node(0)
    serves = ServedPlaces(settings.root, settings.folder, str(tmp_path / "local"))
    where = ListenSettings("secret", "lo", 0, "localhost", serves)
    server = agent.Agent(linger_seconds=PATIENCE_SECONDS)
    with closing(server):
        address = server.protector().open(where)
        server._missed[serves.directory, 0] = time.monotonic()
        assert server._patience(0.0) <= 0
        with closing(RemoteNode("this one", address, b"secret")) as reader:
            assert reader.inventory("node").found == ()
        assert server._patience(0.0) > 0
        server._missed.clear()
        assert server._patience(0.0) <= 0


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


def test_beside_an_agent_of_another_protocol_there_is_one_of_ours(node: Any) -> None:
    """After an upgrade, an agent of the older version may still linger."""
    settings, session = node(0)
    job = settings.place().job
    job.create()
    job.slot_path(0, 0).touch()  # as trainers have; else the older one removes the folder
    served: list[Any] = []
    """Another trainer, so that it does not end."""
    older = "from tierckpt.agent import process, server; server.PROTOCOL = 0; process.main()"
    told = [json.dumps(asdict(settings)), str(os.getpid())]
    with subprocess.Popen([sys.executable, "-c", older, *told]) as old:
        until(settings.place().address.exists)
        until(lambda: served.append(settings.place().connect()) or served[-1])
        client = AgentClient(settings, session)
        pid = reach(client)
        assert pid != old.pid
        client.close()
        served[-1].close()
        until(lambda: not alive(pid))
        old.kill()
    job.slot_path(0, 0).unlink()


def test_garbage_on_its_socket_does_not_disturb_it(node: Any) -> None:
    client = AgentClient(*node(0))
    pid = reach(client)
    for garbage in (b"", b"{", b"[]", b'{"op": "commit"}', b"\xff" * 1000):
        place: AgentFiles = client.settings.place()
        stranger = place.connect()
        assert stranger is not None
        if garbage:
            stranger.send(garbage)
        stranger.settimeout(PATIENCE_SECONDS)
        if garbage:
            assert stranger.recv(100) == b"", "shown the door"
        stranger.close()
    assert reach(client) == pid
    ends(client, pid)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
NOBODY = 65534
AS_NOBODY = f"""
import json, os, socket, sys
folder = os.open(sys.argv[1], os.O_PATH)
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
where = f"/proc/self/fd/{{folder}}/agent0.socket"
"""


@needs_root
@pytest.mark.parametrize("private", [True, False])
def test_another_user_finds_the_door_closed(private: bool, node: Any) -> None:
    """The same holds when the folder is no longer private."""
    client = AgentClient(*node(0))
    pid = reach(client)
    place = client.settings.place()
    if not private:
        place.job.path.chmod(0o777)
        place.address.chmod(0o777)
    hello = encode_message(Hello(PROTOCOL, client.session)).decode()
    stranger = python(
        AS_NOBODY
        + "try: channel.connect(where)\n"
        + "except PermissionError: print('cannot come in', flush=True); sys.exit()\n"
        + "try:\n"
        + "    channel.send(sys.argv[2].encode())\n"
        + "    print(channel.recv(1000), flush=True)\n"
        + "except ConnectionError: print(b'', flush=True)\n",
        place.job.path,
        hello,
    )
    assert stranger.stdout.read() == ("cannot come in\n" if private else "b''\n")
    end(stranger)
    assert alive(pid)
    assert not client.poll()
    ends(client, pid)


@needs_root
def test_a_trainer_does_not_talk_to_another_users_agent(node: Any) -> None:
    place = AgentClient(*node(0)).settings.place()
    place.job.path.chmod(0o777)
    stranger = python(
        AS_NOBODY
        + "channel.bind(where); os.chmod(where, 0o777); channel.listen(); print(flush=True)\n"
        + "sys.stdin.read()",
        place.job.path,
    )
    assert stranger.stdout.readline() == "\n"
    assert place.connect() is None
    end(stranger)


IOPRIO_GET = {"x86_64": 252, "aarch64": 31}.get(platform.machine())


def test_it_gives_way_to_the_training(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its threads, on the CPU and on the device."""
    monkeypatch.delenv("TIERCKPT_TEST_NICE")
    client = AgentClient(*node(0))
    pid = reach(client)
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    assert len(threads) > 1, "the session's"
    least = min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
    for thread in threads:
        assert os.getpriority(os.PRIO_PROCESS, thread) == least
        if IOPRIO_GET is not None:
            priority = ctypes.CDLL(None).syscall(IOPRIO_GET, 1, thread)
            assert (priority >> 13, priority & 7) == (2, 7), "best effort, and the last of these"
    # Else its niceness has no effect against trainers, which are in another session.
    session = Path(f"/proc/{pid}/autogroup")
    assert not session.exists() or session.read_text().split()[-1] == str(least)
    ends(client, pid)


@pytest.mark.parametrize("peers", [True, False])
def test_its_code_for_other_nodes_is_loaded_before_it_gives_way(peers: bool, node: Any) -> None:
    """Trainers wait for that code when nodes meet: at a low priority it takes seconds to load if
    the cores are busy."""
    program = """
import sys
from tierckpt.agent import process
process.lower_priority = lambda: sys.exit(sys.modules.get("tierckpt.agent.protector") and 7)
process.main()
"""
    settings = json.dumps(asdict(replace(node(0)[0], peers=peers)))
    line = [sys.executable, "-c", program, settings, str(os.getpid())]
    assert subprocess.run(line).returncode == (7 if peers else 0)


JOB_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def test_signals_that_are_meant_for_the_job_cut_nothing_short(
    tmp_path: Path, shm_dir: Path
) -> None:
    """Slurm sends them to all processes of a job's cgroup. Here they come while a version waits."""
    with TinyJob(tmp_path / "ckpts", shm_dir=shm_dir) as job:
        job.run(1)
        job.settle()
        pid = job.checkpointer._agent.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            job.run(2)
            for number in JOB_SIGNALS:
                os.kill(pid, number)
        finally:
            os.kill(pid, signal.SIGCONT)
        job.settle()
        assert [event.version for event in job.heard("committed", "local")] == [1, 2]
        assert not [event for event in job.events if "ended unexpectedly" in event.text()]
        assert job.checkpointer._agent.pid == pid


def test_no_thread_for_a_trainer_is_not_the_end_of_the_agent(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allow no more threads for a while, as in a limited container."""
    start, refused = threading.Thread.start, list[threading.Thread]()

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "tierckpt-session" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    monkeypatch.setattr(process, "lower_priority", lambda: None)  # else it would be this process's
    settings, _ = node(0)
    serving = threading.Thread(target=process.run, args=(settings, os.getpid()))
    serving.start()
    until(settings.place().address.exists)
    trainers = [AgentClient(*node(shard)) for shard in (0, 1)]
    for trainer in trainers:
        assert reach(trainer) == os.getpid()
    for trainer in trainers:
        trainer.close()
    serving.join(PATIENCE_SECONDS)
    assert not serving.is_alive()
    assert refused


def parties_of(ranks: int, members: int) -> list[PartySettings]:
    """A large node's number of parties, in large groups, with long host names."""
    hosts = tuple(f"{i}.of.a.very.large.cluster.somewhere.example.org" for i in range(members))
    ports = tuple(range(40000, 40000 + members))
    groups = [tuple(range(rank, rank + 1000 * members, 1000)) for rank in range(ranks)]
    return [
        PartySettings(rank, groups[rank], members, members - 1, 1, hosts, ports)
        for rank in range(ranks)
    ]


def test_a_node_may_have_any_number_of_peers(node: Any) -> None:
    """Both directions are tested: their list, and a report of each one's failure."""
    client = AgentClient(*node(0))
    pid = reach(client)
    where = ListenSettings("secret", "lo", 0, "localhost")
    client.listen(where, PATIENCE_SECONDS)
    parties = parties_of(ranks=200, members=64)
    assert len(encode_message(Introduce(tuple(parties), None))) > 10 * 65536
    known_nodes = KnownNodes(1, (AgentAddress("node" * 9, "10.0.0.1", 1, "s"),) * 10_000)
    client.introduce(where, parties, known_nodes)
    client.protect(VersionId(1, 1))
    assert client.wait(PATIENCE_SECONDS, everything=True)
    (heard,) = client.poll()
    assert isinstance(heard, ProtectFailed)
    assert heard.error.count("FileNotFoundError") == 200, "one for every party"
    assert len(heard.error) > 10_000
    assert client.pid == pid
    settings, session = node(0)
    successor = AgentClient(settings, replace(session, ranks=(0,)))
    successor.start()
    assert successor.known_nodes(PATIENCE_SECONDS) == known_nodes, (
        "it receives the nodes that the agent knew"
    )
    client.close()
    ends(successor, pid)


def test_a_setting_that_the_system_refuses_is_reported(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is not treated as a full buffer, which would be waited for."""
    client = AgentClient(*node(0))
    pid = reach(client)
    # The abandoned agent would remove the folder, as no rank of a job uses it.
    (client.settings.place().job.path / "r00000.0").touch()
    send = socket.send_fds

    def refused(channel: socket.socket, parts: list[bytes], *rest: Any) -> int:
        if b"protect" in parts[0]:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        return send(channel, parts, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", refused)
        client.protect(VersionId(1, 1))
    heard = client.poll()
    assert [type(message) for message in heard] == [Problem, ProtectFailed]
    assert all("Message too long" in message.error for message in heard)
    assert not client.behind()
    reach(client)
    ends(client, pid)


def test_its_folder_is_private_and_its_socket_checked(node: Any, shm_dir: Path) -> None:
    client = AgentClient(*node(0))
    pid = reach(client)
    place = client.settings.place()
    assert place.job.path.stat().st_mode & 0o077 == 0
    assert place.address.is_socket()
    ends(client, pid)
    assert not place.address.exists()
    assert not place.lock.exists()


def test_paths_may_be_longer_than_a_socket_address(shm_dir: Path, tmp_path: Path) -> None:
    job = JobDirectory.at(shm_dir, "j" * 120)
    job.create()
    session = SessionSettings(str(tmp_path), 0, 1, "2")
    client = AgentClient(AgentSettings(str(job.root), job.path.name, linger_seconds=0), session)
    pid = reach(client)
    assert len(str(client.settings.place().address)) > 108
    ends(client, pid)


def test_an_agent_that_comes_after_the_end_of_its_job_ends_without_a_word(shm_dir: Path) -> None:
    """A job of a second is over, and its folder gone, before its agent's process has started."""
    settings = json.dumps(asdict(AgentSettings(str(shm_dir), "gone")))
    command = [sys.executable, "-m", "tierckpt.agent.process", settings, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [*shm_dir.iterdir()] == []


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
