"""Ranks on one GPU: new processes for each scenario.

The pool of tests/dist does not fit: its ranks stay, and are checked for leaks of a scenario, but
CUDA and NCCL keep descriptors of their own.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 240.0
COLLECTIVE_SECONDS = 60


def run(
    scenario: Callable[..., Any],
    folder: Path,
    *,
    world: int = 2,
    backend: str = "gloo",
    **args: Any,
) -> list[Any]:
    """Call `scenario(**args)` on every rank of a job; returns the results in rank order.

    Arguments and results are JSON values. When one rank fails the others are killed, and an
    AssertionError has its number, its exit status and the end of its output.
    """
    meeting = folder / f"meeting-{uuid.uuid4().hex[:8]}"
    what = [scenario.__module__, scenario.__qualname__, json.dumps(args)]
    command = [sys.executable, "-m", __name__, *what, str(meeting), backend, str(world)]
    processes = []
    try:
        for rank in range(world):
            with _log_of(meeting, rank).open("wb") as log:
                processes.append(
                    subprocess.Popen([*command, str(rank)], stdout=log, stderr=log, cwd=folder)
                )
        failed = _first_to_fail(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        status = processes[failed].returncode
        told = _log_of(meeting, failed).read_text(errors="replace")[-6000:]
        raise AssertionError(f"rank {failed} ended with status {status}; its last words:\n{told}")
    return [json.loads(_result_of(meeting, rank).read_text()) for rank in range(world)]


def _first_to_fail(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for the end of all: returns None, or the first rank that failed or was too late."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        statuses = [process.poll() for process in processes]
        late = time.monotonic() > deadline
        for rank, status in enumerate(statuses):
            if status or (late and status is None):
                return rank
        if None not in statuses:
            return None
        time.sleep(0.01)


def _log_of(meeting: Path, rank: int) -> Path:
    return meeting.with_name(f"{meeting.name}.rank{rank}.log")


def _result_of(meeting: Path, rank: int) -> Path:
    return meeting.with_name(f"{meeting.name}.rank{rank}")


def _main(module: str, name: str, args: str, meeting: str, backend: str, *numbers: str) -> None:
    """Run the scenario in the rank's process."""
    import torch
    import torch.distributed as dist

    world, rank = map(int, numbers)
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    value = getattr(importlib.import_module(module), name)(**json.loads(args))
    _result_of(Path(meeting), rank).write_text(json.dumps(value))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
