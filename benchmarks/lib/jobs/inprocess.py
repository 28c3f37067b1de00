"""One rank of a job under the in-process wrapper of NVIDIA's Resiliency Extension.

Survivors call the training function again in the same process. The place of a killed rank is taken
by a reserve rank, a process that has imported everything and waits. The wrapper looks at
annotations, so they are not strings here.
"""

import datetime
import os
import sys
import time

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist

import ddp_ckpt  # noqa: F401
from lib import models
from lib.jobs.plan import Plan
from lib.jobs.rank import train
from lib.methods.method import Method
from lib.training.launchers import Ranks

INTERVAL = datetime.timedelta(seconds=0.1)
"""As torchrun's monitor interval here; the default of each is a second."""


def main() -> None:
    plan = Plan.of_json(sys.argv[1])
    models.preload(plan.model)
    opened: list[Method] = []
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    size, is_first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    stores = dist.TCPStore(host, port, size, is_first, multi_tenant=True)  # type: ignore[attr-defined]

    @inprocess.Wrapper(  # type: ignore[untyped-decorator]
        store_kwargs={"port": port + 1},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(plan.world),
            inprocess.rank_assignment.ShiftRanks(),
        ),
        monitor_thread_interval=INTERVAL,
        monitor_process_interval=INTERVAL,
        heartbeat_interval=INTERVAL,
        last_call_wait=INTERVAL,
    )
    def run(wrapper: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
        moments = dict.fromkeys(("begun", "imported"), time.time())
        while opened:  # not in a `finally`, which the wrapper's exception may interrupt
            opened.pop().close()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(wrapper.iteration), stores),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        train(plan, Ranks("gloo"), moments, opened=opened)
        os._exit(0)

    run()


if __name__ == "__main__":
    main()
