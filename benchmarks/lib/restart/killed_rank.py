"""One rank of a job; its rank 1 kills itself again and again, for `restart.py --kill`.

The argument is the plan as JSON. Rank 0 writes a line of JSON for each start: the times of its
moments, by the clock of the day, which all processes share.
"""

from __future__ import annotations

import time

BEGUN = time.time()

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

WIDTH = 1024
ROWS = 4
STEPS_EACH = 6
"""Steps of a start before rank 1 kills itself."""


class Killed:
    """The kills and starts of a job, in files of its folder."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        folder = Path(plan["folder"])
        self._kills, self._starts = folder / "kills", folder / "starts"
        self._plan, self._rank = plan, rank
        done = len(self._kills.read_text().splitlines()) if self._kills.exists() else 0
        self._kills_now = rank == 1 and done < plan["kills"]

    def before_step(self, made: int) -> None:
        """Kill this process if it is its turn; `made` steps of this start are complete."""
        if made == STEPS_EACH - 1 and self._kills_now:
            with self._kills.open("a") as file:
                file.write(f"{time.time()}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, made: int, marks: dict[str, float]) -> None:
        """Record the start with its first step."""
        if made == 1 and self._rank == 0:
            marks["stepped"] = time.time()
            with self._starts.open("a") as file:
                file.write(json.dumps(marks) + "\n")


def make_model(plan: dict[str, Any]) -> nn.Sequential:
    """Layers with parameters and Adam's state of the plan's size."""
    torch.manual_seed(1)
    count = max(1, plan["state_bytes"] // (3 * 4 * WIDTH * WIDTH))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def loss_of(model: nn.Module) -> torch.Tensor:
    """The loss of one step."""
    return torch.as_tensor(model(torch.ones(ROWS, WIDTH)).square().mean())


def train(plan: dict[str, Any], marks: dict[str, float], opened: list[Any]) -> None:
    """Train in the default process group from the newest version on. `opened` receives the
    checkpointer, for a caller that trains again in the same process."""
    import ddp_ckpt

    rank = dist.get_rank()
    marks["met"] = time.time()
    model = DistributedDataParallel(make_model(plan))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    marks["built"] = time.time()
    ckpt = ddp_ckpt.Checkpointer(
        model,
        optimizer,
        path=str(Path(plan["folder"]) / "ckpts"),
        shm_dir=plan["memory"],
        memory_every_steps=1,
        local_every_seconds=0,
        local_every_steps=1_000_000,
        boundary="explicit",
    )
    opened.append(ckpt)
    marks["attached"] = time.time()
    start = int(ckpt.restore())
    marks["restored"] = time.time()
    killed = Killed(plan, rank)
    for made in range(STEPS_EACH):
        optimizer.zero_grad()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        killed.before_step(made)
        optimizer.step()
        ckpt.step()
        killed.after_step(made + 1, {**marks, "start": start})
    ckpt.abandon()
    dist.barrier()


def main() -> None:
    import ddp_ckpt  # noqa: F401

    marks = {"begun": BEGUN, "imported": time.time()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(json.loads(sys.argv[1]), marks, [])
    os._exit(0)  # the end of a run is not measured, and gloo may abort there


if __name__ == "__main__":
    main()
