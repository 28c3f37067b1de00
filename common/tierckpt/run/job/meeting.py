"""The meeting of a job's shims: how the other ranks find rank 0's.

Rank 0's shim listens. Its address is in the launcher's own store (torchrun's agent, horovodrun's
rendezvous server); or it listens at MASTER_ADDR:MASTER_PORT, before rank 0's script does; or, on
one machine, at a socket with the launch's name; or at `--rendezvous`. A process of its own asks the
store and connects, so that the shim keeps neither.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import http.client
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tierckpt.run import process
from tierckpt.run.learned import folder
from tierckpt.run.options import Options

from .attempts import address_towards
from .channel import Message
from .launcher import HOROVODRUN, Place, node_of, slot_of

Result = TypeVar("Result")
PATIENCE_SECONDS = 300.0
"""As torch's stores wait for all ranks."""
NAP_SECONDS = 0.05
MOST_LINE_BYTES = 1 << 16
"""Limit of a message of the handshake."""
STORE, KV, PORT, NAME = "store", "kv", "port", "name"
NOWHERE = (
    "the shims of this job cannot find each other, so failures are left to the launcher. Give "
    "tierckpt run --rendezvous HOST:PORT, with rank 0's host and a free port, or set MASTER_ADDR "
    "and MASTER_PORT"
)


@dataclass(frozen=True)
class Meeting:
    """The way to meet, and the address that it uses; see the module's docstring."""

    kind: str
    host: str = ""
    port: int = 0
    key: str = ""
    """The name of the socket, or of the entry in the store."""
    is_lasting: bool = False
    """Rank 0's shim listens there as long as the job runs: spares may come at any time."""
    launcher: Meeting | None = None
    """The launcher's store, where ranks find the key of a lasting meeting. Spares have another
    launcher, and find it in `key_file`."""


def meeting_of(place: Place, rendezvous: str) -> Meeting | None:
    """The way for this launch; None if there is none."""
    get = os.environ.get
    if rendezvous:
        host, _, port = rendezvous.rpartition(":")
        store = meeting_of(place, "")
        known = store if store is not None and store.kind in (STORE, KV) else None
        return Meeting(PORT, host.strip("[]"), int(port), is_lasting=True, launcher=known)
    host, port = get("MASTER_ADDR", ""), get("MASTER_PORT", "0")
    if get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Meeting(STORE, host, int(port), f"tierckpt/run/{_start(place)}")
    if place.launcher == HOROVODRUN and get("HOROVOD_GLOO_RENDEZVOUS_PORT"):
        server = get("HOROVOD_GLOO_RENDEZVOUS_ADDR", ""), get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
        return Meeting(KV, server[0], int(server[1]), "shims")
    if host and port.isdigit() and int(port):
        return Meeting(PORT, host, int(port), place.job)
    if place.is_one_node and place.job:
        text = f"{os.getuid()} {place.job}"
        return Meeting(NAME, key=f"\0tierckpt-run-{hashlib.sha256(text.encode()).hexdigest()}")
    return None


def _start(place: Place) -> str:
    """The number of the launcher's own restarts: they share a store."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


class Listener:
    """Rank 0's end: accepts connections until all ranks are there."""

    def __init__(self, meeting: Meeting, size: int) -> None:
        """Listen. Raises OSError if the address is taken, or a key cannot be made."""
        self._meeting, self.is_lasting = meeting, meeting.is_lasting
        published = meeting.kind in (STORE, KV)
        if meeting.is_lasting:
            self.secret = _made_key()
        else:
            self.secret = secrets.token_hex(16) if published else _key_of(meeting)
        if _named(meeting):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(meeting.key)
        else:
            dual = socket.has_dualstack_ipv6()
            self.socket = socket.create_server(
                ("", 0 if published else meeting.port),
                family=socket.AF_INET6 if dual else socket.AF_INET,
                dualstack_ipv6=dual,
            )
        self.socket.listen(min(size, 4096))
        self.socket.setblocking(False)

    def publish(self, handlers: process.Handlers) -> int | None:
        """Write the address to the launcher's store, in a process of its own; returns its id."""
        own, meeting = self._meeting, self._meeting.launcher or self._meeting
        if meeting.kind not in (STORE, KV):
            return None
        port, host = self.socket.getsockname()[1], own.host
        if own.kind == KV:
            host = address_towards(meeting.host, meeting.port)
        entry = json.dumps([host, port, self.secret])
        return process.fork_helper(handlers, lambda: _publish(meeting, entry))

    def accept(self) -> socket.socket | None:
        """A new connection, of this user if that is known; else None."""
        try:
            stream, _ = self.socket.accept()
        except OSError:
            return None
        if _named(self._meeting) and _user_of(stream) != os.getuid():
            stream.close()
            return None
        return stream

    def close(self) -> None:
        """Free the address."""
        self.socket.close()


def key_file() -> Path:
    """The file with the user's key of meetings at `--rendezvous`, readable by the user alone."""
    return folder() / "rendezvous.key"


def _made_key() -> str:
    """The key in `key_file`, which is made if there is none. Raises OSError."""
    path = key_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(made, path)  # whole, or not there
        finally:
            made.unlink()
    return path.read_text()


