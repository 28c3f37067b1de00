"""An agent works with the keys, credentials and modules of the trainers that it serves."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support import limits
from tests.support.facts import facts_of
from tests.support.processes import end, python
from tests.support.warm_python.servers import PYTHON
from tierckpt import _children
from tierckpt.agent import (
    AgentAddress,
    AgentClient,
    AgentSettings,
    Commit,
    FlushOrder,
    KnownNodes,
    ListenFailed,
    Listening,
    ListenSettings,
    PersistentSettings,
    Problem,
    ProtectFailed,
    ServedPlaces,
    SessionSettings,
    TrainerSession,
    environment_fingerprint,
    process,
)
from tierckpt.codecs import FILE_VARIABLE, KEY_VARIABLE, key_fingerprint
from tierckpt.coordination import settings_check
from tierckpt.format import Manifest, ShardKey, VersionId
from tierckpt.net import Address
from tierckpt.peer import RemoteNode
from tierckpt.storage import JobDirectory, LocalStore
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import TinyJob, run_ranks

PATIENCE_SECONDS = 60.0
KEY, OTHER_KEY = "5e" * 32, "a7" * 32
STEPS = 3
KEY_OF_ONE = ShardKey(VersionId(1, 1), 0, 2)

TRAINER = """
import sys, time
from tierckpt.agent.client import AgentClient, AgentSettings
from tierckpt.agent.protocol import SessionSettings
root, folder, ckpts, environment = sys.argv[1:]
settings = AgentSettings(root, folder, linger_seconds=600.0)
client = AgentClient(settings, SessionSettings(ckpts, 0, 2, "2"), environment=environment)
client.start()
while client.pid is None:
    time.sleep(0.005)
print(client.pid, flush=True)
sys.stdin.read()
"""
JOB = """
import os, sys
from tierckpt.testing import TinyJob
path, shm_dir, steps, modules = sys.argv[1:]
settings = {"shm_dir": shm_dir, "local_codecs": modules, "agent_linger_seconds": 600.0}
job = TinyJob(path, **settings).run(int(steps))
job.settle()
print(os.getpid(), job.checkpointer._agent.pid, flush=True)
sys.stdin.read()
"""


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return b"tierckpt.agent.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    end(process)


@pytest.fixture
def agents() -> Iterator[list[int]]:
    """Process ids; those of them that live when the test ends are killed."""
    pids: list[int] = []
    yield pids
    for pid in filter(alive, pids):
        os.kill(pid, signal.SIGKILL)


# --- keys and credentials ------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_python")
def test_a_restart_writes_with_its_own_key(
    tmp_path: Path,
    shm_dir: Path,
    agents: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not with that of the killed run, which had another key, while its agent still runs."""
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    ckpts = tmp_path / "ckpts"
    killed = python(JOB, ckpts, shm_dir, STEPS, "aes-gcm", warm=True)
    pid, agent = map(int, killed.stdout.readline().split())
    agents.append(agent)
    os.kill(pid, signal.SIGKILL)
    end(killed)
    monkeypatch.setenv(KEY_VARIABLE, OTHER_KEY)
    settings = {"shm_dir": str(shm_dir), "local_codecs": "aes-gcm"}
    with TinyJob(ckpts, seed=1, **settings) as job:
        restored = job.restore()
        assert (int(restored), restored.levels) == (STEPS, {"memory": 1})
        job.run(2 * STEPS).settle()
    assert not job.heard("failed")
    store = LocalStore(ckpts)
    newest = Manifest.decode(store.read_manifest(max(store.keys(), key=lambda key: key.id)))
    assert newest.key.id.version == 2 * STEPS
    assert newest.encoding is not None
    assert key_fingerprint(bytes.fromhex(OTHER_KEY)) in str(newest.encoding)
    told = [e.text() for e in job.heard("notice") if "agent 0 of this node" in e.text()]
    assert len(told) == 1
    until(lambda: not alive(agents[0]))


