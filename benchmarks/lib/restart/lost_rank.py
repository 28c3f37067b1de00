"""The rank of a node in a job that loses its second node again and again, for `restart.py --lose`.

The lost node loses its processes, its memory and its disk at once, as soon as the peer level has
protected a version. The first node records the moments of each start.
"""

from __future__ import annotations

import time

BEGUN = time.time()

import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ddp_ckpt  # noqa: E402
from lib.processes import MARK, Family  # noqa: E402
from lib.restart.killed_rank import STEPS_EACH, loss_of, make_model  # noqa: E402
from lib.restart.lost_nodes import FIRST  # noqa: E402


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    folder, node = Path(plan["folder"]), os.environ["TIERCKPT_NODE"]
    marks = {"begun": BEGUN, "imported": time.time()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    marks["met"] = time.time()
    model = DistributedDataParallel(make_model(plan))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    marks["built"] = time.time()
    protected: list[int] = []
    ckpt = ddp_ckpt.Checkpointer(
        model,
        optimizer,
        path=str(folder / "disks" / "{node}"),
        shm_dir=plan["memory"],
        memory_every_steps=1,
        local_every_seconds=0,
        local_every_steps=2,
        peer_redundancy="xor",
        boundary="explicit",
        on_event=lambda e: (
            protected.append(e.version) if (e.name, e.level) == ("committed", "peer") else None
        ),
    )
    marks["attached"] = time.time()
    start = int(ckpt.restore())
    marks["restored"] = time.time()
    losses = folder / "kills"
    lost = len(losses.read_text().splitlines()) if losses.exists() else 0
    is_ready = folder / f"ready{lost}"
    """Made by the benchmark when the next spare is there."""
    for made in itertools.count(1):
        optimizer.zero_grad()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        if made > STEPS_EACH and protected and node != FIRST and is_ready.exists():
            lose(plan, node, losses)
        optimizer.step()
        ckpt.step()
        if made == 1 and node == FIRST:
            marks["stepped"] = time.time()
            with (folder / "starts").open("a") as file:
                file.write(json.dumps({**marks, "start": start}) + "\n")


def lose(plan: dict[str, Any], node: str, losses: Path) -> None:
    """Lose this node; does not return."""
    for place in (*Path(plan["memory"]).glob(f"*/*@{node}"), Path(plan["folder"]) / "disks" / node):
        shutil.rmtree(place, ignore_errors=True)
    mine = f"TIERCKPT_NODE={node}".encode()
    found = []
    for pid in Family(os.environ[MARK]).pids():
        if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and pid != os.getpid():
            found.append(pid)
    with losses.open("a") as file:
        file.write(f"{time.time()}\n")
    for pid in [*found, os.getpid()]:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
