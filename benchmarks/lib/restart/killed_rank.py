"""One rank of a job whose rank 1 kills itself again and again, for `restart.py --kill`.

The argument is the plan as JSON. Rank 0 writes a line of JSON for each start: the times of its
moments, by the clock of the day, which all processes share.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

BEGUN = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ddp_ckpt  # noqa: E402

WIDTH = 1024
ROWS = 4
STEPS_EACH = 6
"""Steps of a start before rank 1 kills itself."""


def main() -> None:
    plan = json.loads(sys.argv[1])
    folder = Path(plan["folder"])
    marks = {"begun": BEGUN, "imported": time.time()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    marks["met"] = time.time()
    torch.manual_seed(1)
    count = max(1, plan["state_bytes"] // (3 * 4 * WIDTH * WIDTH))
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    marks["built"] = time.time()
    restore: dict[str, float] = {}
    ckpt = ddp_ckpt.Checkpointer(
        model,
        optimizer,
        path=str(folder / "ckpts"),
        shm_dir=plan["memory"],
        memory_every_steps=1,
        local_every_seconds=0,
        local_every_steps=1_000_000,
        boundary="explicit",
        on_event=lambda event: restore.update(event.seconds) if event.name == "restored" else None,
    )
    marks["attached"] = time.time()
    start = int(ckpt.restore())
    marks["restored"] = time.time()
    kills = folder / "kills"
    done = len(kills.read_text().splitlines()) if kills.exists() else 0
    for step in range(start, start + STEPS_EACH):
        optimizer.zero_grad()
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        if step == start + STEPS_EACH - 1 and rank == 1 and done < plan["kills"]:
            with kills.open("a") as file:
                file.write(f"{time.time()}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        ckpt.step()
        if step == start and rank == 0:
            marks["stepped"] = time.time()
            with (folder / "starts").open("a") as file:
                file.write(json.dumps({**marks, "start": start, "restore": restore}) + "\n")
    ckpt.abandon()
    dist.barrier()
    os._exit(0)  # the end of a run is not measured, and gloo may abort there


if __name__ == "__main__":
    main()
