"""How long does it take to attach, to restore, and to pass the first boundaries? One process.

    python benchmarks/attach.py --toy
    python benchmarks/attach.py --params 1200,20000

A model of many small parameters with AdamW. Parts: the constructor, `restore()` without a version,
the first five calls of `step()`, and the same of a job that resumes from memory. `--profile` lists
the functions in which the most time was spent, for one part.
"""

from __future__ import annotations

import cProfile
import logging
import os
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tierckpt
from lib.files import job_in_memory
from lib.terminal import parser_of

BOUNDARIES = 5


class Parts:
    """Seconds by part."""

    def __init__(self, profiled: str) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}
        """Of time, and of this process's CPUs."""
        self._profiled = profiled

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        """Make a call, and record its time."""
        profile = cProfile.Profile() if name == self._profiled else None
        begin, cpu = time.perf_counter(), time.process_time()
        result = profile.runcall(call) if profile is not None else call()
        self.seconds[name] = time.perf_counter() - begin, time.process_time() - cpu
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(24)
        return result


def job(params: int, folder: str, parts: Parts, kind: str) -> None:
    """Attach, restore, and make some steps; leaves the versions in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(params // 2)))
    optimizer = torch.optim.AdamW(model.parameters())

    def attach() -> tierckpt.Checkpointer:
        places = {"path": f"{folder}/ckpts", "shm_dir": f"{folder}/shm"}
        off: dict[str, Any] = {"local_every_seconds": 0, "memory_every_steps": 1}
        return tierckpt.Checkpointer(model, optimizer, **places, **off)

    ckpt = parts.time(f"{kind}: attach", attach)
    parts.time(f"{kind}: restore", ckpt.restore)
    for number in range(1, 1 + BOUNDARIES):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        parts.time(f"{kind}: boundary {number}", ckpt.step)
        ckpt.complete()
    ckpt.abandon()


def main() -> None:
    parser = parser_of(__doc__, results="")
    parser.add_argument("--params", default="1200,20000", help="numbers of parameters")
    parser.add_argument("--profile", default="", help="a part, such as 'new: boundary 1'")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; ms, and CPU ms")
    for params in [40] if options.toy else map(int, options.params.split(",")):
        with job_in_memory() as folder:
            parts = Parts(options.profile)
            for kind in ("new", "resumed"):
                job(params, folder, parts, kind)
        for name, (wall, cpu) in parts.seconds.items():
            print(f"{params:>7} {name:<22} {1e3 * wall:>9.1f} {1e3 * cpu:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
