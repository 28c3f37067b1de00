"""Callers of a listener: those that know the secret get in, others do not, however they try."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tierckpt.errors import PeerError, RefusedError
from tierckpt.net import PROTOCOL, Address, Admission, Caller, Link, Listener, greet, reach

SECRET, HELLO = b"of this run", {"rank": 1}


class Door:
    """A listener that keeps what came in, and why the others did not."""

    def __init__(self) -> None:
        self.hellos: list[Any] = []
        self.refused: list[str] = []
        self.changed = threading.Semaphore(0)
        where = Address("127.0.0.1", 0)
        self.listener = Listener(where, "tests", lambda: [SECRET], self.met, self.refuse)

    def met(self, _: Link, caller: Caller) -> bool:
        self.hellos.append(caller.hello)
        return False

    def refuse(self, error: PeerError) -> None:
        self.refused.append(str(error))
        self.changed.release()

    def enter(self, secret: bytes = SECRET, purpose: str = "tests") -> None:
        with closing(reach(self.listener.address, 20)) as link:
            greet(link, purpose, secret, HELLO, 20)


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.listener.close()


def answer_to(challenge: dict[str, Any]) -> dict[str, Any]:
    """The answer of one that knows the secret."""
    ours, theirs = socket.socketpair()
    link, other = Link(ours, "listener", 20), Link(theirs, "caller", 20)

    def call() -> None:
        with pytest.raises(PeerError):
            greet(link, "tests", SECRET, HELLO, 20)

    with closing(link), closing(other):
        other.send(challenge)
        thread = threading.Thread(target=call)
        thread.start()
        answer = other.receive(20)
        other.shut()
        thread.join()
    return answer


def test_one_with_another_secret_or_purpose_is_refused(door: Door) -> None:
    with pytest.raises(RefusedError, match="another job"):
        door.enter(b"another")
    with pytest.raises(RefusedError, match="no listener for journal"):
        door.enter(purpose="journal")
    assert door.hellos == []


def test_an_answer_counts_for_its_own_challenge_purpose_and_hello() -> None:
    admission = Admission("tests")
    answer = answer_to(admission.challenge)
    caller, _ = admission.judge(answer, [b"another", SECRET])
    assert caller == Caller(SECRET, HELLO)
    changed = {**answer, "hello": {"rank": 2}}
    for judge, said in ((Admission("tests"), answer), (admission, changed)):
        with pytest.raises(RefusedError, match="another job"):
            judge.judge(said, [SECRET])
    other = Admission("journal")
    other._nonce = admission._nonce
    with pytest.raises(RefusedError, match="another job"):
        other.judge(answer, [SECRET])
    with pytest.raises(RefusedError, match="another job"):
        admission.judge({"protocol": PROTOCOL, "hello": "none", "proof": "é"}, [SECRET])


def test_a_listener_cannot_be_made_to_prove_its_own_challenge(door: Door) -> None:
    """The challenge comes back as the caller's, with the proof of the other side."""
    with closing(reach(door.listener.address, 20)) as link:
        nonce = link.receive(20)["nonce"]
        link.send({"protocol": PROTOCOL, "nonce": nonce, "hello": HELLO, "proof": nonce})
        answer = link.receive(20)
    assert "proof" not in answer
    assert "another job" in answer["error"]


@pytest.mark.parametrize("said", [b"", b"\0\0", b"\xff" * 8, b"\0\0\xff\xff{"])
def test_a_stranger_that_waits_keeps_nobody_waiting(door: Door, said: bytes) -> None:
    """It says nothing, a part of a frame, or too large a one."""
    where = door.listener.address
    with socket.create_connection((where.host, where.port), 20) as stranger:
        stranger.sendall(said)
        door.enter()
    door.listener.close()
    assert door.hellos == [HELLO]


def test_one_that_sends_a_byte_at_a_time_has_no_more_time(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierckpt.net.handshake.HELLO_SECONDS", 0.3)
    where, over = door.listener.address, threading.Event()
    with socket.create_connection((where.host, where.port), 20) as slow:

        def drip() -> None:
            slow.sendall((1000).to_bytes(4, "big"))
            try:
                while not over.wait(0.05):
                    slow.sendall(b" ")
            except OSError:
                pass

        thread = threading.Thread(target=drip)
        thread.start()
        assert door.changed.acquire(timeout=60)
        over.set()
        thread.join()
    assert door.hellos == []


def test_a_connection_taken_out_of_its_link_outlives_the_listener() -> None:
    """Also if the listener closes before its own thread knows that the connection is taken."""
    inside, go_on, taken = threading.Event(), threading.Event(), list[socket.socket]()

    def met(link: Link, _: Caller) -> bool:
        taken.append(link.released())
        inside.set()
        return go_on.wait(60)

    listener = Listener(Address("127.0.0.1", 0), "tests", lambda: [SECRET], met)
    with closing(reach(listener.address, 20)) as link:
        greet(link, "tests", SECRET, HELLO, 20)
        assert inside.wait(60)
        closer = threading.Thread(target=listener.close)
        closer.start()
        while closer.is_alive() and not listener._socket._closed:  # type: ignore[attr-defined]
            closer.join(0.01)
        closer.join(0.2)  # it ends the connections that it still has
        go_on.set()
        closer.join()
        with taken[0] as end:
            end.settimeout(60)
            link.send({"still": "here"})
            assert b"here" in end.recv(100)
