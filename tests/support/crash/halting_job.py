"""The job of `job.py`, halted by a signal: under torchrun, with a loop that asks or does not.

In every case it records its exit status in the journal just before it ends.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import ddp_ckpt
from tests.support.crash.job import (
    Journal,
    digests,
    make_training,
    prepare_faults,
    train_one,
    wait_at_gates,
)
from tests.support.crash.scenario import VARIABLE, Scenario

ASKS_VARIABLE = "CRASH_ASKS"
"""The variable, set if the loop asks whether to end."""
WORKERS_VARIABLE = "CRASH_WORKERS"
"""Number of workers of the loop's DataLoader; unset: there is no DataLoader."""


def make_batches(workers: int) -> Iterator[object]:
    """A dataset with an item for every step, which draws no random numbers of the job."""
    if not workers:
        return itertools.repeat(None)
    return iter(DataLoader(range(10**6), num_workers=workers, generator=torch.Generator()))


def main(scenario: Scenario, rank: int, journal: Journal, asks: bool) -> None:
    torch.set_num_threads(1)
    prepare_faults(scenario, rank, journal)
    # Installed before the checkpointer: it has to be called, too.
    signal.signal(signal.SIGTERM, lambda number, _: journal.write(signal=int(number)))
    dist.init_process_group("gloo")
    model, optimizer, scheduler = make_training(scenario, rank)
    stream = np.random.default_rng(rank)
    ckpt = ddp_ckpt.Checkpointer(
        model,
        optimizer,
        extra={"scheduler": scheduler},
        extra_per_rank={"stream": stream},
        on_event=lambda event: journal.write(
            event=event.name, level=event.level, version=event.version, message=event.message
        ),
        **(scenario.settings or {}),
    )
    start = ckpt.restore()
    journal.write(start=int(start), version=start.version, pid=os.getpid())
    batches = make_batches(int(os.environ.get(WORKERS_VARIABLE, "0")))
    for step in range(start, scenario.steps):
        next(batches)
        wait_at_gates(scenario, step, journal)
        # The boundary comes after the journal: in it a loop that never asks ends.
        train_one(step, rank, stream, model, optimizer, scheduler, None, journal)
        ckpt.step()
        if asks and ckpt.should_exit():
            break
    del batches
    ckpt.close()
    if ckpt.version == scenario.steps:
        journal.write(done=digests(model, optimizer, scheduler, stream))
    dist.barrier()


if __name__ == "__main__":
    status = 1
    told = Scenario(**json.loads(os.environ[VARIABLE]))
    here = int(os.environ["RANK"])
    book = Journal(told.folder, here, told.life)
    try:
        main(told, here, book, bool(os.environ.get(ASKS_VARIABLE)))
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        book.write(exit=status)
        sys.stdout.flush()
        sys.stderr.flush()
        # As in `job.py`: gloo's teardown has an exit code of its own now and then.
        os._exit(status)
