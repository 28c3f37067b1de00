"""A world: nodes, the processes on them, and what the operating system keeps about them.

A process has its own copy of the product's modules (`Image`), its own descriptors, environment and
exit handlers. `kill` is SIGKILL: nothing of it runs any more, its descriptors are closed, its locks
of files are free, and whoever waits for its end learns of it.
"""

from __future__ import annotations

import contextlib
import os
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .disk import Disk
from .scheduler import TICK_SECONDS, Killed, Scheduler, Task
from .store import Server

if TYPE_CHECKING:
    from .image import Image
    from .locks import Lock

FIRST_PID, FIRST_PORT = 100, 20000
SEEN = "/world"
"""The folder of a world as its processes see it: the same in each run, as names are in hashes."""


class Node:
    """A machine: a name, a boot, a memory and a disk."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.name = f"node{index}"
        self.address = f"10.9.0.{index + 1}"
        self.boots = 0
        self.shm = world.root / self.name / "shm"
        self.disk = world.root / self.name / "disk"
        self.clock_ahead_seconds = 0.0
        """By which this machine's calendar differs from the others'."""
        for each in (self.shm, self.disk):
            each.mkdir(parents=True)
        self.filesystem = Disk(self.disk)

    @property
    def boot_id(self) -> str:
        """As in /proc/sys/kernel/random/boot_id."""
        return f"00000000-0000-4000-8000-{self.index:06d}{self.boots:06d}"


class Process:
    """A simulated process."""

    def __init__(
        self, world: World, node: Node, name: str, parent: int, environ: dict[str, str]
    ) -> None:
        self.world, self.node, self.name, self.parent = world, node, name, parent
        self.environ = environ
        self.pid = world.new_pid()
        self.alive, self.status = True, 0
        self.stopped_until = 0.0
        """SIGSTOP: none of its threads runs before."""
        self.tasks: list[Task] = []
        self.fds: dict[int, None] = {}
        self.ports: list[str] = []
        """Ports at which it listens, see `World.port`."""
        self.at_exit: list[Callable[[], Any]] = []
        self.watchers: list[int] = []
        """Event descriptors that become readable when this process ends."""
        self.image: Image | None = None
        self.sentinels: dict[int, Lock] = {}
        self.failure: BaseException | None = None


class Exit(SystemExit):
    """`os._exit`."""


class World:
    """All that is outside of the processes."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.random = self.scheduler.random
        self._left: set[int] = set()
        """Descriptors of dead processes, which may still have an object."""

    def begin(self, seed: int, root: Path, nodes: int) -> None:
        """Start a history in an empty folder."""
        self.scheduler.begin(seed)
        self.root = root
        self.processes: dict[int, Process] = {}
        self._pids, self._ports = FIRST_PID, FIRST_PORT
        self.made = 0
        """Number of threads and futures so far."""
        self.nodes = [Node(self, index) for index in range(nodes)]
        self.importing = False
        self.server = Server(self)
        self.links: weakref.WeakKeyDictionary[Any, tuple[Node, Node]] = weakref.WeakKeyDictionary()
        """Ends of connections between nodes: the node that has it, and the other one."""
        self.partitions: dict[tuple[int, int], float] = {}
        """Until when nothing comes from the first node to the second."""
        self.locks: dict[tuple[int, int], dict[Process, int]] = {}
        """POSIX's locks of whole files: by device and inode, the processes and their kinds."""
        self.over = False
        """True at the end of a history: nothing has an effect any more."""
        self.calls = 0
        """System calls so far."""
        self.record: list[str] | None = None
        """All system calls, where somebody wants to see them."""
        self.before_call: Callable[[Process, str, tuple[Any, ...]], None] | None = None
        """Faults are injected here: it may raise OSError, or kill the process."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when a process has ended."""
        self.init = Process(self, self.nodes[0], "init", 0, {})
        """What runs outside of all tasks."""

    def new_pid(self) -> int:
        """The number of a new process."""
        self._pids += 1
        return self._pids

    def new_port(self) -> int:
        """A free port, of any address."""
        self._ports += 1
        return self._ports

    def port(self, host: str, number: int) -> str:
        """The Unix socket that stands for a port of TCP: what is sent through it is there at once,
        in each run of a history."""
        (self.root / "net").mkdir(exist_ok=True)
        return str(self.root / "net" / f"{host}-{number}")

    def real(self, path: str) -> str:
        """The path on this machine of one that a process sees."""
        if path.startswith(SEEN) and path[len(SEEN) : len(SEEN) + 1] in ("", "/"):
            return f"{self.root}{path[len(SEEN) :]}"
        return path

    def seen(self, path: str | Path) -> str:
        """The path that processes see of one on this machine."""
        text, root = str(path), str(self.root)
        return SEEN + text[len(root) :] if text.startswith(root) else text

    @property
    def process(self) -> Process:
        """The process that runs now."""
        task = self.scheduler.current
        if task is None:
            return self.init
        process = task.owner
        assert isinstance(process, Process)
        return process

    # --- the network ---------------------------------------------------------------------------

    def parted_seconds(self, source: Node, target: Node) -> float:
        """How long nothing comes from one node to another."""
        return self.partitions.get((source.index, target.index), 0.0) - self.scheduler.now

    def silent_seconds(self, end: Any) -> float:
        """How long nothing comes to this end of a connection."""
        nodes = self.links.get(end)
        return 0.0 if nodes is None else self.parted_seconds(nodes[1], nodes[0])

    def node_at(self, address: str) -> Node | None:
        """The node with this address."""
        return next((node for node in self.nodes if node.address == address), None)

    # --- processes and threads ------------------------------------------------------------------

    def start(
        self,
        node: Node,
        name: str,
        main: Callable[[Process], Any],
        parent: int = 1,
        environ: dict[str, str] | None = None,
    ) -> Process:
        """Start a process that calls `main`, and then its exit handlers."""
        process = Process(self, node, name, parent, dict(environ or {}))
        self.processes[process.pid] = process

        def run() -> None:
            try:
                found = main(process)
                process.status = found if isinstance(found, int) else 0
            except Killed:
                return
            except SystemExit as error:
                process.status = (
                    error.code if isinstance(error.code, int) else int(bool(error.code))
                )
                if isinstance(error, Exit):
                    process.at_exit.clear()
            except BaseException as error:
                process.status, process.failure = 1, error
                process.log = traceback.format_exc()
            try:
                while process.at_exit:
                    process.at_exit.pop()()
            except Killed:
                return
            except BaseException as error:
                process.failure = process.failure or error
            self.end(process, process.status)

        self._start_task(process, run, name)
        return process

    def start_thread(self, function: Callable[[], Any]) -> Task:
        """Start a thread of the running process."""
        process = self.process

        def run() -> None:
            try:
                function()
            except (Killed, SystemExit):
                return
            finally:
                sentinel = process.sentinels.pop(ident[0], None)
                if sentinel is not None and process.alive and sentinel.locked():
                    sentinel.release()

        ident: list[int] = []
        task = self._start_task(process, run, f"{process.name} thread")
        ident.append(task.ident)
        return task

    def _start_task(self, process: Process, run: Callable[[], None], name: str) -> Task:
        task = self.scheduler.spawn(process, run, name)
        process.tasks = [*process.tasks[:1], *(t for t in process.tasks[1:] if not t.done)]
        process.tasks.append(task)
        return task

    def sentinel(self, lock: Lock) -> None:
        """Keep the lock that the end of the running thread releases."""
        task = self.scheduler.current
        if task is not None:
            self.process.sentinels[task.ident] = lock

    def kill(self, process: Process, status: int = -9) -> None:
        """SIGKILL: from now on nothing of it runs."""
        self.end(process, status)
        task = self.scheduler.current
        if task is not None and task.owner is process:
            raise Killed

    def end(self, process: Process, status: int) -> None:
        """Free what the process has."""
        if not process.alive:
            return
        process.alive, process.status = False, status
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in process.fds:
            os.dup2(nowhere, fd, inheritable=False)  # its objects still have the number
        os.close(nowhere)
        self._left.update(process.fds)
        process.fds.clear()
        for event in process.watchers:
            os.eventfd_write(event, 1)
            os.close(event)
        process.watchers.clear()
        for port in process.ports:
            Path(port).unlink(missing_ok=True)
        for each in self.locks.values():
            each.pop(process, None)
        self.on_end()

    def drop_locks(self, fd: int) -> None:
        """The running process closes a descriptor: its locks of that file end."""
        process = self.process
        if not any(process in each for each in self.locks.values()):
            return
        with contextlib.suppress(OSError):
            found = os.fstat(fd)
            self.locks.get((found.st_dev, found.st_ino), {}).pop(process, None)

    def synchronised(self, fd: int) -> None:
        """`fsync` has returned."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        for node in self.nodes:
            if path.startswith(str(node.disk)):
                node.filesystem.synchronised(path, fd)

    # --- system calls -----------------------------------------------------------------------------

    def enter(self, name: str, args: tuple[Any, ...] = ()) -> Process:
        """A system call begins: faults happen here, and another task may run."""
        if self.over:
            raise Killed
        task = self.scheduler.current
        if task is None:
            return self.init
        process = task.owner
        assert isinstance(process, Process)
        if not process.alive:
            raise Killed
        if self.importing:
            return process
        self.calls += 1
        if self.record is not None:
            what = args[0] if args and isinstance(args[0], str | os.PathLike) else ""
            self.record.append(f"{self.scheduler.now:.6f} {process.name} {name} {what}")
        if self.before_call is not None:
            self.before_call(process, name, args)
        self.scheduler.give_way()
        return process

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Context that leaves no trace in the history: modules are made, which a later history
        finds made."""
        if self.importing:
            yield
            return
        state, self.importing, self.scheduler.tick_seconds = self.random.getstate(), True, 0.0
        try:
            yield
        finally:
            self.importing, self.scheduler.tick_seconds = False, TICK_SECONDS
            self.random.setstate(state)

    def close_left(self) -> None:
        """Close what dead processes of earlier histories had opened, after their objects are gone,
        which have closed their own."""
        for fd in self._left:
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == os.devnull:
                    os.close(fd)
        self._left.clear()

    def close(self) -> None:
        """End everything."""
        self.over = True
        for process in self.processes.values():
            if process.alive:
                self.end(process, -9)
        for process in self.processes.values():
            self.scheduler.bury(process.tasks)
            if process.image is not None:
                process.image.free.append(process.image)
                process.image = None
        self.processes.clear()  # with them goes all that the history has made
        self.scheduler.begin(0)