def _key_of(meeting: Meeting) -> str:
    """The key that a caller knows by itself."""
    if not meeting.is_lasting:
        return "" if _named(meeting) else meeting.key
    try:
        return key_file().read_text()
    except OSError:
        return ""  # refused, with the remedy


def proof(secret: str, role: str, *parts: object) -> str:
    """The proof that a caller, or rank 0, knows the secret: of the challenges of both, and of the
    caller's hello."""
    text = json.dumps([role, *parts], sort_keys=True)
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def knows(secret: str, challenge: str, hello: Message) -> bool:
    """Whether the sender of this hello knows the secret."""
    said = {name: value for name, value in hello.items() if name != "proof"}
    expected = proof(secret, "caller", challenge, said)
    return hmac.compare_digest(str(hello.get("proof")).encode(), expected.encode())


def _named(meeting: Meeting) -> bool:
    return meeting.kind == NAME


def _user_of(stream: socket.socket) -> int:
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little")


def _publish(meeting: Meeting, entry: str) -> None:
    if meeting.kind == STORE:
        _store(meeting).set(meeting.key, entry)
        return
    connection = http.client.HTTPConnection(meeting.host, meeting.port, timeout=PATIENCE_SECONDS)
    connection.request("PUT", f"/tierckpt/{meeting.key}", body=entry.encode())
    connection.getresponse().read()


def _store(meeting: Meeting) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        meeting.host,
        meeting.port,
        is_master=False,
        timeout=datetime.timedelta(seconds=PATIENCE_SECONDS),
    )


# --- the other ranks ------------------------------------------------------------------------------


def hello_of(place: Place, options: Options) -> Message:
    """The first message of this process to rank 0's shim."""
    return {
        "rank": place.rank,
        "size": place.size,
        "slot": slot_of(os.environ),
        "node": node_of(os.environ),
        "program": [options.program, *options.arguments],
        "standby": options.standby,
    }


def connect(
    meeting: Meeting, hello: Message, handlers: process.Handlers
) -> tuple[int, socket.socket]:
    """Connect to rank 0's shim, in a process of its own; returns its id, and a socket for
    `received`."""
    ours, theirs = socket.socketpair()

    def work() -> None:
        ours.close()
        usual = meeting if hello["standby"] else meeting.launcher or meeting
        stream, secret = _dial(usual)
        _greet(stream, secret, hello)
        socket.send_fds(theirs, [b"x"], [stream.fileno()])

    pid = process.fork_helper(handlers, work)
    theirs.close()
    return pid, ours


def _greet(stream: socket.socket, secret: str, hello: Message) -> None:
    """Prove to rank 0's shim, and have it prove, that both know the secret. Raises OSError."""
    stream.settimeout(PATIENCE_SECONDS)
    challenge, own = str(_line(stream).get("challenge")), secrets.token_hex(16)
    said = {**hello, "challenge": own}
    said["proof"] = proof(secret, "caller", challenge, said)
    stream.sendall(json.dumps(said).encode() + b"\n")
    answer = _line(stream)
    if why := answer.get("refused"):
        raise PermissionError(f"rank 0's shim refuses this process: {why}")
    expected = proof(secret, "hub", own, challenge)
    if not hmac.compare_digest(str(answer.get("proof")).encode(), expected.encode()):
        raise PermissionError("the process at rank 0's address does not know this job's key")


def _line(stream: socket.socket) -> Message:
    """The next message, and no byte after it."""
    data = bytearray()
    while not data.endswith(b"\n"):
        if not (more := stream.recv(1)) or len(data) > MOST_LINE_BYTES:
            raise ConnectionError("rank 0's shim has closed the connection")
        data += more
    found = json.loads(data)
    return found if isinstance(found, dict) else {}


def received(answer: socket.socket) -> socket.socket | None:
    """The connected socket; None if the connection failed."""
    with answer:
        _, descriptors, _, _ = socket.recv_fds(answer, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _dial(meeting: Meeting) -> tuple[socket.socket, str]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    if meeting.kind == NAME:
        return _until(deadline, lambda: _dial_name(meeting.key)), ""
    host, port = meeting.host, meeting.port
    if meeting.kind == STORE:
        host, port, secret = json.loads(_store(meeting).get(meeting.key))
    elif meeting.kind == KV:
        host, port, secret = _until(deadline, lambda: _read_kv(meeting))
    else:
        secret = ""
    stream = _until(deadline, lambda: socket.create_connection((host, port), 10.0))
    return stream, secret or _key_of(meeting)


def _until(deadline: float, attempt: Callable[[], Result]) -> Result:
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(NAP_SECONDS)


def _dial_name(name: str) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.connect(name)
    except OSError:
        stream.close()
        raise
    return stream


def _read_kv(meeting: Meeting) -> tuple[str, int, str]:
    connection = http.client.HTTPConnection(meeting.host, meeting.port, timeout=10.0)
    with contextlib.closing(connection):
        connection.request("GET", f"/tierckpt/{meeting.key}")
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise FileNotFoundError(meeting.key)
        host, port, secret = json.loads(body)
        return host, port, secret


__all__ = ["NOWHERE", "Listener", "Meeting", "connect", "hello_of", "key_file", "knows", "meeting_of", "proof", "received"]
