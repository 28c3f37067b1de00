"""A peer: gone, late, skipping, restarted, or another process; and this side giving up.

In each case the error names the peer, nothing unfinished is visible, and the next version works.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.peer_shards import QUICK, SECRET, Members, nothing_of, rank_of, wait_until
from tierckpt.erasure import Code
from tierckpt.errors import (
    LEFT_OUT,
    ConfigError,
    ExchangeCancelledError,
    PeerError,
    RefusedError,
)
from tierckpt.net import PROTOCOL, Address, Link, own_host
from tierckpt.net.limits import LOOK_SECONDS
from tierckpt.net.link import WAKE_BYTES
from tierckpt.peer import Transport
from tierckpt.testing import injected

CODE = Code(3, 2, 1)
LENGTHS = [3 << 20] * 3
SHORT = replace(QUICK, join_seconds=0.3)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with Members(tmp_path, CODE, LENGTHS) as made:
        yield made


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def check_next_version(members: Members, version: int = 2) -> None:
    """The next version is protected, and a shard can be rebuilt from it."""
    members.limits = QUICK
    for transport in members.transports:
        transport.limits = QUICK
    members.protect(version)
    assert members.rebuilt({1}, version) == {1: members.image(1, version)}


# --- missing peers -------------------------------------------------------------------------------


def test_a_member_that_never_starts_is_named_when_the_limit_is_over(tmp_path: Path) -> None:
    with Members(tmp_path, CODE, LENGTHS, SHORT) as members:
        members.run([members.exchange(0), members.exchange(2)])
        for member in (0, 2):
            error = members.errors[member]
            assert isinstance(error, PeerError)
            assert f"rank {rank_of(1)} ({members.addresses[1]})" in str(error)
            assert "did not start v1 within 0.3 s" in str(error)
        assert nothing_of(tmp_path, 1)
        check_next_version(members)


def test_a_member_without_its_agent_is_named(tmp_path: Path) -> None:
    with Members(tmp_path, CODE, LENGTHS, SHORT) as members:
        members.transports[1].close()
        members.run([members.exchange(0)])
        assert "cannot be reached" in str(members.errors[0])
        assert str(members.addresses[1]) in str(members.errors[0])
        # It comes back, at another port; kept old connections do no harm.
        members.transports[1] = Transport(SECRET, "127.0.0.1", limits=QUICK)
        members.addresses = tuple(t.address for t in members.transports)
        check_next_version(members)


def test_an_agent_back_at_its_port_is_found_though_connections_were_kept(members: Members) -> None:
    members.protect(1)
    port = members.addresses[1].port
    members.transports[1].close()
    members.transports[1] = Transport(SECRET, "127.0.0.1", port, QUICK)
    check_next_version(members)


def test_a_member_that_could_not_be_reached_is_waited_for_less_the_next_time(
    tmp_path: Path,
) -> None:
    """Until its agent is there: then its trainer has as long as any."""
    with Members(tmp_path, CODE, LENGTHS, SHORT) as members:
        port = members.addresses[1].port
        members.transports[1].close()
        members.run([members.exchange(0)])
        assert "did not start v1 within 0.3 s" in str(members.errors[0])
        members.transports[0].limits = replace(QUICK, join_seconds=1000.0, again_seconds=0.4)
        members.run([members.exchange(0, 2)])
        assert "did not start v2 within 0.4 s" in str(members.errors[0])
        members.transports[1] = Transport(SECRET, "127.0.0.1", port, QUICK)
        for member in (0, 2):
            members.transports[member].limits = replace(QUICK, again_seconds=QUICK.join_seconds)
        members.errors.clear()
        threads = [members.start(members.exchange(member, 3)) for member in (0, 2)]
        wait_until(lambda: not members.transports[0].doubts(members.addresses[1]))
        threads.append(members.start(members.exchange(1, 3)))
        join(threads)
        assert members.errors == {}


def test_an_agent_that_starts_late_is_waited_for(members: Members) -> None:
    port = members.addresses[1].port
    members.transports[1].close()
    threads = [members.start(members.exchange(member)) for member in (0, 2)]
    wait_until(lambda: all(members.transports[m]._hosts for m in (0, 2)))
    members.transports[1] = Transport(SECRET, "127.0.0.1", port, QUICK)
    threads.append(members.start(members.exchange(1)))
    join(threads)
    assert members.errors == {}
    assert len(members.parities()) == 3


def test_a_member_that_skipped_the_version_reports_it_at_once(
    members: Members, tmp_path: Path
) -> None:
    first = [members.start(members.exchange(member, 1)) for member in (0, 2)]
    ahead = members.exchange(1, 2)
    second = members.start(ahead)
    join(first)
    for member in (0, 2):
        assert f"v1 {LEFT_OUT}: v2 is next" in str(members.errors[member])
    second = [second, *(members.start(members.exchange(member, 2)) for member in (0, 2))]
    members.errors.clear()
    join(second)
    assert members.errors == {}
    assert nothing_of(tmp_path, 1)
    assert len(members.parities(2)) == 3


def test_a_member_that_comes_after_another_gave_up_receives_the_reason(members: Members) -> None:
    ahead = members.start(members.exchange(1, 2))
    members.start(members.exchange(0, 1)).join()
    members.start(members.exchange(2, 1)).join()
    assert f"rank {rank_of(0)} ({members.addresses[0]}) gave up" in str(members.errors[2])
    assert f"v1 {LEFT_OUT}: v2 is next" in str(members.errors[2])
    join([ahead, *(members.start(members.exchange(m, 2)) for m in (0, 2))])
    assert len(members.parities(2)) == 3


# --- failures in the middle ----------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["meet", "send", "write", "end"])
def test_a_member_that_fails_takes_the_version_not_the_next_one(
    members: Members, operation: str, tmp_path: Path
) -> None:
    for transport in members.transports:
        transport.limits = replace(QUICK, join_seconds=2.0)
    with injected(f"eio@peer:op={operation},member=1,version=1") as rules:
        members.run([members.exchange(member) for member in range(3)])
    assert rules[0].hits
    assert isinstance(members.errors[1], OSError)
    for member in (0, 2):
        assert isinstance(members.errors[member], PeerError)
        assert members.errors[member].member in (1, 2 - member)
        assert f"rank {rank_of(1)} ({members.addresses[1]})" in str(members.errors[member])
    assert any("injected" in str(members.errors[m]) for m in (0, 2))
    assert nothing_of(tmp_path, 1)
    check_next_version(members)


def test_a_shard_that_was_refilled_makes_no_parity_anywhere(
    members: Members, tmp_path: Path
) -> None:
    refilled = members.exchange(1, still_sealed=lambda: False)
    members.run([members.exchange(0), refilled, members.exchange(2)])
    assert isinstance(members.errors[1], FileNotFoundError)
    for member in (0, 2):
        assert "was refilled while it was read" in str(members.errors[member])
    assert nothing_of(tmp_path, 1)
    check_next_version(members)


def test_an_older_version_stays_when_the_next_one_fails(members: Members, tmp_path: Path) -> None:
    members.protect(1)
    with injected("eio@peer:op=send,member=0,version=2,hit=2"):
        members.run([members.exchange(member, 2) for member in range(3)])
    assert len(members.errors) == 3
    assert nothing_of(tmp_path, 2)
    assert members.rebuilt({0}, 1) == {0: members.image(0, 1)}
    check_next_version(members, 3)


def test_a_member_that_restarts_ends_the_exchange_of_the_others(members: Members) -> None:
    """It was killed and started again while the others were in the middle of the version."""
    first = members.exchange(1)
    with members.transports[1].hosting(first):  # joined by the others, and then does nothing
        others = [members.exchange(member) for member in (0, 2)]
        threads = [members.start(exchange) for exchange in others]
        wait_until(lambda: all(1 in exchange._inbox._attempts for exchange in others))
        links = [members.transports[1].connect(members.addresses[m]) for m in (0, 2)]
        for member, link in zip((0, 2), links, strict=True):
            head = {"op": "join", "tag": first.tag, "series": first.series, "to": member}
            head |= {"version": 1, "generation": 1, "member": 1, "attempt": "another"}
            link.send(head, first._shard.manifest)
        join(threads)
        for link in links:
            members.transports[1].drop(link)
        first._give_up("the test is over")
    for member in (0, 2):
        assert "was restarted during the exchange" in str(members.errors[member])
    check_next_version(members)


def test_a_member_that_waits_for_a_third_one_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Member 1 stops when all but member 2 have joined it. Member 2 has `join_seconds` to reach it,
    longer than 0 would wait for 2 by itself."""
    stopped = threading.Event()
    with Members(tmp_path, CODE, LENGTHS, replace(QUICK, join_seconds=2.0)) as members:
        members.transports[0].limits = replace(QUICK, stall_seconds=0.5)
        exchanges = [members.exchange(member) for member in range(3)]
        victim, attend = exchanges[1], exchanges[1].attend

        def attend_all_but_one(link: Link, head: dict[str, Any], record: bytes) -> None:
            if head["member"] == 2:
                stopped.wait()
            attend(link, head, record)

        def stop(*_: object) -> None:
            stopped.wait()
            raise PeerError("it was stopped")

        monkeypatch.setattr(victim, "attend", attend_all_but_one)
        monkeypatch.setattr(victim, "_send", stop)
        monkeypatch.setattr(victim, "waits_for", stop)
        threads = [members.start(exchange) for exchange in exchanges]
        for member in (0, 2):
            threads[member].join()
        stopped.set()
        threads[1].join()
        where = f"rank {rank_of(1)} ({members.addresses[1]})"
        assert f"{where} did not start v1 within 2 s" in str(members.errors[2])
        assert where in str(members.errors[0])
        check_next_version(members)


