"""Ranks of a small training in processes of their own, without a launcher."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lib.files import job_in_memory

Row = dict[str, Any]


def rows_of_ranks(
    measure: Callable[..., Iterable[Row]],
    world: int,
    *arguments: Any,
    backend: str = "gloo",
    start_method: str = "spawn",
) -> list[Row]:
    """Run `measure(folder, *arguments)` on all ranks of a process group; return rank 0's rows.

    folder: in shared memory, for all levels of a job, with `shm` in it for its slots.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with job_in_memory() as folder:
        torch.multiprocessing.start_processes(
            _run, (measure, world, backend, folder, arguments), world, start_method=start_method
        )
        return [json.loads(line) for line in Path(folder, "rows").read_text().splitlines()]


def _run(
    rank: int,
    measure: Callable[..., Iterable[Row]],
    world: int,
    backend: str,
    folder: str,
    arguments: tuple[Any, ...],
) -> None:
    logging.basicConfig()
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world)
    for row in measure(folder, *arguments):
        if rank == 0:
            with open(Path(folder, "rows"), "a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()
