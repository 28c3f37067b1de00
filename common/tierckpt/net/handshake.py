"""The handshake at the start of each connection, and the listener that admits only its own.

Challenge and response by HMAC-SHA256 over a secret that both sides know (Krawczyk, Bellare and
Canetti, 1997): each side proves that it knows the secret, on a nonce that the other side chose,
before anything else is read. A proof holds for one connection, one side, one purpose and one hello.
It keeps out port scanners and processes of other jobs. It does not encrypt, and does not protect
from changes of packets in transit; neither do the job's own collectives.

    listener -> {"tierckpt": purpose, "protocol": 2, "nonce": ...}
    caller   -> {"tierckpt": purpose, "protocol": 2, "nonce": ..., "hello": {...}, "proof": ...}
    listener -> {"proof": ...}  or  {"error": ...}

`purpose` is the kind of listener, `hello` what the caller says about itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tierckpt.errors import PeerError, RefusedError

from .addresses import Address
from .limits import HELLO_SECONDS, MAX_UNVERIFIED, RETRY_SECONDS
from .link import Head, Link

__all__ = ["PROTOCOL", "Admission", "Caller", "Listener", "admit", "greet"]


PROTOCOL = 2
STRANGER = "it is a process of another job, or of another run of this one"
SAME = "install the same tierckpt on all nodes"


class Caller(NamedTuple):
    """A caller that has proved itself."""

    secret: bytes
    """The one that it knows."""
    hello: Head


class Admission:
    """The listener's side of one handshake. Pure: it neither reads nor writes."""

    def __init__(self, purpose: str) -> None:
        self._purpose, self._nonce = purpose, secrets.token_hex(16)

    @property
    def challenge(self) -> Head:
        """The first message."""
        return {"tierckpt": self._purpose, "protocol": PROTOCOL, "nonce": self._nonce}

    def judge(self, answer: Head, known: Sequence[bytes]) -> tuple[Caller, Head]:
        """The caller, and the last message. Raises RefusedError with the reason."""
        if answer.get("protocol") != PROTOCOL:
            raise RefusedError(f"this side speaks protocol {PROTOCOL}; {SAME}")
        hello: Any = answer.get("hello")
        nonces = self._nonce, str(answer.get("nonce"))
        for secret in known if isinstance(hello, dict) else ():
            if _same(answer.get("proof"), _proof(secret, "caller", self._purpose, *nonces, hello)):
                proof = _proof(secret, "listener", self._purpose, *nonces, hello)
                return Caller(secret, hello), {"proof": proof}
        raise RefusedError(STRANGER)


def admit(link: Link, purpose: str, *known: bytes) -> Caller:
    """The listener's side on a link.

    Raises PeerError when the caller knows none of the secrets. The caller receives the reason, and
    nothing else is read from it. All steps together may take HELLO_SECONDS, however little comes
    at a time.
    """
    admission = Admission(purpose)
    link.deadline = time.monotonic() + HELLO_SECONDS
    link.send(admission.challenge)
    try:
        caller, answer = admission.judge(link.receive(HELLO_SECONDS), known)
    except RefusedError as error:
        link.send_now({"error": str(error)})
        raise RefusedError(f"{link.peer} was refused: {error}") from error
    link.send(answer)
    link.deadline = None
    return caller


def greet(
    link: Link, purpose: str, secret: bytes, hello: Head, seconds: float = HELLO_SECONDS
) -> None:
    """The caller's side on a link; each step of the listener may take `seconds`.

    Raises RefusedError when the listener belongs to another run, is of another kind, or speaks
    another protocol.
    """
    challenge = link.receive(seconds)
    if challenge.get("tierckpt") != purpose:
        raise RefusedError(f"{link.peer} is no listener for {purpose}: it says {challenge}")
    if challenge.get("protocol") != PROTOCOL:
        theirs = challenge.get("protocol")
        raise RefusedError(f"{link.peer} speaks protocol {theirs}, this side {PROTOCOL}; {SAME}")
    nonces = str(challenge.get("nonce")), secrets.token_hex(16)
    proof = _proof(secret, "caller", purpose, *nonces, hello)
    about = {"tierckpt": purpose, "protocol": PROTOCOL, "nonce": nonces[1], "hello": hello}
    link.send({**about, "proof": proof})
    answer = link.receive(seconds)
    if "error" in answer:
        raise RefusedError(f"{link.peer} refused us: {answer['error']}")
    if not _same(answer.get("proof"), _proof(secret, "listener", purpose, *nonces, hello)):
        raise RefusedError(f"{link.peer} does not know the secret of this run of the job")


def _proof(
    secret: bytes, side: str, purpose: str, listener_nonce: str, caller_nonce: str, hello: Head
) -> str:
    said = [PROTOCOL, side, purpose, listener_nonce, caller_nonce, hello]
    text = json.dumps(said, sort_keys=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _same(said: object, proof: str) -> bool:
    return isinstance(said, str) and said.isascii() and hmac.compare_digest(said, proof)


class Listener:
    """Owns a port, a thread that accepts, and one for each connection: a silent stranger keeps
    nobody waiting. Any thread may call any method."""

    def __init__(
        self,
        address: Address,
        purpose: str,
        known: Callable[[], Sequence[bytes]],
        met: Callable[[Link, Caller], bool],
        refused: Callable[[PeerError], None] = lambda error: None,
    ) -> None:
        """Listen there; port 0 takes any free one. `known` gives the secrets that admit.

        `met` is called in the thread of an admitted connection. It is the listener's until then,
        and is closed afterwards, unless `met` has returned True: then it is the caller's. `refused`
        is called for each of the others. Raises OSError, and RuntimeError without a thread.
        """
        self._purpose, self._known, self._met, self._refused = purpose, known, met, refused
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        where = (address.host, address.port)
        self._socket = socket.create_server(where, family=family, backlog=128)
        self.address = Address(address.host, self._socket.getsockname()[1])
        self._lock = threading.Lock()
        self._links: dict[threading.Thread, Link] = {}
        self._unverified = threading.BoundedSemaphore(MAX_UNVERIFIED)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tierckpt-listener", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._socket.close()
            raise

    def close(self) -> None:
        """Listen no more, end the listener's connections, and join all threads. May be called
        again."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        with self._lock:
            links = dict(self._links)
            for link in links.values():
                link.shut()
        for thread in links:
            thread.join()

    def _run(self) -> None:
        while not self._closing:
            try:
                sock, (host, port, *_) = self._socket.accept()
            except OSError:
                if not self._closing:
                    time.sleep(RETRY_SECONDS)
                continue
            if not self._unverified.acquire(blocking=False):
                sock.close()
                continue
            self._attend(Link(sock, str(Address(host, port)), HELLO_SECONDS))

    def _attend(self, link: Link) -> None:
        thread = threading.Thread(target=partial(self._meet, link), daemon=True)
        with self._lock:
            self._links[thread] = link
        try:
            thread.start()
        except RuntimeError:  # out of threads: it may pass, and the caller tries again
            self._unverified.release()
            with self._lock:
                del self._links[thread]
            link.close()

    def _meet(self, link: Link) -> None:
        """The thread of a connection."""
        taken = False
        try:
            try:
                caller = admit(link, self._purpose, *self._known())
            except PeerError as error:
                self._refused(error)
                return
            finally:
                self._unverified.release()
            taken = self._met(link, caller)
        finally:
            with self._lock:
                self._links.pop(threading.current_thread(), None)
            if not taken:
                link.close()
