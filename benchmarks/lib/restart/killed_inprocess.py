"""The job of killed_rank.py under the in-process wrapper of NVIDIA's Resiliency Extension.

Survivors call the training function again in the same process. The place of a killed rank is taken
by a reserve rank, a process that has imported everything and waits. The wrapper looks at
annotations, so they are not strings here.
"""

import datetime
import json
import os
import sys
import time
from typing import Any

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist

import ddp_ckpt  # noqa: F401
from lib.restart.killed_rank import train

INTERVAL = datetime.timedelta(seconds=0.1)
"""As torchrun's monitor interval here; the default of each is a second."""


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    opened: list[Any] = []
    port = int(os.environ["MASTER_PORT"])
    stores = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        port,
        int(os.environ["WORLD_SIZE"]),
        os.environ["RANK"] == "0",
        multi_tenant=True,
    )

    @inprocess.Wrapper(  # type: ignore[untyped-decorator]
        store_kwargs={"port": port + 1},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(plan["world"]),
            inprocess.rank_assignment.ShiftRanks(),
        ),
        monitor_thread_interval=INTERVAL,
        monitor_process_interval=INTERVAL,
        heartbeat_interval=INTERVAL,
        last_call_wait=INTERVAL,
    )
    def run(wrapper: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
        marks = {"begun": time.time()}
        while opened:  # not in a `finally`, which the wrapper's exception may interrupt
            opened.pop().abandon()
        marks["imported"] = marks["begun"]
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(wrapper.iteration), stores),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        train(plan, marks, opened)
        os._exit(0)

    run()


if __name__ == "__main__":
    main()
