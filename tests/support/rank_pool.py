"""Ranks in processes of their own, kept for many scenarios: starting torch costs seconds.

A scenario is a function of a test module. `RankPool.run` calls it on all ranks at once, and returns
the results, or raises with every rank's traceback and output. A pool that failed or hung is killed,
and the next call starts new ranks, so one bad scenario does not spoil the next.

Each rank receives scenarios through a FIFO, since a launcher would keep standard input to itself.
The other end of a second FIFO is open in the test process alone: when that process ends in any way,
the kernel kills the ranks, also paused ones.

    pool = RankPool(2, folder)
    assert pool.run(my_scenario, "argument") == ["result of rank 0", "result of rank 1"]
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.forgotten_ends import Forgotten
from tests.support.warm_python.server import die_with_writer
from tests.support.warm_python.servers import PYTHON

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVE_SECONDS = 60
"""The time after which a collective with a lost peer raises, instead of hanging."""

GLOO, ALONE, HOROVODRUN, MPIRUN = "gloo", "alone", "horovodrun", "mpirun"
"""Ways in which ranks form a job: a torch.distributed process group, no group, a launcher."""

LAUNCHERS = {
    # The cache is a file in the home directory, read and written without a lock.
    HOROVODRUN: f"{PYTHON} -m tests.support.horovodrun --gloo --disable-cache -np {{size}} "
    "--network-interfaces lo",
    # Over TCP: killed ranks would leave shared memory of MPI's own.
    MPIRUN: "mpirun -np {size} --allow-run-as-root --oversubscribe --bind-to none "
    "--mca btl self,tcp --mca btl_tcp_if_include lo --mca oob_tcp_if_include lo "
    "--mca btl_base_warn_component_unused 0",
}


class RankPool:
    """A job of `size` processes.

    Args:
        size: how many ranks.
        folder: for scripts, logs and results.
        env: environment variables of each rank, besides the test's own; equal under a launcher.
        kind: GLOO, ALONE, HOROVODRUN or MPIRUN.
    """

    def __init__(
        self, size: int, folder: Path, env: Sequence[Mapping[str, str]] = (), kind: str = GLOO
    ) -> None:
        self.size = size
        self.folder = folder
        self.kind = kind
        self._env = env or [{}] * size
        self._started: list[subprocess.Popen[bytes]] = []
        """Processes of the ranks, or of the launcher."""
        self._commands: list[int] = []
        self._leashes: list[int] = []
        self._answers = -1
        self._calls = self._starts = 0
        self._paused: list[int] = []
        """Process ids of ranks that are stopped."""

    def run(
        self, scenario: Callable[..., Any], *args: Any, timeout_seconds: float = 150, **kwargs: Any
    ) -> list[Any]:
        """Call `scenario` on every rank; returns the results in rank order."""
        if not self._started:
            self._start()
        self._continue()
        self._calls += 1
        call = self.folder / f"call{self._calls}"
        names = (scenario.__module__, scenario.__qualname__)
        call.write_bytes(pickle.dumps((*names, args, kwargs)))
        for rank in range(self.size):
            self._tell(rank, call.name)
        results = self._collect(call, timeout_seconds)
        problems = [text for ok, text in results if not ok]
        if problems:
            self.kill()
            raise AssertionError("\n".join(problems))
        return [value for _, value in results]

    def _start(self) -> None:
        self._starts += 1
        home = self.folder / f"start{self._starts}"
        home.mkdir()
        for rank in range(self.size):
            for fifos, fifo in (
                (self._commands, _commands_of(home, rank)),
                (self._leashes, _leash_of(home, rank)),
            ):
                os.mkfifo(fifo)
                # Open for both directions, so that opening waits for no process.
                fifos.append(os.open(fifo, os.O_RDWR))
        os.mkfifo(_answers_of(home))
        self._answers = os.open(_answers_of(home), os.O_RDWR)
        serve = [PYTHON, "-m", __name__, self.kind, str(self.size), str(home)]
        if self.kind in LAUNCHERS:
            launcher = LAUNCHERS[self.kind].format(size=self.size).split()
            self._started.append(self._spawn([*launcher, *serve], self._env[0]))
        else:
            for rank, env in enumerate(self._env):
                env = {"WARM_PYTHON_RANK": str(rank), **env}
                self._started.append(self._spawn([*serve, str(rank)], env))

    def _spawn(self, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / "started.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={
                    **os.environ,
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'common'}",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                    "TMPDIR": str(self.folder),
                    **env,
                },
            )

    def _tell(self, rank: int, command: str) -> None:
        os.write(self._commands[rank], f"{command}\n".encode())

    def _collect(self, call: Path, timeout_seconds: float) -> list[tuple[bool, Any]]:
        """Wait for all results; after the first failure the others get little time."""
        deadline = time.monotonic() + timeout_seconds
        results: dict[int, tuple[bool, Any]] = {}
        while len(results) < self.size:
            for rank in set(range(self.size)) - set(results):
                # This comes before the look for the file: a rank may write it, and then be killed.
                ended = self._started[rank % len(self._started)].poll()
                file = _result_of(call, rank)
                if file.exists():
                    results[rank] = pickle.loads(file.read_bytes())
                elif ended is not None:
                    results[rank] = (False, self._problem(rank, f"ended with status {ended}"))
                else:
                    continue
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + FAILING_SECONDS)
            if time.monotonic() > deadline:
                for rank in set(range(self.size)) - set(results):
                    self._tell(rank, STACKS)
                time.sleep(1)
                for rank in set(range(self.size)) - set(results):
                    results[rank] = (False, self._problem(rank, "did not finish"))
            if select.select([self._answers], [], [], 0.1)[0]:  # or a rank has ended
                os.read(self._answers, 1)
        return [results[rank] for rank in range(self.size)]

    def _problem(self, rank: int, what: str) -> str:
        """Log output of a rank that returned no result."""
        logs = [self.folder / "started.log", _log_of(self.folder, rank)]
        tails = [log.read_text(errors="replace")[-6000:] for log in logs if log.exists()]
        return f"rank {rank} {what}; the end of its output:\n" + "\n".join(tails)

    def pause(self) -> None:
        """Stop the ranks until the next call: Horovod's would use CPU time with messages."""
        home = self.folder / f"start{self._starts}"
        if self._started and not self._paused:
            self._paused = [int(_pid_of(home, rank).read_text()) for rank in range(self.size)]
        for pid in self._paused:
            os.kill(pid, signal.SIGSTOP)

    def _continue(self) -> None:
        for pid in self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._paused.clear()

    def kill(self) -> None:
        """End all ranks at once."""
        self._continue()
        for fifo in (*self._leashes, *self._commands):
            os.close(fifo)  # this kills the rank
        if self._started:
            os.close(self._answers)
        for process in self._started:
            if self.kind not in LAUNCHERS:
                process.kill()  # it may not yet read its FIFO
            try:
                process.wait(60)  # a launcher cleans up after its ranks
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._commands.clear()
        self._leashes.clear()
        self._started.clear()


