"""How much of the time is useful training, when ranks are killed again and again?

    python benchmarks/goodput.py --toy
    python benchmarks/goodput.py --json goodput.json
    python benchmarks/goodput.py --mtbf 10,60 --methods torch-save,ours

SIGKILLs hit random ranks at random times, the same for each method: a seeded Poisson process with
a fixed number of failures. Goodput is the number of useful steps, at the pace of the same
training undisturbed (measured before and after), over the wall time since the training first
could start. Repeated steps count once. Above 1 the machine's pace has changed.

torch-save     rank 0 saves with fsync, all wait; every rank reads the file
dcp-thread     DCP's `async_save` as in its tutorial; `dcp.load`. The training does not wait for it
hvd-elastic    Horovod's elastic state and launcher, with a spare host always; the survivor's memory
ours           Tierckpt: memory, and local once a minute; resumes from memory
ours-run       the same under torchrun and `tierckpt run`

Ranks are forked from a process that has imported torch and made the model, so start-up does not
count, except in the last one; meeting, finding, reading and loading the state count. After a
death all ranks start again. A starting rank is killed as soon as it runs. DCP's daemon process is
left out: it imports torch in each run.

Each method has the best interval for its cost of a version, by Daly's formula. The cost is the
median of `--rounds` pairs of blocks with and without versions, and at least the
stall that the method reports. If it leads to an interval below 5 steps, it is measured again
there, and the larger figure counts. `ours-run` has the cost and pace of `ours`.

every_steps   steps a version        back_seconds  from a SIGKILL to the end of the next step
cost_seconds  wall time a version    made_steps    with those that were repeated
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from dataclasses import asdict
from typing import Any

from lib import machine, models
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary, write_json
from lib.goodput.runs import ELASTIC, RUN, Bench, Result, everything
from lib.report import publish
from lib.terminal import parser_of

METHODS = ("torch-save", "dcp-thread", ELASTIC, "ours", RUN)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables that torch and numpy read when they are imported."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(
        __doc__, toy="1.5 MB of state, half a minute", place="folder on the disk to use, must exist"
    )
    parser.add_argument("--mtbf", help="mean seconds between failures; default 10,30,60, toy 4")
    parser.add_argument("--failures", type=int, help="failures for each method; default 6, toy 2")
    parser.add_argument("--methods", help="names, separated by commas; default: all")
    parser.add_argument("--steps", type=int, help="timed steps to measure the cost of a version")
    parser.add_argument("--rounds", type=int, help="rounds there; default 3, toy 1")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random failures")
    options = parser.parse_args()
    toy = options.toy
    options.model = "toy" if toy else "linear"
    options.mtbf = [float(x) for x in (options.mtbf or ("4" if toy else "10,30,60")).split(",")]
    options.failures = options.failures or (2 if toy else 6)
    options.steps = options.steps or (20 if toy else 40)
    options.rounds = options.rounds or (1 if toy else 3)
    has_horovod = importlib.util.find_spec("horovod") is not None
    here = [name for name in METHODS if name != ELASTIC or has_horovod]
    options.methods = options.methods.split(",") if options.methods else here
    if unknown := [name for name in options.methods if name not in here]:
        parser.error(f"methods here are {', '.join(here)}, not {', '.join(unknown)}")
    return options


def main() -> None:
    options = arguments()
    if any(os.environ.get(name) != "1" for name in ONE_THREAD):  # ranks are forked from here
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_THREAD})
    clean_up_when_terminated()
    preload(options.methods)
    models.preload(options.model)
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "dir")}
    rows: list[dict[str, Any]] = []
    parent = options.dir or machine.scratch_parent()
    with temporary(parent) as folder, temporary(SHARED_MEMORY) as memory:
        about = machine.description(folder)
        for result in everything(Bench(options, folder, memory)):
            rows.append(row_of(result))
            if options.json:
                write_json(options.json, {**about, "settings": settings, "rows": rows})
    publish(options.json, about, settings=settings, rows=rows)


def row_of(result: Result) -> dict[str, Any]:
    """A row of the results file, in seconds."""
    return {**asdict(result), "goodput": result.goodput if result.status == "ok" else None}


def preload(methods: list[str]) -> None:
    """Import what the methods need, so that forks have it."""
    for name in (
        "ddp_ckpt",
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.checkpoint.state_dict_saver",
        *(["horovod.torch"] if ELASTIC in methods else []),
    ):
        importlib.import_module(name)


if __name__ == "__main__":
    main()
