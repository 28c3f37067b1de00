"""A trainer's session: no failure ends it, and it retires shards that no other session would."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.checksum_codec import Checksum
from tests.support.encoded_shards import NoServices
from tests.support.facts import facts_of
from tierckpt.agent import (
    PROTOCOL,
    Agent,
    AskProgress,
    Bye,
    Commit,
    CommitFailed,
    Committed,
    Finished,
    Flush,
    FlushFailed,
    FlushOrder,
    Hello,
    Inherit,
    Introduce,
    KnownNodes,
    Listen,
    ListenFailed,
    Listening,
    ListenSettings,
    Problem,
    Progress,
    Protect,
    ProtectFailed,
    Retire,
    SessionSettings,
    TrainerSession,
    Welcome,
    receive_message,
    send_message,
)
from tierckpt.codecs import OUR_CODECS
from tierckpt.errors import TierckptError
from tierckpt.format import ParityKey, ShardKey, VersionId
from tierckpt.storage import LocalStore
from tierckpt.testing import TinyJob, commit_one

KEY = ShardKey(VersionId(1, 1), 0, 1)

# --- failures ------------------------------------------------------------------------------------


class Unruly(Checksum):
    """A user's codec, which raises its own error at every other version."""

    name = "unruly"
    fail: Callable[[], Exception]

    def encode(self, block: Any, where: Any) -> Any:
        if where.version % 2 == 0:
            raise type(self).fail()
        return super().encode(block, where)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OUR_CODECS, "unruly", ("zstd", "Unruly"))
    monkeypatch.setattr("tierckpt.codecs.zstd.Unruly", Unruly, raising=False)