def test_one_at_work_itself_is_not_blamed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Member 1's disk takes longer than the limit, until one of the others has asked it for the
    reason, as soon as the limit was over."""
    answers: list[bool] = []
    asked = threading.Semaphore(0)
    with Members(tmp_path, CODE, LENGTHS) as members:
        exchanges = [members.exchange(member) for member in range(3)]
        for other in (exchanges[0], exchanges[2]):
            other._inbox.stall_seconds = 0.2
            excuse = other._inbox._excuse

            def ask(member: int, seconds: float, excuse: Any = excuse) -> bool:
                answers.append(excuse(member, QUICK.stall_seconds))
                asked.release()
                return answers[-1]

            monkeypatch.setattr(other._inbox, "_excuse", ask)
        slow, fault = exchanges[1], exchanges[1]._fault

        def write(operation: str) -> None:
            if operation == "write" and not answers:
                assert asked.acquire(timeout=120)
            fault(operation)

        monkeypatch.setattr(slow, "_fault", write)
        members.run(exchanges)
        assert answers
        assert all(answers)
        assert len(members.parities(1)) == 3


def test_a_slow_one_is_not_blamed_alone(members: Members) -> None:
    """Member 1 answers, with a slow disk perhaps, while member 2 hangs: the error names both."""
    slow, asks = members.exchange(1), members.exchange(0)
    with members.transports[1].hosting(slow):
        members.transports[2].close()
        assert not asks._blame.excuse(1, 1.5 * QUICK.stall_seconds)
        text = str(asks._explain(PeerError("rank 1 sent nothing for 9 s", 1)))
    assert "makes no progress; no answer from " in text
    assert text.endswith(asks._party.name(2))


@pytest.mark.parametrize("ended", [False, True], ids=["still failing", "ended"])
def test_one_whose_last_message_was_lost_is_asked_for_its_reason(
    members: Members, ended: bool
) -> None:
    """A member that fails may shut the connection that its reason would have gone through."""
    neighbour, asks = members.exchange(2), members.exchange(0)
    with nullcontext() if ended else members.transports[2].hosting(neighbour):
        if ended:
            members.transports[2].gave_up(neighbour, "rank 3 has failed")
        else:
            neighbour._fail(PeerError("rank 3 has failed", 1))
        text = str(asks._explain(PeerError("rank 5: the connection broke", 2)))
    assert text.endswith("rank 5: the connection broke; it gave up: rank 3 has failed")


# --- giving up -----------------------------------------------------------------------------------


def test_cancelled_while_it_waits_for_others(members: Members) -> None:
    exchange = members.exchange(0)
    thread = members.start(exchange)
    wait_until(lambda: bool(members.transports[0]._hosts))
    exchange.cancel("superseded by v2")
    thread.join()
    assert isinstance(members.errors[0], ExchangeCancelledError)
    assert "superseded by v2" in str(members.errors[0])
    check_next_version(members)


def test_members_receive_the_reason_of_a_cancelled_exchange(
    members: Members, tmp_path: Path
) -> None:
    exchanges = [members.exchange(member) for member in range(3)]
    asked: list[int] = []

    def cancel_once() -> bool:
        asked.append(1)
        exchanges[1].cancel("superseded by v2")
        return True

    exchanges[1] = members.exchange(1, still_sealed=cancel_once)
    members.run(exchanges)
    assert asked
    assert isinstance(members.errors[1], ExchangeCancelledError)
    for member in (0, 2):
        assert "superseded by v2" in str(members.errors[member])
    assert nothing_of(tmp_path, 1)
    check_next_version(members)


def test_closing_the_transport_ends_an_exchange_under_way(members: Members) -> None:
    thread = members.start(members.exchange(0))
    wait_until(lambda: bool(members.transports[0]._hosts))
    members.transports[0].close()
    thread.join()
    assert "the agent is closing" in str(members.errors[0])
    with pytest.raises(ExchangeCancelledError, match="closing"):
        members.exchange(0).run()


def test_the_same_exchange_twice_at_once_is_refused(members: Members) -> None:
    thread = members.start(members.exchange(0))
    wait_until(lambda: bool(members.transports[0]._hosts))
    with pytest.raises(PeerError, match="being exchanged already"):
        members.exchange(0).run()
    threads = [thread, *(members.start(members.exchange(member)) for member in (1, 2))]
    join(threads)
    assert members.errors == {}


# --- other processes ---------------------------------------------------------------------------


def test_shards_of_another_run_make_no_parity(tmp_path: Path) -> None:
    with Members(tmp_path, CODE, LENGTHS, replace(QUICK, join_seconds=2.0)) as members:
        members.run([members.exchange(0), members.exchange(1, run_id="dead"), members.exchange(2)])
        assert len(members.errors) == 3
        assert any("shards of two runs make no parity" in str(e) for e in members.errors.values())
        assert nothing_of(tmp_path, 1)
        check_next_version(members)


def test_an_agent_with_another_secret_is_refused_with_the_reason(tmp_path: Path) -> None:
    heard: list[str] = []
    with Transport(SECRET, "127.0.0.1", notice=heard.append) as ours:
        ours.read_server.add(Members(tmp_path, CODE, LENGTHS).store(0))
        with Transport(b"another run", "127.0.0.1") as stranger:
            with pytest.raises(RefusedError, match="another job, or of another run"):
                stranger.connect(ours.address)
            with pytest.raises(RefusedError, match="refused us"):
                ours.connect(stranger.address)
        wait_until(lambda: bool(heard))
        assert "refused" in heard[0]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(4),
        b"\xff" * 64,
        (7).to_bytes(4, "big") + b"garbage",
        (4000).to_bytes(4, "big") + b"[" * 4000,
        (2).to_bytes(4, "big") + b"[]",
        (17).to_bytes(4, "big") + b'{"op":"manifest"}',
        b"",
    ],
)
def test_garbage_on_the_port_is_hung_up_on_and_does_no_harm(sent: bytes, tmp_path: Path) -> None:
    heard: list[str] = []
    with Members(tmp_path, CODE, [8192] * 3) as members:
        members.transports[0]._notice = heard.append
        address = (members.addresses[0].host, members.addresses[0].port)
        with socket.create_connection(address, 20) as scanner:
            said = bytearray()
            while b"nonce" not in said:
                more = scanner.recv(4096)
                assert more, "hung up on before it said anything"
                said += more
            # A close with unread bytes resets the connection: any call here may fail with that.
            with suppress(OSError):
                scanner.sendall(sent)
                scanner.shutdown(socket.SHUT_WR)
                while more := scanner.recv(4096):
                    said += more
            assert b"proof" not in said
        wait_until(lambda: bool(heard))
        members.protect()


def test_the_number_of_unauthenticated_connections_is_limited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tierckpt.net.handshake.MAX_UNVERIFIED", 2)
    with Members(tmp_path, CODE, [8192] * 3) as members:
        address = (members.addresses[0].host, members.addresses[0].port)
        with (
            socket.create_connection(address, 20) as one,
            socket.create_connection(address, 20) as other,
            socket.create_connection(address, 20) as third,
        ):
            assert one.recv(4)
            assert other.recv(4)
            assert third.recv(4) == b""
        wait_until(lambda: not members.transports[0]._listener._links)
        members.protect()


def test_another_protocol_is_a_clear_error_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    with Transport(SECRET, "127.0.0.1", notice=heard.append) as ours:
        listener = socket.create_server(("127.0.0.1", 0))
        with listener:

            def newer() -> None:
                sock, _ = listener.accept()
                link = Link(sock, "caller", 20)
                link.send({"tierckpt": "peer", "protocol": 3, "nonce": "1"})
                link.close()

            thread = threading.Thread(target=newer)
            thread.start()
            with pytest.raises(RefusedError, match="speaks protocol 3, this side 2; install"):
                ours.connect(Address("127.0.0.1", listener.getsockname()[1]))
            thread.join()
        address = (ours.address.host, ours.address.port)
        link = Link(socket.create_connection(address, 20), "listener", 20)
        link.receive(20)
        link.send({"protocol": 3, "nonce": "1", "proof": "1"})
        assert "speaks protocol 2" in link.receive(20)["error"]
        link.close()
        wait_until(lambda: bool(heard))


def test_a_listener_must_prove_itself_too() -> None:
    """A process that took the port of a dead agent gets no shard."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, Transport(SECRET, "127.0.0.1") as ours:

        def liar() -> None:
            sock, _ = listener.accept()
            link = Link(sock, "caller", 20)
            link.send({"tierckpt": "peer", "protocol": PROTOCOL, "nonce": "1"})
            proof = link.receive(20)["proof"]
            link.send({"proof": proof})  # the best proof that it has is ours
            link.close()

        thread = threading.Thread(target=liar)
        thread.start()
        with pytest.raises(RefusedError, match="does not know the secret"):
            ours.connect(Address("127.0.0.1", listener.getsockname()[1]))
        thread.join()


