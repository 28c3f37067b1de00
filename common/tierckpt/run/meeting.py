"""The meeting of a job's shims, their messages, and where the scripts of each attempt meet.

Rank 0's shim listens. Its address is in the launcher's own store (torchrun's agent, horovodrun's
rendezvous server); or it listens at MASTER_ADDR:MASTER_PORT, before rank 0's script does; or, on
one machine, at a socket with the launch's name; or at `--rendezvous`. A process of its own asks
the store and connects, so that the shim keeps neither.

Messages are JSON lines over a stream socket: one connection from each shim to rank 0's.

Each attempt has an environment: a rendezvous that no process of an earlier attempt has used.

torch's `env://` meets at MASTER_ADDR:MASTER_PORT, or in the store of torchrun's agent, where the
keys of dead processes stay (torch issues 135712, 167288). Horovod's Gloo meets at the launcher's
HTTP server, where they stay, too. So each attempt after the first gets servers of its own, on rank
0's machine: torch's store, announced as that of an agent, and Horovod's server.
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
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from tierckpt._milestones import ATTEMPT_VARIABLE
from tierckpt.net.addresses import own_host
from tierckpt.net.limits import JOB, tend
from tierckpt.run import process
from tierckpt.run.launcher import Options
from tierckpt.run.preload import folder
from tierckpt.run.process import FORWARDED

from .launcher import HOROVODRUN, Place, node_of, slot_of

__all__ = [
    "NOWHERE",
    "Connection",
    "Link",
    "Listener",
    "Meeting",
    "Message",
    "Rendezvous",
    "connect",
    "enter",
    "hello_of",
    "key_file",
    "knows",
    "meeting_of",
    "needs_own",
    "proof",
    "received",
]


_COUNT, _AGENT_STORE = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_ADDR, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


Slots = Mapping[int, Mapping[str, str]]
"""The variables of all ranks' places (`launcher.slot_of`), by rank."""


class Rendezvous:
    """Makes the meeting place of each attempt, in rank 0's shim: servers in a process of its own,
    which lasts as long as the attempt.

    torch's clients wait for 0.3 s after a refused connection, so the server is there before the
    scripts, and before the failure. To start and to end a process takes longer than all else that a
    shim does after a failure, so both are done in `prepare`."""

    def __init__(self, place: Place, handlers: process.Handlers) -> None:
        self._place, self._handlers = place, handlers
        self._current: _Servers | None = None
        self._next: _Servers | None = None
        self._former: _Servers | None = None

    def prepare(self, slots: Slots) -> None:
        """Start the servers of the next attempt, and end those of the last one."""
        if self._former is not None:
            self._former.close()
            self._former = None
        if self._next is None:
            self._next = _Servers(self._place, self._handlers, slots)

    def renew(self, slots: Slots) -> dict[str, str]:
        """Return variables for the next attempt's environment."""
        if self._next is None:
            self.prepare(slots)
        self._former, self._current, self._next = self._current, self._next, None
        assert self._current is not None
        return self._current.environment()

    @property
    def helpers(self) -> list[int]:
        """Ids of the processes."""
        return [each.pid for each in self._all()]

    def forget(self) -> None:
        """In a forked process: close descriptors; the servers stay."""
        for each in self._all():
            each.forget()

    def close(self) -> None:
        """End all servers."""
        for each in self._all():
            each.close()
        self._former = self._current = self._next = None

    def _all(self) -> list[_Servers]:
        found = self._former, self._current, self._next
        return [each for each in found if each is not None]


class _Servers:
    """The servers of one attempt, and their process."""

    def __init__(self, place: Place, handlers: process.Handlers, slots: Slots) -> None:
        reading, writing = os.pipe()
        self._answer: int | None = reading
        self.pid = process.fork_helper(handlers, lambda: _serve(place, slots, writing))
        os.close(writing)

    def environment(self) -> dict[str, str]:
        """Variables that name the servers; empty if none could be started."""
        assert self._answer is not None
        with os.fdopen(self._answer, "rb") as answer:
            self._answer = None
            found: dict[str, str] = json.loads(answer.read() or b"{}")
            return found

    def forget(self) -> None:
        """Close the descriptor."""
        if self._answer is not None:
            os.close(self._answer)
            self._answer = None

    def close(self) -> None:
        """End the process."""
        self.forget()
        process.kill_one(self.pid)


def _serve(place: Place, slots: Slots, writing: int) -> None:
    """Start the servers, write their variables, and stay."""
    for number in FORWARDED:  # a script may need them until its end
        signal.signal(number, signal.SIG_IGN)
    found, kept = {}, list[Any]()
    if "MASTER_PORT" in os.environ:
        import torch.distributed as dist

        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        kept.append(store)
        found["MASTER_PORT"] = str(store.port)
    if place.launcher == HOROVODRUN and _PORT in os.environ:
        found[_ADDR] = own_host(towards=os.environ[_ADDR])
        found[_PORT] = str(_serve_horovod(slots, kept))
    os.write(writing, json.dumps(found).encode())
    os.close(writing)
    while True:
        signal.pause()