@pytest.mark.parametrize(
    ("kind", "text"), [(ValueError, "no such thing"), (MemoryError, ""), (RuntimeError, "zstd")]
)
def test_an_error_of_a_users_codec_costs_that_version_and_is_named(
    kind: type[Exception],
    text: str,
    tmp_path: Path,
    shm_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    # A new one each time: its traceback keeps objects alive that would have been closed.
    monkeypatch.setattr(Unruly, "fail", staticmethod(lambda: kind(text)), raising=False)
    settings = {"shm_dir": str(shm_dir), "agent": "inline", "local_codecs": "unruly"}
    with TinyJob(tmp_path / "ckpts", **settings) as job:
        for step in range(1, 6):
            job.run(step)
            job.settle()
    assert [e.version for e in job.heard("committed", "local")] == [1, 3, 5]
    failed = job.heard("failed", "local")
    assert [e.version for e in failed] == [2, 4]
    for event in failed:
        assert "the codec unruly cannot encode block 0" in event.text()
        assert f"{kind.__name__}: {text}" in event.text()
    assert not [e for e in job.events if "ended unexpectedly" in e.text()]


def test_an_error_of_a_users_codec_in_a_restart_is_no_damage(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes were sound, or their checksum would differ: no older version is taken instead."""
    install(monkeypatch)
    settings = {"shm_dir": str(shm_dir), "agent": "inline", "local_codecs": "unruly"}
    with TinyJob(tmp_path / "ckpts", **settings) as job:
        job.run(1)

    def broken(self: Unruly, block: Any, where: Any) -> Any:
        raise IndexError("a bug")

    monkeypatch.setattr(Unruly, "decode", broken)
    again = TinyJob(tmp_path / "ckpts", **settings)
    with pytest.raises(TierckptError, match=r"unruly cannot decode block .*IndexError: a bug"):
        again.restore()
    again.checkpointer.abandon()


class Broken(NoServices):
    """Services that all fail."""

    def flusher(self, session: SessionSettings) -> None:
        raise RuntimeError("can't start new thread")

    def protector(self) -> None:
        raise ImportError("no numpy")


@contextlib.contextmanager
def served(settings: SessionSettings, services: Any) -> Iterator[socket.socket]:
    """A running session; yields the trainer's end of its channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        thread = threading.Thread(target=TrainerSession(settings, theirs, services).serve)
        thread.start()
        try:
            yield ours
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_every_request_that_cannot_be_started_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = VersionId(1, 7)
    key = ShardKey(id_, 0, 1)
    order = FlushOrder("/nowhere", (0,), facts_of(id_), 1, "here")
    where = ListenSettings("secret", "lo", 0, "localhost")
    asked: list[tuple[Any, Any]] = [
        (Commit(key, str(tmp_path / "none")), CommitFailed(id_, "FileNotFoundError: ")),
        (Flush(order), FlushFailed(id_, "RuntimeError: ")),
        (Protect(id_), ProtectFailed(id_, "ImportError: ")),
        (Listen(where), ListenFailed("ImportError: ")),
        (Introduce((), None), Problem("ImportError: ")),
        (Inherit(where, None), Problem("ImportError: ")),
        (AskProgress(), Problem("RuntimeError: ")),
        (Hello(PROTOCOL, None), Problem("ValueError: Hello is no order")),
    ]
    settings = SessionSettings(str(tmp_path / "ckpts"), 0, 1, "1")
    with served(settings, Broken()) as channel:
        for question, answer in asked:
            send_message(channel, question)
            heard: Any = receive_message(channel)[0]
            assert heard.error.startswith(answer.error)
            assert replace(heard, error=answer.error) == answer


@pytest.mark.parametrize("garbage", [b"{", b'{"op": "retire"}', b'{"op": "no such thing"}'])
def test_an_unknown_message_is_answered_and_the_next_one_handled(
    garbage: bytes, tmp_path: Path
) -> None:
    settings = SessionSettings(str(tmp_path / "ckpts"), 0, 1, "1")
    with served(settings, NoServices()) as channel:
        channel.send(garbage)
        heard, _ = receive_message(channel)
        assert isinstance(heard, Problem)
        assert "received an invalid message of its trainer" in heard.error
        send_message(channel, AskProgress())
        assert receive_message(channel) == (Progress(0.0), [])


# --- one trainer after the other -----------------------------------------------------------------


@contextlib.contextmanager
def trainer(node: Agent, session: SessionSettings) -> Iterator[socket.socket]:
    """The trainer's end of a channel, after the agent's welcome."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.settimeout(60)
        thread = node.attend(theirs)
        send_message(ours, Hello(PROTOCOL, session))
        welcome, _ = receive_message(ours)
        assert isinstance(welcome, Welcome)
        try:
            yield ours
        finally:
            ours.close()
            thread.join()


def test_nodes_meet_while_a_killed_trainers_shard_is_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor's own shards come after that, in order."""
    started, resume, served = threading.Event(), threading.Event(), list[str]()

    def slow_commit(session: TrainerSession, message: Commit, fds: list[int]) -> None:
        started.set()
        resume.wait()
        served.append(message.segment or "")

    monkeypatch.setattr(TrainerSession, "_commit", slow_commit)
    settings = SessionSettings(str(tmp_path / "ckpts"), 0, 1, "1", ranks=(0,))
    where = ListenSettings("secret", "lo", 0, "localhost")
    known_nodes = KnownNodes(2, ())
    with contextlib.closing(Agent(linger_seconds=0.0)) as node, contextlib.ExitStack() as lives:
        channel = lives.enter_context(trainer(node, settings))
        lives.callback(resume.set)
        send_message(channel, Commit(KEY, "the run before's"))
        assert started.wait(60)
        channel.shutdown(socket.SHUT_RDWR)
        successor = lives.enter_context(trainer(node, settings))
        send_message(successor, Commit(KEY, "the first"))
        send_message(successor, Listen(where))
        send_message(successor, Introduce((), known_nodes))
        send_message(successor, Commit(KEY, "the second"))
        send_message(successor, Bye())
        heard, _ = receive_message(successor)
        assert isinstance(heard, Listening)
        assert served == []
        resume.set()
        heard, _ = receive_message(successor)
        assert heard == Finished(last=True)
        assert served == ["the run before's", "the first", "the second"]
        assert node.protector().known_nodes() == known_nodes


def test_work_handed_over_by_a_killed_trainer_is_done_with_or_without_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer reads them at boundaries. The kernel reports unread ones before sent messages."""
    started, resume, served = threading.Event(), threading.Event(), list[str]()

    def commit(session: TrainerSession, message: Commit, fds: list[int]) -> None:
        served.append(message.segment or "")
        session.say(Committed(KEY.id, 0, 0.0, 0.0, direct=False))
        started.set()
        resume.wait()

    monkeypatch.setattr(TrainerSession, "_commit", commit)
    settings = SessionSettings(str(tmp_path / "ckpts"), 0, 1, "1", ranks=(0,))
    long = 1000 * "the third"
    with contextlib.closing(Agent(linger_seconds=0.0)) as node, trainer(node, settings) as killed:
        for stem in ("the first", "the second", long):
            send_message(killed, Commit(KEY, stem))
        assert started.wait(60)
        killed.close()
        resume.set()
    assert served == ["the first", "the second", long]


# --- strays --------------------------------------------------------------------------------------

LINEAGE = ((1, 0), (2, 2))
"""The second run continued from v2."""


def shards(directory: Path, generation: int, version: int, numbers: list[int], of: int) -> None:
    """Shards of a version, with their parity."""
    store = LocalStore(directory)
    store.create()
    for number in numbers:
        for kind in (ShardKey, ParityKey):
            commit_one(store, kind(VersionId(generation, version), number, of))


def there(directory: Path) -> set[tuple[int, int, int]]:
    """Generation, version and shard of all that exists, shards and parity."""
    store = LocalStore(directory)
    found = [
        {(k.id.generation, k.id.version, k.shard) for k in keys}
        for keys in (
            store.keys(),
            store.parities(),
        )
    ]
    assert found[0] == found[1]
    return found[0]


def retire(
    directory: Path,
    session: SessionSettings,
    safe: list[int],
    held: Iterable[ShardKey] = (),
    keep: tuple[VersionId, ...] = (),
) -> None:
    """Retention as the trainer orders it, while the agent still reads the shards `held`."""
    services: Any = NoServices()
    services.held.add(list(held))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        TrainerSession(session, theirs, services)._retire(Retire(VersionId(*safe), LINEAGE, keep))


def sessions(
    directory: Path, ranks: tuple[int, ...], of: int, keep_last: int
) -> list[SessionSettings]:
    return [SessionSettings(str(directory), r, of, str(keep_last), ranks=ranks) for r in ranks]


@pytest.mark.parametrize(("old", "new", "were", "are"), [
    (8, 6, [4, 5, 6, 7], (3, 4, 5)),  # fewer ranks: s6 and s7 of 8 are ranks 0's and 1's
    (4, 8, [2, 3], (4, 5, 6, 7)),  # more
    (4, 4, [2, 3], (0, 1)),  # as many, dealt out differently by the launcher
])  # fmt: skip
def test_slots_of_ranks_that_moved_to_another_node_are_removed_too(
    old: int, new: int, were: list[int], are: tuple[int, ...], tmp_path: Path
) -> None:
    for version in (1, 2):
        shards(tmp_path, 1, version, were, of=old)
    spare = tmp_path / f".spare.s{were[-1]:05d}of"
    torn = tmp_path / f".v0000000002.g000001.s{were[-1]:05d}of{old:05d}.tmp"
    for leftover in (spare, torn):
        leftover.touch()
    left = {(1, 1, s) for s in were} | {(1, 2, s) for s in were}
    for version in (3, 4):
        shards(tmp_path, 2, version, list(are), of=new)
        left |= {(2, version, s) for s in are}
        for session in sessions(tmp_path, are, new, keep_last=2):
            retire(tmp_path, session, [2, version])
        left -= {(1, version - 2, s) for s in were}
        assert there(tmp_path) == left
    assert not spare.exists()
    assert not torn.exists()
    names = [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert all(int(n[8:13]) in are for n in names), "only of ranks that can use them"


def test_strays_stay_as_long_as_they_are_needed(tmp_path: Path) -> None:
    """No version of this run is safe; it is to be kept; it is pinned; it is still read."""
    shards(tmp_path, 1, 1, [2, 3], of=4)
    shards(tmp_path, 1, 2, [2, 3], of=4)
    before, (first, _) = there(tmp_path), sessions(tmp_path, (0, 1), 4, keep_last=1)
    retire(tmp_path, first, [1, 2])
    assert there(tmp_path) == before
    shards(tmp_path, 2, 3, [0, 1], of=4)
    retire(tmp_path, first, [2, 3], keep=(VersionId(1, 2),))
    assert there(tmp_path) == {(1, 2, 2), (1, 2, 3), (2, 3, 0), (2, 3, 1)}
    mark = tmp_path / "v0000000002.g000001.pin"
    mark.touch()
    retire(tmp_path, first, [2, 3])
    assert (1, 2, 2) in there(tmp_path)
    mark.unlink()
    held = [kind(VersionId(1, 2), s, 4) for kind in (ShardKey, ParityKey) for s in (2, 3)]
    retire(tmp_path, first, [2, 3], held=held)
    assert there(tmp_path) == {(1, 2, 2), (1, 2, 3), (2, 3, 0), (2, 3, 1)}
    retire(tmp_path, first, [2, 3])
    assert there(tmp_path) == {(2, 3, 0), (2, 3, 1)}


def test_slots_that_a_flush_still_reads_stay_until_it_ends(tmp_path: Path) -> None:
    session = SessionSettings(str(tmp_path), 0, 1, keep="1")
    for version in (3, 4):
        shards(tmp_path, 2, version, [0], of=1)
    held = [kind(VersionId(2, 3), 0, 1) for kind in (ShardKey, ParityKey)]
    retire(tmp_path, session, [2, 4], held=held)
    assert there(tmp_path) == {(2, 3, 0), (2, 4, 0)}
    retire(tmp_path, session, [2, 4])
    assert there(tmp_path) == {(2, 4, 0)}


def test_in_a_directory_that_nodes_share_nothing_is_stray(tmp_path: Path) -> None:
    """The other node's agent may still read its shards there, and retires them itself."""
    shards(tmp_path, 1, 1, [0, 1, 2, 3], of=4)
    shards(tmp_path, 2, 3, [0, 1, 2, 3], of=4)
    for session in sessions(tmp_path, (0, 1), 4, keep_last=1):
        retire(tmp_path, session, [2, 3])
    assert there(tmp_path) == {(1, 1, 2), (1, 1, 3), *((2, 3, s) for s in range(4))}