FAILING_SECONDS = 30.0
"""Time for the other ranks after the failure of one: some tests expect that all fail."""

LEAVING_SECONDS = 120.0
"""Time for an agent, which finishes its work before it ends."""

STACKS = "stacks"
"""The command to print the stack of every thread."""


def _commands_of(home: Path, rank: int) -> Path:
    return home / f"commands{rank}"


def _leash_of(home: Path, rank: int) -> Path:
    return home / f"leash{rank}"


def _answers_of(home: Path) -> Path:
    return home / "answers"


def _pid_of(home: Path, rank: int) -> Path:
    return home / f"pid{rank}"


def _log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _result_of(call: Path, rank: int) -> Path:
    return call.with_name(f"{call.name}.rank{rank}")


# --- in the rank's process -----------------------------------------------------------------------


def _serve(kind: str, size: int, home: Path, rank: int) -> None:
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(home, rank, calls), daemon=True).start()
    _join(kind, size, home, rank)
    importlib.import_module("tierckpt.checkpointer.shutdown")._ends = Forgotten()
    while True:
        call = home.parent / calls.get()
        working_directory = os.getcwd()
        print(f"--- {call.name}", flush=True)
        try:
            outcome = (True, _perform(call))
        except BaseException:
            outcome = (False, f"rank {rank}:\n{traceback.format_exc()}")
        os.chdir(working_directory)
        result = _result_of(call, rank)
        unfinished = result.with_name(f"{result.name}.unfinished")
        unfinished.write_bytes(pickle.dumps(outcome))
        unfinished.rename(result)
        with _answers_of(home).open("wb", buffering=0) as answers:
            answers.write(b"!")
        gc.collect()