def client_of(
    shm_dir: Path,
    tmp_path: Path,
    shard: int,
    what: str,
    ranks: tuple[int, ...] = (),
    shared: str = "",
    inline: bool = False,
) -> AgentClient:
    job = JobDirectory.at(shm_dir, "job")
    settings = AgentSettings(str(job.root), job.path.name)
    persistent = PersistentSettings(shared) if shared else None
    ckpts = str(tmp_path / "ckpts")
    session = SessionSettings(ckpts, shard, 2, keep="2", ranks=ranks, persistent=persistent)
    return AgentClient(settings, session, inline, what)


def reach(client: AgentClient) -> int:
    client.start()
    until(lambda: client.pid is not None)
    assert client.pid is not None
    return client.pid


@pytest.fixture
def old(shm_dir: Path, tmp_path: Path, agents: list[int]) -> Iterator[Any]:
    """A trainer with an agent that would wait long for a successor."""
    job = JobDirectory.at(shm_dir, "job")
    job.create()
    (job.path / "r00000.0").touch()  # the folder stays while there are slots
    process = python(TRAINER, job.root, job.path.name, tmp_path / "ckpts", "old")
    agents.append(int(process.stdout.readline()))
    yield process
    end(process)


def test_a_path_added_by_an_import_does_not_count_as_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    vendored = site / "setuptools" / "_vendor"
    vendored.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    before = environment_fingerprint()
    monkeypatch.setattr(sys, "path", [*sys.path, str(vendored)])
    assert environment_fingerprint() == before
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert environment_fingerprint() != before