# --- the wire ----------------------------------------------------------------------------------


@contextmanager
def links(seconds: float) -> Iterator[tuple[Link, Link]]:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        caller = socket.create_connection(listener.getsockname(), 20)
        accepted, _ = listener.accept()
    one, other = Link(caller, "rank 7 (node7:4000)", seconds), Link(accepted, "caller", seconds)
    try:
        yield one, other
    finally:
        one.close()
        other.close()


def test_a_peer_that_does_not_read_slows_the_sender_and_is_named() -> None:
    taken: list[int] = []
    with links(0.2) as (sender, _):

        def send_for_ever() -> None:
            while len(taken) < 1024:
                sender.send({"op": "data"}, bytes(1 << 20))
                taken.append(1 << 20)

        with pytest.raises(PeerError, match=r"rank 7 \(node7:4000\) took nothing for 0.2 s"):
            send_for_ever()
    assert sum(taken) < 64 << 20, "no more than the kernel buffers"


def test_progress_too_small_for_a_wakeup_is_still_progress() -> None:
    """Half of a window arrives, and the other half only after the first has been noticed."""
    seen = threading.Event()
    half, whole = bytes(WAKE_BYTES // 4), bytearray(WAKE_BYTES // 2)
    with links(LOOK_SECONDS * 30) as (sender, receiver):

        def dribble() -> None:
            sender._socket.sendall(half)
            seen.wait(LOOK_SECONDS * 60)
            sender._socket.sendall(half)

        thread = threading.Thread(target=dribble)
        thread.start()
        receiver.receive_into(memoryview(whole), seen.set)
        thread.join()
        receiver.seconds = 0.1
        with pytest.raises(PeerError, match=r"caller sent nothing for 0\.1 s"):
            receiver.receive_into(memoryview(whole))


def test_whole_windows_wake_the_receiver_not_every_packet() -> None:
    woken: list[int] = []
    waited = threading.Event()
    window = bytearray(WAKE_BYTES * 8)
    with links(30) as (sender, receiver):

        def send_in_bits() -> None:
            waited.wait(120)  # else all bytes may be there at the first look
            for low in range(0, len(window), 1024):
                sender._socket.sendall(window[low : low + 1024])

        thread = threading.Thread(target=send_in_bits)
        look = receiver._await_bytes

        def counted(nbytes: int, *args: Any) -> float:
            woken.append(nbytes)
            waited.set()
            return look(nbytes, *args)

        receiver._await_bytes = counted  # type: ignore[method-assign]
        thread.start()
        receiver.receive_into(memoryview(window))
        thread.join()
    assert 0 < len(woken) <= 64, "8 times, and some more where the machine is so slow that it looks"


def test_a_peer_that_takes_nothing_is_excused_as_often_as_somebody_answers_for_it() -> None:
    asked: list[float] = []
    with links(0.1) as (sender, _):
        sender.excuse = lambda seconds: asked.append(seconds) or len(asked) < 3
        with pytest.raises(PeerError, match=r"rank 7 .* took nothing for 0.3 s"):
            sender.send({"op": "data"}, bytes(64 << 20))
    assert asked == pytest.approx([0.1, 0.2, 0.3])


def test_a_peer_that_says_nothing_or_hangs_up_is_named() -> None:
    with links(0.2) as (receiver, other):
        with pytest.raises(PeerError, match=r"rank 7 \(node7:4000\) sent nothing for 0.2 s"):
            receiver.receive(0.2)
        other.send({"op": "data"}, b"123")
        assert receiver.receive(20)["nbytes"] == 3
        with pytest.raises(PeerError, match=r"rank 7.* sent nothing"):
            receiver.receive_into(memoryview(bytearray(4)))
        other.close()
        with pytest.raises(
            PeerError, match=r"rank 7.*: the connection broke: the other side closed it"
        ):
            receiver.receive(20)


def test_bytes_that_are_damaged_on_the_way_are_noticed(tmp_path: Path) -> None:
    """By a relay between two members that flips a bit far after all heads."""
    with Members(tmp_path, CODE, LENGTHS) as members, relay(members.addresses[1]) as through:
        roundabout = (members.addresses[0], through, members.addresses[2])
        bent = members.exchange(0, addresses=roundabout)
        members.run([bent, members.exchange(1), members.exchange(2)])
        assert "arrived damaged" in str(members.errors[1])
        assert len(members.errors) == 3
        assert nothing_of(tmp_path, 1)
        check_next_version(members)


@contextmanager
def relay(to: Address) -> Iterator[Address]:
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def forward(source: socket.socket, target: socket.socket, flip_at: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if flip_at is not None and passed <= flip_at < passed + len(data):
                    bent = bytearray(data)
                    bent[flip_at - passed] ^= 1
                    data = bytes(bent)
                passed += len(data)
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                target = socket.create_connection((to.host, to.port))
                opened.extend((sock, target))
                for ends, flip_at in (((sock, target), 300_000), ((target, sock), None)):
                    threads.append(threading.Thread(target=forward, args=(*ends, flip_at)))
                    threads[-1].start()

    opened: list[socket.socket] = []
    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield Address("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join()
        for sock in opened:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        join(threads)
        for sock in (listener, *opened):
            sock.close()


# --- addresses ---------------------------------------------------------------------------------


def test_where_to_listen() -> None:
    assert own_host(towards="127.0.0.1") == "127.0.0.1"
    assert own_host("lo") == "127.0.0.1"
    assert own_host("127.0.0.1", towards="nowhere.invalid") == "127.0.0.1"
    assert str(Address("::1", 80)) == "[::1]:80"
    for wrong in ("192.0.2.1", "no-such-interface.invalid"):
        with pytest.raises(ConfigError, match=r"lo"):
            own_host(wrong)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("0.0.0.0", "stands for all addresses"),
        ("::", "stands for all addresses"),
        ("fe80::1%lo", "is a link-local address, which means nothing to other machines"),
        ("169.254.1.7", "is no address of this machine"),
    ],
)
def test_values_that_other_nodes_could_not_use_are_refused_by_name(wrong: str, why: str) -> None:
    name = re.escape(wrong.partition("%")[0])
    with pytest.raises(ConfigError, match=rf"{name}\W.*{why}.*set peer_interface to one of .*lo"):
        own_host(wrong)


def test_another_node_of_unknown_name_is_named_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        own_host(towards="nd1.invalid")
    assert "'nd1.invalid' is no known host" in str(caught.value)
    assert "set peer_interface to one of" in str(caught.value)


def test_a_port_in_use_is_an_error_that_names_the_setting() -> None:
    with (
        Transport(SECRET, "127.0.0.1") as one,
        pytest.raises(ConfigError, match="set another interface or port"),
    ):
        Transport(SECRET, "127.0.0.1", one.address.port)
