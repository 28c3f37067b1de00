"""The simulated standard library: what is below it is the world, what is above it is the real code.

`_thread`, `time`, `os`, `select`, `socket`, `fcntl`, `subprocess`, `signal`, `secrets`, `atexit`
are the world's. `threading`, `queue`, `selectors`, `pathlib`, `tempfile`, `shutil`,
`concurrent.futures` are Python's own, run once more on top of these. A module is made once, and
always acts for the process that runs.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

from . import store
from .image import Image, compiled
from .locks import thread_module
from .scheduler import Killed
from .world import SEEN, Exit, Process, World

EFFECTS = (
    *("access", "chdir", "chmod", "chown", "fchmod", "fsync", "fdatasync", "ftruncate", "truncate"),
    *("link", "lstat", "listdir", "lseek", "makedirs", "mkdir", "posix_fallocate", "pread"),
    *("preadv", "pwrite", "pwritev", "read", "readlink", "remove", "rename", "replace", "rmdir"),
    *("scandir", "stat", "statvfs", "symlink", "unlink", "utime", "write", "fstat", "isatty"),
    *("sendfile", "fstatvfs"),
)
"""Calls that are real; each is a moment at which a fault, or another task, may come."""
WITH_PATH = frozenset(
    (
        *("access", "chmod", "link", "lstat", "listdir", "makedirs", "mkdir", "readlink", "remove"),
        *("rename", "replace", "rmdir", "scandir", "stat", "statvfs", "symlink", "truncate"),
        *("unlink", "utime"),
    )
)
WITH_TWO = frozenset(("link", "rename", "replace", "symlink"))
NO_EFFECT = ("nice", "setpriority", "sched_setaffinity", "posix_fadvise", "setpgid", "setsid")


class Environ(MutableMapping[str, str]):
    """The environment of the process that runs."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getitem__(self, name: str) -> str:
        return self._world.process.environ[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._world.process.environ[name] = value

    def __delitem__(self, name: str) -> None:
        del self._world.process.environ[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._world.process.environ)

    def __len__(self) -> int:
        return len(self._world.process.environ)

    def copy(self) -> dict[str, str]:
        """As of `os.environ`."""
        return dict(self)


class Entry:
    """As of `os.scandir`."""

    def __init__(self, folder: str, real: os.DirEntry[str]) -> None:
        self.name, self.path, self._real = real.name, os.path.join(folder, real.name), real
        self.is_dir, self.is_file, self.is_symlink = real.is_dir, real.is_file, real.is_symlink
        self.stat, self.inode = real.stat, real.inode

    def __fspath__(self) -> str:
        return self.path


class Entries:
    """What `os.scandir` gives, in an order that is the same in each run."""

    def __init__(self, folder: Any, found: Any) -> None:
        with found:
            real = sorted(found, key=lambda each: each.name)
        self._entries = iter([Entry(os.fspath(folder), each) for each in real])

    def __iter__(self) -> Iterator[Entry]:
        return self._entries

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As of the real one."""


class Library:
    """The modules of a world. They are made once, and serve all its histories."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.programs: dict[str, Callable[[Process, list[str]], Any]] = {}
        """By module: what `child_command` starts."""
        self.modules: dict[str, types.ModuleType] = {}
        self.modules["_thread"] = thread_module(world)
        self.modules["time"] = self._time()
        self.modules["os"] = self._os()
        self._copy("genericpath")
        self.modules["os.path"] = self.modules["posixpath"] = self._copy("posixpath")
        self.modules["os"].path = self.modules["os.path"]
        self.modules["_io"] = self.modules["io"] = self._io()
        self.modules["select"] = self._select()
        self.modules["fcntl"] = self._fcntl()
        self.modules["socket"] = self._socket()
        self.modules["signal"] = self._signal()
        self.modules["secrets"] = self._secrets()
        self.modules["atexit"] = self._atexit()
        self.modules["subprocess"] = self._subprocess()
        self.modules["faulthandler"] = types.ModuleType("faulthandler")
        self.modules["_queue"] = types.ModuleType("_queue")  # without its SimpleQueue
        self.modules["_threading_local"] = types.ModuleType("_threading_local")
        self.modules["_threading_local"].local = object
        threading = self._copy("threading")
        self.modules["_threading_local"] = self._copy("_threading_local")
        threading.main_thread = self._main_thread
        threading.excepthook = self._failed_thread
        threading.local = self.modules["_threading_local"].local
        self._number(threading.Thread)
        for name in ("queue", "fnmatch", "selectors", "pathlib", "tempfile", "shutil"):
            self._copy(name)
        futures = types.ModuleType("concurrent.futures")
        self.modules["concurrent.futures"] = futures
        futures._base = self._copy("concurrent.futures._base")
        self._number(futures._base.Future)
        futures._base.id = hash  # it acquires several in the order of their addresses
        self._copy("concurrent.futures.thread")
        futures.__dict__.update(self.modules["concurrent.futures._base"].__dict__)
        futures.__dict__.update(self.modules["concurrent.futures.thread"].__dict__)
        concurrent = types.ModuleType("concurrent")
        concurrent.futures = futures
        self.modules["concurrent"] = concurrent
        self.modules["importlib"] = self._importlib()
        self.modules["pickle"] = self._pickle()
        self.modules["gc"] = self._gc()
        self._own_hooks()

    def _number(self, kind: Any) -> None:
        """Let sets of these objects have an order that is the same in each run of a history."""
        world, init = self.world, kind.__init__

        @wraps(init)
        def numbered(thing: Any, *args: Any, **kwargs: Any) -> None:
            world.made += 1
            thing._made = world.made
            init(thing, *args, **kwargs)

        kind.__init__, kind.__hash__ = numbered, lambda thing: thing._made

    def _main_thread(self) -> Any:
        threading, process = self.modules["threading"], self.world.process
        here = threading.get_ident()
        first = process.tasks[0].ident if process.tasks else here
        return threading.current_thread() if here == first else threading._main_thread

    def _failed_thread(self, failure: Any) -> None:
        if not issubclass(failure.exc_type, Killed) and not self.world.over:
            self.world.process.failure = failure.exc_value

    def image(self, process: Process) -> Image:
        """The modules of a new process."""
        process.image = Image.take(self.world, self.modules, self._open)
        process.at_exit += process.image.at_exit
        return process.image

    def _copy(self, name: str) -> types.ModuleType:
        """A module of the real library, run again on the simulated ones."""
        real = __import__(name, fromlist=["*"])
        module = types.ModuleType(name)
        module.__dict__["__file__"] = real.__file__
        module.__dict__["__package__"] = name.rpartition(".")[0]
        own = {**builtins.__dict__, "__import__": self._import, "open": self._open}
        module.__dict__["__builtins__"] = own
        self.modules[name] = module
        before = sys.modules[name]
        exec(compiled(Path(str(real.__file__))), module.__dict__)
        sys.modules[name] = before
        return module

    def _import(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> types.ModuleType:
        if name == "_queue" or (name == "_thread" and fromlist and "_local" in fromlist):
            raise ImportError(name)
        if level:
            name = ".".join(filter(None, [globals["__package__"], name]))
        if name in self.modules:
            return self.modules[name if fromlist else name.split(".")[0]]
        return builtins.__import__(name, None, None, fromlist, 0)

    def _guarded(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        world = self.world
        with_path = name in WITH_PATH
        results: dict[str, Callable[[Any, Any], Any]] = {
            "readlink": lambda _, found: world.seen(found),
            "listdir": lambda _, found: sorted(found),
            "scandir": Entries,
        }

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (with_path and args and isinstance(args[0], (str, os.PathLike))):
                world.enter(name, args)
                return function(*args, **kwargs)
            if self._outside(args[0]):
                return function(*args, **kwargs)
            process = world.enter(name, args)
            places = [self._place(process, each) for each in args[: 1 + (name in WITH_TWO)]]
            try:
                found = function(*places, *args[len(places) :], **kwargs)
            except OSError as error:
                if isinstance(error.filename, str):
                    error.filename = world.seen(error.filename)
                raise
            return results[name](args[0], found) if name in results else found

        return call

    def _outside(self, path: Any) -> bool:
        """Whether a path belongs to the machine below the world, as that of the product's code: no
        call there is a part of a history, which would not be the same in another checkout."""
        text = os.fspath(path)
        return (
            isinstance(text, str) and text.startswith("/") and not text.startswith((SEEN, "/proc/"))
        )

    def _place(self, process: Process, path: Any) -> Any:
        """The real path of one in /proc."""
        text = os.fspath(path)
        if not isinstance(text, str) or not text.startswith("/proc/"):
            return self.world.real(text) if isinstance(text, str) else path
        first, _, rest = text.removeprefix("/proc/").partition("/")
        if first.isdigit() and int(first) in self.world.processes:
            other = self.world.processes[int(first)]
            if rest.startswith("fd/"):
                return f"/proc/self/{rest}"
            if not other.alive:
                return f"/proc/0/{rest}"  # no such process
            return self._proc_file(other, rest)
        if text == "/proc/sys/kernel/random/boot_id":
            return self._proc_file(process, "boot_id")
        if text == "/proc/self/mountinfo":
            return self._mounts(process)
        if text == "/proc/self":
            return self._proc_link(str(process.pid))
        return path

    def _mounts(self, process: Process) -> str:
        """A disk is one to the product, though it is memory here."""
        path = self.world.root / "proc" / "mountinfo"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            lines = ["1 0 8:1 / / rw - ext4 /dev/sda rw", "2 1 0:9 / /proc rw - proc proc rw"]
            for number, node in enumerate(self.world.nodes):
                shm, disk = self.world.seen(node.shm), self.world.seen(node.disk)
                lines.append(f"{10 + number} 1 0:{50 + number} / {shm} rw - tmpfs tmpfs rw")
                lines.append(f"{20 + number} 1 8:{20 + number} / {disk} rw - ext4 /dev/sdb rw")
            path.write_text("\n".join(lines) + "\n")
        return str(path)

    def _proc_link(self, target: str) -> str:
        path = self.world.root / "proc" / f"link-{target}"
        path.parent.mkdir(exist_ok=True)
        if not path.is_symlink():
            path.symlink_to(target)
        return str(path)

    def _proc_file(self, of: Process, name: str) -> str:
        path = self.world.root / "proc" / f"{of.pid}-{name.replace('/', '-')}"
        path.parent.mkdir(exist_ok=True)
        if name == "boot_id":
            path.write_text(of.node.boot_id + "\n")
        elif name == "stat":
            fields = [
                str(of.parent),
                str(of.pid),
                str(of.pid),
                *["0"] * 16,
                str(of.pid),
                *["0"] * 30,
            ]
            path.write_text(f"{of.pid} ({of.name}) S {' '.join(fields)}\n")
        elif name == "environ":
            path.write_bytes(b"".join(f"{n}={v}\0".encode() for n, v in of.environ.items()))
        elif name.startswith("task"):
            path.mkdir(exist_ok=True)
        return str(path)

    # --- the modules ------------------------------------------------------------------------------

    def _time(self) -> types.ModuleType:
        world, module = self.world, types.ModuleType("time")
        module.__dict__.update(time.__dict__)
        look = world.scheduler.look
        epoch = 1_700_000_000.0

        def calendar() -> float:
            return epoch + look() + world.process.node.clock_ahead_seconds

        def sleep(seconds: float) -> None:
            world.enter("sleep", (seconds,))
            world.scheduler.park(seconds)

        module.__dict__.update(
            monotonic=look,
            perf_counter=look,
            thread_time=look,
            process_time=look,
            time=calendar,
            monotonic_ns=lambda: int(look() * 1e9),
            perf_counter_ns=lambda: int(look() * 1e9),
            time_ns=lambda: int(calendar() * 1e9),
            clock_gettime=lambda clock: calendar() if clock == time.CLOCK_REALTIME else look(),
            sleep=sleep,
        )
        return module

    def _os(self) -> types.ModuleType:
        world = self.world
        environ = Environ(world)

        module = types.ModuleType("os")
        module.__dict__.update(os.__dict__)
        for name in EFFECTS:
            setattr(module, name, self._guarded(getattr(os, name), name))
        for name in NO_EFFECT:
            setattr(module, name, lambda *_, **__: 0)

        def opened(fd: int) -> int:
            world.process.fds[fd] = None
            return fd

        def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            process = world.process
            if not self._outside(path):
                world.enter("open", (path, flags))
            fd = os.open(self._place(process, path), flags, mode, dir_fd=dir_fd)
            process.fds[fd] = None
            return fd

        def close(fd: int) -> None:
            task = world.scheduler.current
            if task is not None and not world.over and task.owner.alive:
                world.drop_locks(fd)
                world.process.fds.pop(fd, None)
            os.close(fd)

        def kill(pid: int, number: int) -> None:
            world.enter("kill", (pid, number))
            process = world.processes.get(pid)
            if process is None or not process.alive:
                raise ProcessLookupError(errno.ESRCH, "No such process")
            if number in (signal.SIGKILL, signal.SIGTERM) and not (
                number == signal.SIGTERM and process.name.startswith("agent")
            ):
                world.kill(process, -number)

        def pidfd_open(pid: int, flags: int = 0) -> int:
            process = world.processes.get(pid)
            if process is None or not process.alive:
                raise ProcessLookupError(errno.ESRCH, "No such process")
            theirs = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            process.watchers.append(os.dup(theirs))
            return opened(theirs)

        def pipe() -> tuple[int, int]:
            low, high = os.pipe()
            return opened(low), opened(high)

        def dup2(fd: int, other: int, inheritable: bool = True) -> int:
            if other <= 2:  # the world's output is not the process's
                return other
            return os.dup2(fd, other, inheritable)

        def exit_(status: int) -> None:
            raise Exit(status)

        def refuse(*_: Any) -> int:
            raise OSError(errno.ENOSYS, "no fork in this world")

        def fsync(fd: Any) -> None:
            world.enter("fsync", (fd,))
            world.synchronised(fd if isinstance(fd, int) else fd.fileno())

        module.__dict__.update(
            environ=environ,
            fsync=fsync,
            fdatasync=fsync,
            getenv=environ.get,
            open=open_,
            close=close,
            getcwd=lambda: SEEN,
            getpid=lambda: world.process.pid,
            getppid=lambda: world.process.parent,
            getsid=lambda pid=0: world.process.pid,
            getpgid=lambda pid=0: world.process.pid,
            kill=kill,
            killpg=kill,
            pidfd_open=pidfd_open,
            pipe=pipe,
            dup=lambda fd: opened(os.dup(fd)),
            dup2=dup2,
            eventfd=lambda *args: opened(os.eventfd(*args)),
            memfd_create=lambda *args: opened(os.memfd_create(*args)),
            fdopen=lambda fd, *args, **kwargs: self._open(fd, *args, **kwargs),
            register_at_fork=lambda **_: None,
            fork=refuse,
            forkpty=refuse,
            _exit=exit_,
            urandom=lambda count: world.random.randbytes(count),
            getloadavg=lambda: (0.0, 0.0, 0.0),
            cpu_count=lambda: 4,
        )
        return module

    def _io(self) -> types.ModuleType:
        module = types.ModuleType("io")
        module.__dict__.update(io.__dict__)
        module.open = self._open
        return module

    def _open(self, file: Any, *args: Any, **kwargs: Any) -> Any:
        world = self.world
        process = world.process
        if isinstance(file, int) or not self._outside(file):
            world.enter("open", (file, *args))
        if not isinstance(file, int):
            file = self._place(process, file)
        elif isinstance(file, bool):
            raise TypeError("a path or a descriptor")
        found = open(file, *args, **kwargs)  # noqa: SIM115
        process.fds[found.fileno()] = None
        return _Tracked.of(found, process)

    def _select(self) -> types.ModuleType:
        world, module = self.world, types.ModuleType("select")
        for name in dir(select):
            if name.startswith("POLL") or name == "error":
                setattr(module, name, getattr(select, name))

        class Poll:
            def __init__(self) -> None:
                self._real, self._wanted = select.poll(), dict[int, int]()

            def register(self, fd: Any, events: int = select.POLLIN | select.POLLOUT) -> None:
                fd = fd if isinstance(fd, int) else fd.fileno()
                self._real.register(fd, events)
                self._wanted[fd] = events

            modify = register

            def unregister(self, fd: Any) -> None:
                fd = fd if isinstance(fd, int) else fd.fileno()
                self._real.unregister(fd)
                del self._wanted[fd]

            def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
                world.enter("poll")
                seconds = None if timeout is None or timeout < 0 else timeout / 1000
                end = None if seconds is None else world.scheduler.now + seconds
                while True:
                    found = self._real.poll(0)
                    if world.partitions:
                        found, silent = self._heard(found)
                    else:
                        silent = 0.0
                    if found:
                        return found
                    left = None if end is None else end - world.scheduler.now
                    if left is not None and left <= 0:
                        return []
                    if silent > 0:
                        world.scheduler.park(silent if left is None else min(silent, left))
                    else:
                        world.scheduler.wait_for([*self._wanted.items()], left)

            def _heard(self, found: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], float]:
                """What comes through partitions, and how long to wait for the rest at most."""
                silent = {
                    end.fileno(): seconds
                    for end in world.links
                    if (seconds := world.silent_seconds(end)) > 0
                }
                heard = [each for each in found if each[0] not in silent]
                held = [silent[fd] for fd, _ in found if fd in silent]
                return heard, min([*held, 0.01]) if held else 0.0

        def select_(
            readers: Any, writers: Any, others: Any, timeout: float | None = None
        ) -> tuple[list[Any], list[Any], list[Any]]:
            poll = Poll()
            for each in readers:
                poll.register(each, select.POLLIN)
            for each in writers:
                poll.register(each, select.POLLOUT)
            found = {fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)}

            def ready(things: Any) -> list[Any]:
                return [e for e in things if (e if isinstance(e, int) else e.fileno()) in found]

            return ready(readers), ready(writers), []

        module.poll, module.select = Poll, select_
        return module

    def _fcntl(self) -> types.ModuleType:
        """POSIX's locks belong to a process, and end where it closes any descriptor of the file."""
        world, module = self.world, types.ModuleType("fcntl")
        module.__dict__.update(fcntl.__dict__)
        lock_format = "hhqqi4x"

        def file_of(fd: int) -> tuple[int, int]:
            found = os.fstat(fd)
            return found.st_dev, found.st_ino

        def kept_out(fd: int, process: Process, kind: int) -> int | None:
            """Who has a lock that keeps this one out: a process, or 0 for an open file's lock."""
            for other, theirs in world.locks.get(file_of(fd), {}).items():
                both_read = theirs == kind == fcntl.F_RDLCK
                if other is not process and other.alive and not both_read:
                    return other.pid
            wanted = struct.pack(lock_format, kind, os.SEEK_SET, 0, 0, 0)
            found = struct.unpack(lock_format, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted))
            return None if found[0] == fcntl.F_UNLCK else 0

        def lockf(fd: Any, how: int, *_: Any) -> None:
            process = world.enter("lockf")
            number = fd if isinstance(fd, int) else fd.fileno()
            if how & fcntl.LOCK_UN:
                world.locks.get(file_of(number), {}).pop(process, None)
                return
            kind = fcntl.F_WRLCK if how & fcntl.LOCK_EX else fcntl.F_RDLCK
            while kept_out(number, process, kind) is not None:
                if how & fcntl.LOCK_NB:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                world.scheduler.park(0.001)
            world.locks.setdefault(file_of(number), {})[process] = kind

        def flock(fd: Any, how: int) -> None:
            world.enter("flock")
            while True:
                try:
                    return fcntl.flock(fd, how | fcntl.LOCK_NB)
                except BlockingIOError:
                    if how & fcntl.LOCK_NB:
                        raise
                world.scheduler.park(0.001)

        def fcntl_(fd: Any, command: int, argument: Any = 0) -> Any:
            process = world.enter("fcntl")
            if command == fcntl.F_GETLK:
                kind = struct.unpack(lock_format, argument)[0]
                pid = kept_out(fd, process, kind)
                kind = fcntl.F_UNLCK if pid is None else kind
                return struct.pack(lock_format, kind, os.SEEK_SET, 0, 0, pid or 0)
            if command == fcntl.F_OFD_SETLK:
                kind = struct.unpack(lock_format, argument)[0]
                theirs = world.locks.get(file_of(fd), {})
                if kind != fcntl.F_UNLCK and any(each.alive for each in theirs):
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return fcntl.fcntl(fd, command, argument)

        module.__dict__.update(lockf=lockf, flock=flock, fcntl=fcntl_)
        return module

    def _socket(self) -> types.ModuleType:
        world, module = self.world, types.ModuleType("socket")
        module.__dict__.update(socket.__dict__)
        wait = world.scheduler.wait_for

        class Socket(socket.socket):
            """A real socket that never blocks the world."""

            def __init__(
                self, family: int = -1, type: int = -1, proto: int = -1, fileno: Any = None
            ) -> None:
                process = world.enter("socket")
                self._inet = family == socket.AF_INET and fileno is None
                self._name, self._peer = ("0.0.0.0", 0), ("0.0.0.0", 0)
                if self._inet:
                    family, proto = socket.AF_UNIX, 0
                super().__init__(family, type, proto, fileno)
                super().setblocking(False)
                self._seconds: float | None = None
                self._shut = False
                process.fds[self.fileno()] = None

            def bind(self, where: Any) -> None:
                world.enter("bind", (where,))
                if not self._inet:
                    super().bind(world.real(where))
                    return
                self._name = where[0], where[1] or world.new_port()
                super().bind(world.port(*self._name))
                world.process.ports.append(world.port(*self._name))

            def getsockname(self) -> Any:
                return self._name if self._inet else super().getsockname()

            def getpeername(self) -> Any:
                return self._peer if self._inet else super().getpeername()

            def setsockopt(self, level: int, *args: Any) -> None:
                if not (self._inet and level == socket.IPPROTO_TCP):
                    super().setsockopt(level, *args)

            def _reach(self, where: Any) -> int:
                """Connect over the world's network; returns an error's number."""
                self._name, self._peer = (world.process.node.address, world.new_port()), where[:2]
                if self.type == socket.SOCK_DGRAM:
                    return 0
                there, other = world.port(*where[:2]), world.node_at(where[0])
                here = world.process.node
                if other is not None and world.partitions:
                    silent = max(
                        world.parted_seconds(other, here), world.parted_seconds(here, other)
                    )
                    patience = 130.0 if self._seconds is None else self._seconds
                    world.scheduler.park(min(max(silent, 0.0), patience))
                    if silent > patience:
                        return errno.ETIMEDOUT
                if not os.path.exists(there):
                    return errno.ECONNREFUSED
                # Who accepts it learns from this name who called.
                super().bind(f"\0{world.root.name}-{self._name[0]}-{self._name[1]}")
                code = socket.socket.connect_ex(self, there)
                self._note()
                return code

            def _note(self) -> None:
                """Let a partition between the two nodes stop what comes here."""
                nodes = world.process.node, world.node_at(self._peer[0])
                if nodes[1] is not None and nodes[0] is not nodes[1]:
                    world.links[self] = nodes

            def _reach_here(self, where: str) -> int:
                return socket.socket.connect_ex(self, world.real(where))

            def settimeout(self, seconds: float | None) -> None:
                self._seconds = seconds

            def setblocking(self, flag: bool) -> None:
                self._seconds = None if flag else 0.0

            def gettimeout(self) -> float | None:
                return self._seconds

            def getblocking(self) -> bool:
                return self._seconds != 0

            def _again(self, name: str, events: int, call: Callable[[], Any]) -> Any:
                world.enter(name)
                end = None if self._seconds is None else world.scheduler.now + self._seconds
                while True:
                    try:
                        return call()
                    except BlockingIOError:
                        if self._seconds == 0:
                            raise
                    left = None if end is None else end - world.scheduler.now
                    if left is not None and left <= 0:
                        raise TimeoutError("timed out")
                    wait([(self.fileno(), events)], left)

            def _hear(self) -> None:
                """Wait for the end of a partition, or for the end of one's patience."""
                silent = world.silent_seconds(self) if world.partitions else 0.0
                if silent <= 0:
                    return
                if self._seconds == 0:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                if self._seconds is not None and self._seconds < silent:
                    world.scheduler.park(self._seconds)
                    raise TimeoutError("timed out")
                world.scheduler.park(silent)

            def recv(self, *args: Any) -> bytes:
                self._hear()
                return self._again("recv", select.POLLIN, lambda: socket.socket.recv(self, *args))

            def recv_into(self, *args: Any) -> int:
                self._hear()
                return self._again(
                    "recv", select.POLLIN, lambda: socket.socket.recv_into(self, *args)
                )

            def recvfrom(self, *args: Any) -> Any:
                self._hear()
                return self._again(
                    "recv", select.POLLIN, lambda: socket.socket.recvfrom(self, *args)
                )

            def recvmsg(self, *args: Any) -> Any:
                self._hear()
                found = self._again(
                    "recv", select.POLLIN, lambda: socket.socket.recvmsg(self, *args)
                )
                for level, kind, data in found[1]:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        count = len(data) // 4
                        world.process.fds.update(
                            dict.fromkeys(struct.unpack(f"{count}i", data[: 4 * count]))
                        )
                return found

            def send(self, *args: Any) -> int:
                return self._again("send", select.POLLOUT, lambda: socket.socket.send(self, *args))

            def sendto(self, *args: Any) -> int:
                return self._again(
                    "send", select.POLLOUT, lambda: socket.socket.sendto(self, *args)
                )

            def sendmsg(self, *args: Any) -> int:
                return self._again(
                    "send", select.POLLOUT, lambda: socket.socket.sendmsg(self, *args)
                )

            def sendall(self, data: Any, *args: Any) -> None:
                view = memoryview(data).cast("B")
                while view:
                    view = view[self.send(view, *args) :]

            def _accept_now(self) -> tuple[int, Any]:
                if self._shut or self.fileno() < 0:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                return self._accept()

            def accept(self) -> tuple[Socket, Any]:
                fd, where = self._again("accept", select.POLLIN, self._accept_now)
                channel = Socket(self.family, self.type, self.proto, fileno=fd)
                if self._inet:
                    channel._inet, channel._name = True, self._name
                    _, address, port = bytes(where).decode().rsplit("-", 2)
                    channel._peer = where = address, int(port)
                    channel._note()
                return channel, where

            def connect(self, where: Any) -> None:
                world.enter("connect", (where,))
                reach = self._reach if self._inet else self._reach_here
                code = reach(where)
                if code == errno.EINPROGRESS:
                    if self._seconds == 0:
                        raise BlockingIOError(code, os.strerror(code))
                    wait([(self.fileno(), select.POLLOUT)], self._seconds)
                    code = self.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))

            def connect_ex(self, where: Any) -> int:
                try:
                    self.connect(where)
                except OSError as error:
                    return int(error.errno or 1)
                return 0

            def shutdown(self, how: int) -> None:
                super().shutdown(how)
                self._shut = True
                world.scheduler.poke(self.fileno())

            def close(self) -> None:
                if not world.over:
                    world.scheduler.poke(self.fileno())
                task = world.scheduler.current
                if task is not None and not world.over:
                    world.process.fds.pop(self.fileno(), None)
                super().close()

            def detach(self) -> int:
                return super().detach()

        def socketpair(*args: Any) -> tuple[Socket, Socket]:
            pair = []
            for each in socket.socketpair(*args):
                family, kind, proto = each.family, each.type, each.proto
                pair.append(Socket(family, kind, proto, fileno=each.detach()))
            return pair[0], pair[1]

        def create_server(where: Any, **kwargs: Any) -> Socket:
            listener = Socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.bind(where)
            listener.listen(kwargs.get("backlog") or 128)
            return listener

        def create_connection(where: Any, timeout: Any = None, *_: Any, **__: Any) -> Socket:
            channel = Socket(socket.AF_INET, socket.SOCK_STREAM)
            channel.settimeout(timeout if isinstance(timeout, int | float) else None)
            try:
                channel.connect(where)
            except OSError:
                channel.close()
                raise
            return channel

        def getaddrinfo(host: Any, port: Any, *_: Any, type: int = 0, **__: Any) -> Any:
            names = {node.name: node.address for node in world.nodes}
            names["localhost"] = names["127.0.0.1"] = world.process.node.address
            return [
                (socket.AF_INET, type or socket.SOCK_STREAM, 0, "", (names.get(host, host), port))
            ]

        def send_fds(
            sock: Socket, buffers: Any, fds: Any, flags: int = 0, address: Any = None
        ) -> int:
            import array

            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            return sock.sendmsg(buffers, rights)

        def recv_fds(sock: Socket, size: int, most: int, flags: int = 0) -> Any:
            import array

            fds = array.array("i")
            message, rights, flags, where = sock.recvmsg(size, socket.CMSG_LEN(most * 4))
            for level, kind, data in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(data[: len(data) - len(data) % 4])
            return message, [*fds], flags, where

        module.__dict__.update(
            socket=Socket,
            SocketType=Socket,
            socketpair=socketpair,
            send_fds=send_fds,
            recv_fds=recv_fds,
            create_server=create_server,
            create_connection=create_connection,
            getaddrinfo=getaddrinfo,
            gethostname=lambda: world.process.node.name,
            getfqdn=lambda *_: world.process.node.name,
        )
        return module

    def _signal(self) -> types.ModuleType:
        module = types.ModuleType("signal")
        module.__dict__.update(signal.__dict__)
        module.__dict__.update(
            signal=lambda number, handler: signal.SIG_DFL,
            getsignal=lambda number: signal.SIG_DFL,
            set_wakeup_fd=lambda fd, **_: -1,
            setitimer=lambda *_: (0.0, 0.0),
            pthread_kill=lambda *_: None,
        )
        return module

    def _secrets(self) -> types.ModuleType:
        import secrets

        module, numbers = types.ModuleType("secrets"), self.world.random
        module.__dict__.update(secrets.__dict__)
        module.__dict__.update(
            token_hex=lambda count=16: numbers.randbytes(count).hex(),
            token_bytes=lambda count=16: numbers.randbytes(count),
            randbelow=lambda limit: numbers.randrange(limit),
            SystemRandom=lambda: numbers,
        )
        return module

    def _atexit(self) -> types.ModuleType:
        module = types.ModuleType("atexit")

        def register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            process, call = self.world.process, partial(function, *args, **kwargs)
            process.at_exit.append(call)
            if self.world.importing and process.image is not None:
                process.image.at_exit.append(call)
            return function

        module.__dict__.update(register=register, unregister=lambda function: None)
        return module

    def _importlib(self) -> types.ModuleType:
        import importlib.metadata

        module = types.ModuleType("importlib")
        module.__dict__.update(importlib.__dict__)

        def import_module(name: str, package: str | None = None) -> types.ModuleType:
            image = self.world.process.image
            assert image is not None
            return image.import_module(name, package)

        module.import_module = import_module
        metadata = types.ModuleType("importlib.metadata")
        metadata.__dict__.update(importlib.metadata.__dict__)
        metadata.entry_points = store.entry_points(lambda: self.world.server)
        self.modules["importlib.metadata"] = module.metadata = metadata
        return module

    def _pickle(self) -> types.ModuleType:
        import pickle

        world, module = self.world, types.ModuleType("pickle")
        module.__dict__.update(pickle.__dict__)

        def seen(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                image = world.process.image
                if image is None:
                    return function(*args, **kwargs)
                image.show()
                return function(*args, **kwargs)

            return call

        module.__dict__.update(dumps=seen(pickle.dumps), loads=seen(pickle.loads))
        return module

    def _gc(self) -> types.ModuleType:
        """A process would find the objects of the others."""
        import gc

        module = types.ModuleType("gc")
        module.__dict__.update(gc.__dict__)
        none = lambda *_: []  # noqa: E731
        module.__dict__.update(
            get_objects=none,
            get_referrers=none,
            collect=lambda *_: 0,
            freeze=lambda: None,
            disable=lambda: None,
            enable=lambda: None,
            isenabled=lambda: False,
        )
        return module

    def _own_hooks(self) -> None:
        """Let torch's global hooks act for the process alone that has registered them."""
        from torch.optim import optimizer

        world = self.world
        for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
            register = getattr(optimizer, name)

            def registered(hook: Callable[..., Any], register: Any = register) -> Any:
                owner = world.process

                def called(*args: Any) -> Any:
                    return hook(*args) if world.process is owner else None

                return register(called)

            setattr(optimizer, name, registered)

    def clear(self) -> None:
        """Forget what the processes of a history have left in torch."""
        from torch.optim import optimizer

        optimizer._global_optimizer_pre_hooks.clear()
        optimizer._global_optimizer_post_hooks.clear()

    def _subprocess(self) -> types.ModuleType:
        library, module = self, types.ModuleType("subprocess")
        module.__dict__.update(subprocess.__dict__)

        class Popen:
            """A process of the world."""

            def __class_getitem__(cls, kind: Any) -> Any:
                return cls

            def __init__(
                self,
                args: list[str],
                *,
                stdin: Any = None,
                stdout: Any = None,
                stderr: Any = None,
                env: Mapping[str, str] | None = None,
                pass_fds: Any = (),
                **_: Any,
            ) -> None:
                world = library.world
                parent = world.enter("spawn", tuple(args))
                self.args, self.returncode = args, None
                self.stdin = self.stdout = self.stderr = None
                given: list[int] = []
                if stdin == subprocess.PIPE:
                    theirs, mine = os.pipe()
                    self.stdin = library._wrap(mine, "wb", parent)
                    given.append(theirs)
                else:
                    given.append(os.dup(_number(stdin)))
                if stdout == subprocess.PIPE:
                    mine, theirs = os.pipe()
                    self.stdout = library._wrap(mine, "rb", parent)
                    given.append(theirs)
                else:
                    given.append(os.dup(_number(stdout)))
                if stderr == subprocess.PIPE:
                    mine, theirs = os.pipe()
                    self.stderr = library._wrap(mine, "rb", parent)
                    given.append(theirs)
                given += [os.dup(fd) for fd in pass_fds]
                name, main = library._program(args, given)
                environment = dict(parent.environ if env is None else env)
                self._process = world.start(parent.node, name, main, parent.pid, environment)
                self._process.fds.update(dict.fromkeys(given))
                self.pid = self._process.pid

            def poll(self) -> int | None:
                library.world.enter("waitpid")
                if self.returncode is None and not self._process.alive:
                    self.returncode = self._process.status
                return self.returncode

            def wait(self, timeout: float | None = None) -> int:
                scheduler = library.world.scheduler
                end = None if timeout is None else scheduler.now + timeout
                while self.poll() is None:
                    if end is not None and scheduler.now >= end:
                        raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                    scheduler.park(0.001)
                assert self.returncode is not None
                return self.returncode

            def kill(self) -> None:
                library.world.kill(self._process)

            def terminate(self) -> None:
                if not self._process.name.startswith("agent"):
                    library.world.kill(self._process, -signal.SIGTERM)

            def __enter__(self) -> Popen:
                return self

            def __exit__(self, *_: object) -> None:
                self.wait()

        module.Popen = Popen
        return module

    def _wrap(self, fd: int, mode: str, process: Process) -> Any:
        process.fds[fd] = None
        os.set_blocking(fd, False)
        return _Tracked.of(open(fd, mode, buffering=0), process)

    def _program(self, args: list[str], given: list[int]) -> tuple[str, Callable[[Process], Any]]:
        """The name and the code of a program."""
        if "-c" in args[:12] and args[0] == sys.executable:
            module, _, *rest = args[args.index("-c") + 2 :]
            run = self.programs[module]
            name = "agent" if module.startswith("tierckpt.agent") else module
            return name, lambda process: run(process, rest)
        if args[0].endswith("/cat"):
            return "cat", lambda process: self._cat(process, given[0], given[1])
        if args[0].endswith("/sh"):
            reader = "printf" if "done" in args[-1] else "keeper"
            return reader, lambda process: self._answer(process, given[0], given[1])
        if args[0].endswith("/stat"):
            return "stat", lambda process: int(not os.path.lexists(args[1]))
        raise FileNotFoundError(errno.ENOENT, f"no program {args[0]} in this world")

    def _read(self, fd: int) -> bytes:
        os.set_blocking(fd, False)
        while True:
            self.world.enter("read")
            try:
                return os.read(fd, 65536)
            except BlockingIOError:
                self.world.scheduler.wait_for([(fd, select.POLLIN)], None)

    def _cat(self, process: Process, source: int, target: int) -> None:
        while data := self._read(source):
            os.write(target, data)

    def _answer(self, process: Process, source: int, target: int) -> None:
        """A shell that answers each line with an empty one."""
        while data := self._read(source):
            os.write(target, b"\n" * data.count(b"\n"))


def _number(stream: Any) -> int:
    if stream is None or stream == subprocess.DEVNULL:
        return _NOWHERE
    return stream if isinstance(stream, int) else int(stream.fileno())


_NOWHERE = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


class _Tracked:
    """Files whose descriptors a process gives back when it closes them."""

    @staticmethod
    def of(file: Any, process: Process) -> Any:
        """The file; its `close` is noted where that is possible."""
        fd = file.fileno()
        close = file.close

        def closed() -> None:
            if not file.closed:
                if process.alive:
                    process.world.drop_locks(fd)
                process.fds.pop(fd, None)
            close()

        try:
            file.close = closed
        except AttributeError:  # an object of C without attributes
            process.fds.pop(fd, None)
        return file


__all__ = ["Library"]