def test_an_agent_of_another_environment_shuts_down(
    old: Any, agents: list[int], shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and its successor takes its place, whichever rank of the node comes first."""
    limits.AGENT_ANSWERS.set(monkeypatch, 10 * PATIENCE_SECONDS)
    limits.AGENT_JOINS.set(monkeypatch, 10 * PATIENCE_SECONDS)
    kill(old)
    first, second = (client_of(shm_dir, tmp_path, shard, "new", (0, 1)) for shard in (0, 1))
    second.start(first=False)
    until(lambda: second.poll())
    agents.append(reach(first))
    assert agents[1] != agents[0]
    until(lambda: not alive(agents[0]))  # its place is free just before its exit
    until(lambda: second.pid is not None)
    assert second.pid == agents[1]
    assert (first.starts, second.starts) == (1, 0)
    assert first.settings.index == second.settings.index == 0
    assert {m.severity for m in problems(first)} == {logging.INFO}, "no trouble"
    for client in (first, second):
        client.close()
    until(lambda: not alive(agents[1]))


def known(*hosts: str) -> KnownNodes:
    return KnownNodes(1, tuple(AgentAddress(host, "10.0.0.1", 1, "secret") for host in hosts))


def port_of(answer: Listening | ListenFailed) -> int:
    assert isinstance(answer, Listening), answer
    assert answer.host == "127.0.0.1"
    return answer.port


def problems(client: AgentClient) -> list[Problem]:
    found = client.poll()
    return [message for message in found if isinstance(message, Problem)]


def meet(client: AgentClient, known_nodes: KnownNodes) -> ListenSettings:
    """Its agent knows those of other nodes; returns its address for them, with the secret "one"."""
    settings, directory = client.settings, client.session.directory
    serves = ServedPlaces(settings.root, settings.folder, directory)
    where = ListenSettings("one", "lo", 0, "localhost", serves)
    where = replace(where, port=port_of(client.listen(where, PATIENCE_SECONDS)))
    client.introduce(where, [], known_nodes)
    client.listen(where, PATIENCE_SECONDS)  # earlier messages are handled by then
    return where


def test_an_agents_peers_and_port_pass_to_its_successor(
    old: Any, agents: list[int], shm_dir: Path, tmp_path: Path
) -> None:
    """The node's first rank gets the roster, even if another one came before."""
    ranks = (0, 1)
    zombie = client_of(shm_dir, tmp_path, 1, "old", ranks)
    reach(zombie)
    known_nodes = known(*["node" * 9] * 1000)
    where = meet(zombie, known_nodes)
    second, first = (client_of(shm_dir, tmp_path, shard, "new", ranks) for shard in (1, 0))
    second.start(first=False)
    until(lambda: second.poll())
    first.start()
    assert first.known_nodes(PATIENCE_SECONDS) == known_nodes
    heard = first.listen(replace(where, secret="two"), PATIENCE_SECONDS)
    assert port_of(heard) == where.port
    agents.append(first.pid or 0)
    assert first.known_nodes(PATIENCE_SECONDS) == known_nodes
    for client in (first, second, zombie):
        client.close()


def is_found(where: ListenSettings) -> bool:
    """True if a node with the secret "one" finds it there."""
    address = Address("127.0.0.1", where.port)
    with contextlib.closing(RemoteNode("node", address, b"one")) as node:
        try:
            return node.inventory("node").host == "node"
        except ConnectionError:
            return False


def test_the_run_after_the_next_receives_the_peers_and_finds_them_at_their_addresses(
    old: Any, agents: list[int], shm_dir: Path, tmp_path: Path
) -> None:
    """The next run ended before its agents had met, or started to meet. The agent of that run
    informs the one after it, whatever environment it has; and nodes that know the first agent
    find it."""
    first = client_of(shm_dir, tmp_path, 0, "old", (0,))
    reach(first)
    known_nodes = known("node")
    where = meet(first, known_nodes)
    lives = []
    for what, secret in (("second", "two"), ("third", ""), ("third", "three")):
        lives.append(client_of(shm_dir, tmp_path, 0, what, (0,)))
        lives[-1].find()
        assert lives[-1].known_nodes(PATIENCE_SECONDS) == known_nodes
        until(lambda: is_found(where))
        agents.append(reach(lives[-1]))
        if secret:
            place = replace(where, secret=secret, port=0)
            assert port_of(lives[-1].listen(place, PATIENCE_SECONDS)) == where.port
            assert is_found(where)
    assert len({*agents}) == 3
    for client in (first, *lives):
        client.close()


def test_it_shuts_down_for_an_inline_one(
    old: Any, agents: list[int], shm_dir: Path, tmp_path: Path
) -> None:
    """This holds in any environment: it would keep the port, and its knowledge of other nodes."""
    zombie = client_of(shm_dir, tmp_path, 1, "old", (0, 1))
    reach(zombie)
    known_nodes = known("node")
    where = meet(zombie, known_nodes)
    kill(old)
    client = client_of(shm_dir, tmp_path, 0, "old", (0, 1), inline=True)
    client.start()
    assert client.known_nodes(PATIENCE_SECONDS) == known_nodes
    assert port_of(client.listen(replace(where, secret="two"), PATIENCE_SECONDS)) == where.port
    assert (client.pid, client.starts) == (os.getpid(), 0)
    until(lambda: not alive(agents[0]))  # its place is free just before its exit
    assert {m.severity for m in problems(client)} == {logging.INFO}, "no trouble"
    for each in (client, zombie):
        each.close()


def test_a_living_trainer_of_the_previous_run_starts_no_agent(
    old: Any, agents: list[int], shm_dir: Path, tmp_path: Path
) -> None:
    """It may hang on a node where its rank is not any more. It is informed that it is outdated,
    whether it was connected at that time or asks only later."""
    zombies = [client_of(shm_dir, tmp_path, 1, "old") for _ in range(2)]
    reach(zombies[0])
    zombies[0].protect(VersionId(1, 1))
    new = client_of(shm_dir, tmp_path, 0, "new")
    agents.append(reach(new))
    zombies[1].start()
    for zombie in zombies:
        until(lambda zombie=zombie: "a later start of this job" in told(zombie))
        zombie.protect(VersionId(1, 2))
        assert zombie.wait(PATIENCE_SECONDS, everything=True), "its orders fail"
        assert zombie.starts == 0
    assert new.pid == agents[1]
    assert alive(agents[1])
    for client in (*zombies, new):
        client.close()
    until(lambda: not alive(agents[1]))


def told(client: AgentClient) -> str:
    return "; ".join(getattr(message, "error", "") for message in client.poll())


def serve_here(
    settings: AgentSettings, what: str, monkeypatch: pytest.MonkeyPatch
) -> threading.Thread:
    """An agent with the environment `what`, in a thread of this process."""
    monkeypatch.setattr(process, "lower_priority", lambda: None)  # else it would be this process's
    monkeypatch.setattr(process, "_detach_output", lambda: None)  # the same
    monkeypatch.setenv("TIERCKPT_AGENT_FINGERPRINT", what)
    job = settings.place().job
    job.create()
    (job.path / "r00000.0").touch()  # the folder stays while there are slots
    serving = threading.Thread(target=process.run, args=(settings, os.getpid()), daemon=True)
    serving.start()
    until(settings.place().address.exists)
    return serving


def test_only_the_commit_under_way_is_finished(
    shm_dir: Path, tmp_path: Path, agents: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent with a disk that hangs in it is passed over, with an error."""
    started, resume = list[str](), threading.Event()

    def commit(session: TrainerSession, message: Commit, fds: list[int]) -> None:
        started.append(message.segment or "")
        assert resume.wait(PATIENCE_SECONDS)
        session.say(Problem("was finished"))

    monkeypatch.setattr(TrainerSession, "_commit", commit)
    limits.AGENT_ANSWERS.set(monkeypatch, 0.5)
    before, new = (client_of(shm_dir, tmp_path, 0, what) for what in ("old", "new"))
    serving = serve_here(before.settings, "old", monkeypatch)
    assert reach(before) == os.getpid()
    for stem in ("one", "another"):
        before._connection.send(Commit(KEY_OF_ONE, stem))
    until(lambda: started)
    agents.append(reach(new))
    assert new.settings.index == 1
    heard = [(m.severity, m.error) for m in problems(new)]
    assert [severity for severity, _ in heard] == [logging.INFO, logging.ERROR]
    assert "does not end; another one takes its place" in heard[1][1]
    assert serving.is_alive()
    resume.set()
    serving.join(PATIENCE_SECONDS)
    assert not serving.is_alive()
    assert started == ["one"]
    until(lambda: "was finished" in told(before))
    for client in (before, new):
        client.close()


def test_flushes_that_it_gives_up_are_named(
    old: Any, shm_dir: Path, tmp_path: Path, agents: list[int]
) -> None:
    """One rank of the node reports it as a warning."""
    shared = PersistentStore(str(tmp_path / "shared"))
    shared.create()
    somebody = shared.lease("ffff", "another job")
    somebody.ensure()  # so the flush waits
    zombie = client_of(shm_dir, tmp_path, 1, "old", (0, 1), shared.url)
    reach(zombie)
    facts = facts_of(VersionId(1, 2), 2)
    zombie.flush(FlushOrder(zombie.session.directory, (0,), facts, 1000, "here"))
    until(lambda: "v2 waits" in told(zombie))
    clients = [client_of(shm_dir, tmp_path, shard, "new", (0, 1), shared.url) for shard in (0, 1)]
    agents += map(reach, clients)
    heard = [(m.severity, m.error.partition("shuts down")[2]) for c in clients for m in problems(c)]
    given_up = " for ours, and gives up these flushes: v2"
    assert heard[0] == (logging.WARNING, given_up)
    assert {severity for severity, _ in heard[1:]} <= {logging.INFO}
    until(lambda: not alive(agents[0]))
    assert somebody.held()
    for client in (*clients, zombie):
        client.close()


def test_without_an_agent_waiting_work_fails_and_it_is_reported_once(
    shm_dir: Path, tmp_path: Path, agents: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are free for the memory level then; and the agent is tried again."""
    limits.AGENTS_TRIED.set(monkeypatch, 2)
    limits.AGENT_ANSWERS.set(monkeypatch, 0.1)
    client = client_of(shm_dir, tmp_path, 0, "new")
    client.settings.place().job.create()
    places = [replace(client.settings, index=index).place() for index in range(2)]
    asked = [0, 0]

    def refuse(index: int, listener: socket.socket) -> None:
        """Answer as agents of earlier tierckpts do."""
        with contextlib.suppress(OSError):
            while True:
                channel, _ = listener.accept()
                with channel:
                    channel.recv(100_000)
                    channel.send(b'{"op": "unwelcome"}')
                asked[index] += 1

    listeners = [place.listen() for place in places]
    threads = [threading.Thread(target=refuse, args=each) for each in enumerate(listeners)]
    for thread in threads:
        thread.start()
    client.start()
    client.protect(VersionId(1, 1))
    assert client.wait(PATIENCE_SECONDS, everything=True)
    until(lambda: min(asked) > 3)
    heard = client.poll()
    assert [m.severity for m in heard if isinstance(m, Problem)] == [logging.INFO, logging.ERROR]
    assert [m.error for m in heard if isinstance(m, ProtectFailed)] != []
    for place, listener in zip(places, listeners, strict=True):
        place.address.unlink()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    limits.AGENT_ANSWERS.set(monkeypatch, PATIENCE_SECONDS)
    until(lambda: client.pid is not None)
    agents.append(client.pid or 0)
    client.close()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_ranks_of_a_node_that_differ_have_one_agent(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's environment counts."""
    theirs = iter(["one", "another"])
    monkeypatch.setattr(settings_check, "environment_fingerprint", lambda: next(theirs))

    def program(group: Any) -> tuple[int | None, int]:
        settings = {"shm_dir": str(shm_dir), "group": group}
        with TinyJob(tmp_path / "ckpts", **settings) as job:
            job.restore()
            client = job.checkpointer._agent
            until(lambda: client.pid is not None)
            return client.pid, client.settings.index

    (one, index), (other, same) = run_ranks(2, program)
    assert one == other is not None
    assert index == same == 0


def test_differences_between_launches_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment_fingerprint()
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MASTER_PORT", "12345")
    monkeypatch.setenv("TIERCKPT_SLOTS", "3")
    assert environment_fingerprint() == before
    for name in ("AWS_SESSION_TOKEN", KEY_VARIABLE, "https_proxy", "HTTPS_PROXY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            assert environment_fingerprint() != before
    assert environment_fingerprint() == before
    monkeypatch.syspath_prepend("/another")
    assert environment_fingerprint() != before


def test_neither_the_key_nor_a_hash_of_it_is_in_the_command_line(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user of the machine can read the command line."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with TinyJob(tmp_path / "ckpts", shm_dir=str(shm_dir)) as job:
        job.run(1).settle()
        line = Path(f"/proc/{job.checkpointer._agent.pid}/cmdline").read_text()
        assert "tierckpt.agent.process" in line
        assert KEY not in line
        assert environment_fingerprint() not in line


# --- modules -------------------------------------------------------------------------------------

MINE = """
import colorsys
class Mine:
    name, most_extra_bytes, hides = "mine", 0, False
    def parameters(self): return {}
    def encode(self, block, where): return bytes(block)
    def decode(self, block, where): return block
"""
SCRIPT = """
import colorsys, json, sys
from tierckpt.testing import TinyJob
sys.path.insert(0, sys.argv[1])
with TinyJob("ckpts", shm_dir=sys.argv[2], local_codecs="mine") as job:
    job.run(2)
print([e.text() for e in job.events if e.severity >= 30])
"""


def test_the_agent_finds_the_modules_that_the_script_finds(
    warm_python: None, tmp_path: Path, shm_dir: Path
) -> None:
    """They do not replace modules of the standard library, which the script imported before."""
    (tmp_path / "script").mkdir()
    script = tmp_path / "script" / "train.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "modules"
    info = folder / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tierckpt.codecs]\nmine = mine:Mine\n")
    (folder / "mine.py").write_text(MINE)
    (folder / "colorsys.py").write_text("raise ImportError('not the library')")
    (folder / "csv.py").write_text("raise ImportError('not the library')")
    command = [PYTHON, str(script), str(folder.relative_to(tmp_path)), str(shm_dir)]
    ran = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout == "[]\n"
    store = LocalStore(tmp_path / "ckpts")
    keys = store.keys()
    manifests = [Manifest.decode(store.read_manifest(key)) for key in keys]
    assert {m.key.id.version for m in manifests} == {1, 2}
    assert all("mine" in str(m.encoding) for m in manifests)


def test_a_vanished_path_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", ["", "/somewhere", *sys.path])
    assert _children.module_path()[0] == str(gone)
    gone.rmdir()
    assert "/somewhere" in _children.module_path()
    os.chdir(tmp_path)
