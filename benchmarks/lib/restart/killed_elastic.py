"""The job of killed_rank.py under elastic Horovod: the survivor keeps its process and its state.

Horovod's own state is committed to the memory of each process at every step. Rank 0 survives.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch

from lib.restart.killed_rank import STEPS_EACH, Killed, loss_of, make_model

PLAN: dict[str, Any] = json.loads(sys.argv[1])


class State(hvd.elastic.TorchState):  # type: ignore[misc]
    """Horovod's state, which notes the moments of a restart."""

    marks: dict[str, float]

    def restore(self) -> None:
        """Horovod has noticed a failure: go back to the last commit."""
        self.marks = {"begun": time.time()}
        self.marks["imported"] = self.marks["begun"]
        super().restore()

    def sync(self) -> None:
        """All ranks have met: take rank 0's state."""
        now = time.time()
        self.marks.update(met=now, built=now, attached=now)
        super().sync()
        self.marks["restored"] = time.time()


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = make_model(PLAN)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-4), model.named_parameters()
    )

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def loop(state: State) -> None:
        killed = Killed(PLAN, hvd.rank())
        for made in range(STEPS_EACH):
            optimizer.zero_grad()
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            killed.before_step(made)
            optimizer.step()
            state.commit()
            killed.after_step(made + 1, state.marks)

    state = State(model, optimizer)
    now = time.time()
    state.marks = {"begun": now, "imported": now}
    loop(state)
    hvd.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