def _listen(home: Path, rank: int, calls: queue.SimpleQueue[str]) -> None:
    """Pass on the commands of the test process."""
    with _commands_of(home, rank).open() as commands:
        for line in commands:
            if line.strip() == STACKS:
                faulthandler.dump_traceback()
                for worker in multiprocessing.active_children():  # DataLoaders'
                    os.kill(worker.pid, signal.SIGUSR2)
            else:
                calls.put(line.strip())


def _join(kind: str, size: int, home: Path, rank: int) -> None:
    """Become one of a job of `size` ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if kind == GLOO:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{home / 'meeting'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
    elif kind in LAUNCHERS:
        if kind == MPIRUN:  # before Horovod, which would not request sufficient thread support
            from mpi4py import MPI  # noqa: F401
        import horovod.torch as hvd

        hvd.init()
        # A Horovod without MPI takes every process of mpirun for a separate job.
        assert (hvd.rank(), hvd.size()) == (rank, size), "the ranks did not find each other"


def _perform(call: Path) -> Any:
    """Call the scenario; raises AssertionError if it leaves resources in this process."""
    module, name, args, kwargs = pickle.loads(call.read_bytes())
    scenario = getattr(importlib.import_module(module), name)
    before = _belongings()
    value = scenario(*args, **kwargs)
    deadline = time.monotonic() + LEAVING_SECONDS
    pause_seconds = 0.005
    while left := _belongings() - before:
        gc.collect()
        if time.monotonic() > deadline:
            raise AssertionError("the scenario left behind:\n" + "\n".join(sorted(left)))
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, 0.1)
    return value


def _belongings() -> set[str]:
    """Resources that a scenario may leak in a rank: threads, descriptors, mapped slots, processes.

    Those of a process group (TCP sockets, and descriptors to wake and poll its threads) and of
    torch's data loaders are not included.
    """
    threads = {f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("tierckpt")}
    return {*threads, *_descriptors(), *_mappings(), *_children()}


def _descriptors() -> Iterator[str]:
    """Open files, segments without a name, and local sockets, such as the agent's."""
    local = {line.split()[6] for line in Path("/proc/self/net/unix").read_text().splitlines()}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            kind, _, inode = target.partition(":")
            if kind == "socket":
                foreign = inode.strip("[]") not in local
            else:
                foreign = target.startswith(("/proc/", "/dev/shm/torch_", "pipe:", "anon_inode:"))
            if not foreign:
                yield f"descriptor {fd} of {target}"


def _mappings() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "tierckpt-" in line and ("/dev/shm/" in line or "/memfd:" in line):
            yield f"memory {line}"


def _children() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            for pid in Path(f"/proc/self/task/{task}/children").read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                if " tierckpt." in command:  # an empty one has ended
                    yield f"process {pid}: {command[:300]}"


def _rank_of_launcher() -> int:
    found = [os.environ.get(name) for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")]
    return int(next(filter(None, found)))


def _main(kind: str, size: str, home: str, rank: str = "") -> None:
    number = int(rank) if rank else _rank_of_launcher()
    log = os.open(_log_of(Path(home).parent, number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    die_with_writer(os.open(_leash_of(Path(home), number), os.O_RDONLY | os.O_NONBLOCK))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)  # in forked children, too
    _pid_of(Path(home), number).write_text(str(os.getpid()))
    _serve(kind, int(size), Path(home), number)


if __name__ == "__main__":
    _main(*sys.argv[1:])
