"""Ranks in processes of their own, kept for many scenarios: starting torch costs seconds.

A scenario is a function of a test module. `RankPool.run` calls it on all ranks at once, and gives
back what each returned, or raises with every rank's traceback and output. A pool that failed or
hung is killed and made anew by the next call, so one bad scenario does not spoil the next. Ranks
die with the test process, however that dies.

    pool = RankPool(2, folder)
    assert pool.run(my_scenario, "argument") == ["result of rank 0", "result of rank 1"]
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVE_SECONDS = 60
"""After this a collective whose peer is gone raises, instead of hanging."""


class RankPool:
    """`size` processes, joined in a gloo process group unless `process_group` is False.

    Args:
        size: how many ranks.
        folder: for scripts, logs and results.
        env: environment variables of each rank, besides the test's own.
        process_group: initialise torch.distributed.
    """

    def __init__(
        self,
        size: int,
        folder: Path,
        env: Sequence[Mapping[str, str]] = (),
        process_group: bool = True,
    ) -> None:
        self.size = size
        self.folder = folder
        self._env = env or [{}] * size
        self._process_group = process_group
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._calls = self._starts = 0

    def run(
        self, scenario: Callable[..., Any], *args: Any, timeout_seconds: float = 150, **kwargs: Any
    ) -> list[Any]:
        """Call `scenario` on every rank; what they returned, in rank order."""
        if not self._ranks:
            self._start()
        self._calls += 1
        call = self.folder / f"call{self._calls}"
        names = (scenario.__module__, scenario.__qualname__)
        call.write_bytes(pickle.dumps((*names, args, kwargs)))
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{call}\n".encode())
            rank.stdin.flush()
        results = self._collect(call, timeout_seconds)
        problems = [text for ok, text in results if not ok]
        if problems:
            self.kill()
            raise AssertionError("\n".join(problems))
        return [value for _, value in results]

    def _start(self) -> None:
        self._starts += 1
        meeting = self.folder / f"meeting{self._starts}" if self._process_group else "none"
        for rank in range(self.size):
            with self._log(rank).open("ab") as log:
                self._ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", __name__, str(rank), str(self.size), str(meeting)],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        cwd=self.folder,
                        env={
                            **os.environ,
                            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'common'}",
                            "OMP_NUM_THREADS": "1",
                            "PYTHONUNBUFFERED": "1",
                            **self._env[rank],
                        },
                    )
                )

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def _collect(self, call: Path, timeout_seconds: float) -> list[tuple[bool, Any]]:
        """Wait for all results; once one rank failed, the others get a moment only."""
        deadline = time.monotonic() + timeout_seconds
        results: dict[int, tuple[bool, Any]] = {}
        while len(results) < self.size:
            for rank, process in enumerate(self._ranks):
                # Before looking for the file: a rank may write it, and then be killed.
                ended = process.poll()
                file = _result_of(call, rank)
                if rank in results:
                    continue
                if file.exists():
                    results[rank] = pickle.loads(file.read_bytes())
                elif ended is not None:
                    results[rank] = (False, self._problem(rank, f"ended with status {ended}"))
                else:
                    continue
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + 5)
            if time.monotonic() > deadline:
                for rank in set(range(self.size)) - set(results):
                    self._ranks[rank].send_signal(signal.SIGUSR1)  # dumps its stacks
                time.sleep(1)
                for rank in set(range(self.size)) - set(results):
                    results[rank] = (False, self._problem(rank, "did not finish"))
            time.sleep(0.002)
        return [results[rank] for rank in range(self.size)]

    def _problem(self, rank: int, what: str) -> str:
        tail = self._log(rank).read_text(errors="replace")[-8000:]
        return f"rank {rank} {what}; the end of its output:\n{tail}"

    def kill(self) -> None:
        """End all ranks at once."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            assert rank.stdin is not None
            rank.stdin.close()
        self._ranks.clear()


def _result_of(call: Path, rank: int) -> Path:
    return call.with_name(f"{call.name}.rank{rank}")


# --- in the rank's process -----------------------------------------------------------------------


def _serve(rank: int, size: int, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if meeting != "none":
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
    for line in sys.stdin:
        call = Path(line.strip())
        home = os.getcwd()
        print(f"--- {call.name}", flush=True)
        try:
            outcome = (True, _perform(call))
        except BaseException:
            outcome = (False, f"rank {rank}:\n{traceback.format_exc()}")
        os.chdir(home)
        result = _result_of(call, rank)
        unfinished = result.with_name(f"{result.name}.unfinished")
        unfinished.write_bytes(pickle.dumps(outcome))
        unfinished.rename(result)
        gc.collect()
    # Not sys.exit: gloo's C++ teardown sometimes aborts, which says nothing about any scenario.
    os._exit(0)


def _perform(call: Path) -> Any:
    module, name, args, kwargs = pickle.loads(call.read_bytes())
    value = getattr(importlib.import_module(module), name)(*args, **kwargs)
    left = [t.name for t in threading.enumerate() if t.name.startswith("tierckpt")]
    if left:
        raise AssertionError(f"the scenario left threads behind: {left}")
    return value


if __name__ == "__main__":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
