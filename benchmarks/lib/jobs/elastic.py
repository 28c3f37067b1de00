"""One rank of a job under elastic Horovod: the survivor keeps its process and its state.

Horovod's own state is committed to the memory of each process. `lib.jobs.rank` is the same for
the other methods.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from statistics import median

import horovod.torch as hvd
import torch

from lib import models
from lib.jobs.plan import Log, Plan


class State(hvd.elastic.TorchState):  # type: ignore[misc]
    """Horovod's state, which notes the moments of a restart."""

    moments: dict[str, float]

    def restore(self) -> None:
        """Horovod has noticed a failure: go back to the last commit."""
        self.moments = dict.fromkeys(("begun", "imported"), time.time())
        super().restore()

    def sync(self) -> None:
        """All ranks have met: take rank 0's state."""
        self.moments |= dict.fromkeys(("met", "built", "attached"), time.time())
        super().sync()
        self.moments["restored"] = time.time()


def train(plan: Plan, made: tuple[models.Model, torch.nn.Module] | None = None) -> None:
    """Train with the loop of Horovod's documentation."""
    began = dict.fromkeys(("begun", "imported"), time.time())
    hvd.init()
    torch.set_num_threads(1)
    kind, model = made or models.made(plan.model)
    optimizer = hvd.DistributedOptimizer(
        kind.optimizer(model.parameters()), model.named_parameters()
    )
    stalls: list[float] = []

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def loop(state: State) -> None:
        log = Log(plan, hvd.rank())
        log.add(**state.moments, resumed_from=state.version)
        killed_at = plan.killed_at[log.starts] if log.starts < len(plan.killed_at) else 0
        while state.version < plan.steps:
            optimizer.zero_grad()
            torch.autograd.backward(kind.loss(model, *kind.batch_of(state.version, hvd.rank())))
            optimizer.step()
            state.version += 1
            if state.version % plan.every == 0:
                calls = time.perf_counter()
                state.commit()
                stalls.append(time.perf_counter() - calls)
            log.add(step=state.version, end=time.time())
            if state.version == killed_at and hvd.rank() in plan.victims:
                log.add(killed=time.time())
                os.kill(os.getpid(), signal.SIGKILL)

    state = State(model=model, optimizer=optimizer, version=0)
    state.moments = began
    loop(state)
    hvd.barrier()
    Log(plan, hvd.rank()).add(stall=median(stalls or [0.0]))


if __name__ == "__main__":
    train(Plan.of_json(sys.argv[1]))
    os._exit(0)