def _serve_horovod(slots: Slots, kept: list[Any]) -> int:
    """Start Horovod's own server; returns its port."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    names = ("RANK", "LOCAL_RANK", "CROSS_RANK", "SIZE", "LOCAL_SIZE", "CROSS_SIZE")
    server = RendezvousServer()
    port = int(server.start())
    server.init(
        [
            SlotInfo(slot["HOROVOD_HOSTNAME"], *(int(slot[f"HOROVOD_{name}"]) for name in names))
            for _, slot in sorted(slots.items())
        ]
    )
    kept.append(server)
    return port


def needs_own(environment: Mapping[str, str] = os.environ) -> bool:
    """True if the launcher itself has restarted its processes, and they share a store."""
    return environment.get(_AGENT_STORE) == "True" and environment.get(_COUNT, "0") != "0"


def enter(attempt: int, changes: Mapping[str, str], environment: Any = os.environ) -> None:
    """In the script's process: set its environment."""
    environment[ATTEMPT_VARIABLE] = str(attempt)
    environment.update(changes)
    if "MASTER_PORT" in changes:
        environment[_AGENT_STORE] = "True"
    if attempt == 1:
        return
    environment[_COUNT] = str(int(environment.get(_COUNT, "0")) + attempt - 1)
    if error_file := environment.get(_ERROR_FILE):  # the error of the last attempt
        with contextlib.suppress(OSError):
            os.unlink(error_file)


MAX_BYTES = 1 << 20
Message = dict[str, Any]


class Connection:
    """One end; owns the socket. Nothing blocks and nothing raises: a broken connection is
    closed."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream, self._buffer = stream, b""
        self.peer = "this machine"
        """The host at the other end."""
        if stream.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # gone already
                self.peer = str(stream.getpeername()[0]).removeprefix("::ffff:")
        self.is_open = True
        stream.setblocking(False)
        tend(stream, JOB)

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self._stream.fileno()

    def send(self, message: Message) -> None:
        """Send a message, small enough for the socket's buffer."""
        data = json.dumps(message).encode() + b"\n"
        try:
            whole = self._stream.send(data) == len(data)
        except OSError:
            whole = False
        if not whole:  # the reader finds the end
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Message]:
        """The messages that have arrived. At the end of the stream the connection is closed."""
        try:
            while len(self._buffer) < MAX_BYTES:
                more = self._stream.recv(65536)
                if not more:
                    self.close()
                    break
                self._buffer += more
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:  # another program
            found = [None]
        if len(self._buffer) >= MAX_BYTES or not all(isinstance(each, dict) for each in found):
            self.close()
            return []
        return found

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._stream.close()


Result = TypeVar("Result")
PATIENCE_SECONDS = 300.0
"""As torch's stores wait for all ranks."""
NAP_SECONDS = 0.05
MAX_LINE_BYTES = 1 << 16
"""Limit of a message of the handshake."""
STORE, KV, PORT, NAME = "store", "kv", "port", "name"
NOWHERE = (
    "the shims of this job cannot find each other, so failures are left to the launcher. Give "
    "tierckpt run --rendezvous HOST:PORT, with rank 0's host and a free port, or set MASTER_ADDR "
    "and MASTER_PORT"
)


class Meeting(Struct, frozen=True):
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
            host = own_host(towards=meeting.host)
        entry = json.dumps([host, port, self.secret])
        return process.fork_helper(handlers, lambda: _publish(meeting, entry))

    def accept(self) -> socket.socket | None:
        """A new connection, of this user if known; else None."""
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
        if not (more := stream.recv(1)) or len(data) > MAX_LINE_BYTES:
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


class Link:
    """One rank's or spare's end. Main thread; the selector holds its sockets."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        handlers: process.Handlers,
        obey: Callable[[Message], None],
        ended: Callable[[bool], None],
    ) -> None:
        """`obey` takes the messages of rank 0's shim; `ended` is called at the end of the
        connection with True, and with False if none could be made."""
        self._selector, self._handlers = selector, handlers
        self._obey, self._ended = obey, ended
        self._connection: Connection | None = None
        self.helper: int | None = None
        """The process that dials."""

    @property
    def is_open(self) -> bool:
        """True if there is a connection."""
        return self._connection is not None

    def dial(self, where: Meeting, hello: Message) -> None:
        """Connect, in the background."""
        self.helper, answer = connect(where, hello, self._handlers)
        self._selector.register(answer, selectors.EVENT_READ, lambda: self._dialled(answer))

    def _dialled(self, answer: socket.socket) -> None:
        self._selector.unregister(answer)
        stream = received(answer)
        self.end_helper()
        if stream is None:
            self._ended(False)
            return
        self._connection = Connection(stream)
        self._selector.register(self._connection, selectors.EVENT_READ, self._receive)

    def end_helper(self) -> None:
        """End the process that dials, if there is one."""
        pid, self.helper = self.helper, None
        if pid is not None:
            process.kill_one(pid)

    def _receive(self) -> None:
        connection = self._connection
        assert connection is not None
        descriptor = connection.fileno()
        for message in connection.receive():
            self._obey(message)
        if not connection.is_open:
            self._selector.unregister(descriptor)
            self._connection = None
            self._ended(True)

    def send(self, message: Message) -> None:
        """Send a message, if there is a connection."""
        if self._connection is not None:
            self._connection.send(message)
