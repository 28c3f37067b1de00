"""A process that has imported torch and torch._dynamo, and forks Python processes on request.

A start of Python costs three seconds of CPU where the program trains, nearly all of it imports. A
fork costs 30 ms. `python` in this folder is the client; `servers.py` starts this.

The fork is safe because the process has one thread, no process group, no agent and no module of
this project, which is checked before every fork. The kernel kills a fork when its client or the
server ends, even if the fork is stopped.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
F_SETSIG = 10
PATIENCE_SECONDS = 120.0
Order = dict[str, Any]


def preload(framework: str) -> None:
    import torch
    import torch._dynamo
    import torch.distributed.run
    import torch.nn.parallel
    import torch.utils.data  # noqa: F401

    if framework:
        importlib.import_module(framework)
    gc.freeze()


def serve(listener: socket.socket) -> NoReturn:
    """Answer clients until standard input ends."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, awake, listener], [], [])
        if 0 in ready:
            os._exit(0)  # the test process has ended
        if awake in ready:
            os.read(awake, 4096)
            report_ends(clients)
        if listener in ready:
            client, _ = listener.accept()
            try:
                order, descriptors = receive(client)
            except OSError:  # it was killed, or stopped, before its request was complete
                client.close()
                continue
            assert threads() == 1
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for each in (awake, wake, listener.detach(), client.detach()):
                    os.close(each)
                for each in clients.values():
                    os.close(each.detach())
                become(order, descriptors, server)
                finish(order["arguments"])
            for each in descriptors:
                os.close(each)
            clients[pid] = client
            say(client, pid)


def receive(client: socket.socket) -> tuple[Order, list[int]]:
    """Receive a request: the command, its standard streams, a pipe that only the client can write
    to, and the client's network namespace. Raises OSError when the client ends or stays silent."""
    client.settimeout(PATIENCE_SECONDS)
    descriptors = array.array("i")
    head, rights, _, _ = client.recvmsg(8, socket.CMSG_SPACE(5 * descriptors.itemsize))
    for _, _, data in rights:
        descriptors.frombytes(data)
    text = bytearray()
    while not head or len(text) < int.from_bytes(head, "big"):
        more = client.recv(1 << 20) if head else b""
        if not more:
            for each in descriptors:
                os.close(each)
            raise ConnectionError
        text += more
    return json.loads(text.decode("utf-8", "surrogateescape")), list(descriptors)


def report_ends(clients: dict[int, socket.socket]) -> None:
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with clients.pop(pid) as client:
            say(client, status)


def say(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it was killed
        client.sendall(f"{number}\n".encode())


def threads() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Threads:")[2].split()[0])


# --- in the forked process -----------------------------------------------------------------------


def become(order: Order, descriptors: list[int], server: int) -> None:
    """Cut every tie to the server; the process still dies with the server and the client."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    network = descriptors.pop()
    if not os.path.samestat(os.fstat(network), os.stat("/proc/self/ns/net")):
        ctypes.CDLL(None).setns(network, CLONE_NEWNET)
    os.close(network)
    die_with_writer(descriptors.pop())
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, source in enumerate(descriptors):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(order["environment"])
    if "WARM_PYTHON_EXECUTABLE" in os.environ:
        sys.executable = os.environ["WARM_PYTHON_EXECUTABLE"]
    show(order)
    os.chdir(order["directory"])
    for stream, file in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        setattr(sys, stream, text_stream(file))
    random.seed()
    sys.modules["numpy"].random.seed()


def show(order: Order) -> None:
    """Have /proc show the command and the environment of this process, not those of the server.
    They overwrite the server's, for which `servers.py` made enough room."""
    ends = [int(x) for x in Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[45:49]]
    command = [os.environ["WARM_PYTHON"], *order["arguments"]]
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    for start, end, texts in ((*ends[:2], command), (*ends[2:], environment)):
        block = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, block, len(block))


def die_with_writer(client: int) -> None:
    """Have the kernel kill this process, even if it is stopped, when no process has the pipe
    `client` open for writing any more. No process may write to it."""
    os.set_inheritable(client, False)
    fcntl.fcntl(client, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(client, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(client, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(client, 0)
    if poll.poll(0):  # already ended
        os._exit(1)


def text_stream(file: int) -> io.TextIOWrapper:
    binary = open(file, "rb" if file == 0 else "wb", closefd=False)  # noqa: SIM115
    unbuffered = file == 2 or os.environ.get("PYTHONUNBUFFERED", "") not in ("", "0")
    errors = "backslashreplace" if file == 2 else "strict"
    return io.TextIOWrapper(
        binary, "utf-8", errors, line_buffering=os.isatty(file), write_through=unbuffered
    )


def finish(arguments: list[str]) -> NoReturn:
    """Call `run`, and end as the interpreter does, without the second that it takes to free all
    imported modules."""
    status = 0
    try:
        run(arguments)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.last_exc = sys.last_value  # type: ignore[attr-defined]
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status & 0xFF)


def run(arguments: list[str]) -> None:
    """Act as `python *arguments`."""
    if arguments[0] == "-u":
        del arguments[0]
    paths = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x]
    first = str(Path(arguments[0]).parent.resolve()) if arguments[0] not in ("-m", "-c") else ""
    if arguments[0] == "-m":
        first = os.getcwd()
    sys.path[:] = [first, *paths, *sys.path]
    match arguments:
        case ["-m", module, *rest]:
            sys.argv[:] = ["-m", *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", program, *rest]:
            sys.argv[:] = ["-c", *rest]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), main.__dict__)
        case [script, *rest]:
            sys.argv[:] = [script, *rest]
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # without -P, which forks would inherit: scripts ask for it
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        if sys.argv[2] and 0 in select.select([0, listening], [], [])[0]:
            os._exit(0)  # nobody asked for a framework
        preload(sys.argv[2])
        serve(listening)
