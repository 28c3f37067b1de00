"""How much of the time is useful training, when ranks are killed again and again?

    python benchmarks/goodput.py --toy
    python benchmarks/goodput.py --json goodput.json
    python benchmarks/goodput.py --mtbf 10,60 --methods torch-save,ours

SIGKILLs hit random ranks at random times, the same for each method: a seeded Poisson process with
a fixed number of failures. Goodput is the number of useful steps, at the pace of the same
training undisturbed (measured before and after), over the wall time since the training first
could start. Repeated steps count once. Above 100 % the machine's pace has changed, and nothing is
judged.

torch-save     rank 0 saves with fsync, all wait; every rank reads the file
dcp-thread     DCP's `async_save` as in its tutorial; `dcp.load`. The training does not wait for it
hvd-elastic    Horovod's elastic state and launcher, with a spare host always; the survivor's memory
ours           Tierckpt: memory, and local once a minute; resumes from memory
ours-torchrun  the same under torchrun, which starts new processes
ours-run       the same under torchrun and `tierckpt run`

Ranks are forked from a process that has imported torch and made the model, so start-up does not
count, except in the last two; meeting, finding, reading and loading the state count. After a
death all ranks start again. A starting rank is killed as soon as it runs. DCP's daemon process is
left out: it imports torch in each run.

Each method has the best interval for its cost of a version, by Daly's formula. The cost is
`--cost`, or the median of `--rounds` pairs of blocks with and without versions, and at least the
stall that the method reports. If it leads to an interval below `--every`, it is measured again
there, and the larger figure counts. `ours-torchrun` and `ours-run` have the cost and pace of
`ours`.

interval  steps a version       back s  from a SIGKILL to the end of the next step, median
cost ms   wall time a version   lost    steps that were repeated
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib import machine, models
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary, write_json
from lib.goodput.methods import RESUMABLE, preload
from lib.goodput.report import table, verdicts
from lib.goodput.runs import Bench, Result, everything
from lib.terminal import parser_of

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables that torch and numpy read when they are imported."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(
        __doc__, toy="1.5 MB of state, half a minute", place="folder on the disk to use, must exist"
    )
    parser.add_argument("--model", choices=models.NAMES, help="default: linear, toy: toy")
    parser.add_argument("--batch", type=int, help="samples a rank")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--mtbf", help="mean seconds between failures; default 10,30,60, toy 4")
    parser.add_argument("--failures", type=int, help="failures for each method; default 6, toy 2")
    parser.add_argument("--methods", help="names, separated by commas; default: all")
    parser.add_argument("--steps", type=int, help="timed steps to measure the cost of a version")
    parser.add_argument("--every", type=int, default=5, help="steps per version there")
    parser.add_argument("--rounds", type=int, help="rounds there; default 3, toy 1")
    text = "cost of a version, known from a quiet machine; default: measured"
    parser.add_argument("--cost", type=float, metavar="SECONDS", help=text)
    parser.add_argument("--seed", type=int, default=1, help="seed of the random failures")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one block")
    options = parser.parse_args()
    toy = options.toy
    options.model = options.model or ("toy" if toy else "linear")
    options.batch = options.batch or models.BATCHES[options.model]
    options.mtbf = [float(x) for x in (options.mtbf or ("4" if toy else "10,30,60")).split(",")]
    options.failures = options.failures or (2 if toy else 6)
    options.steps = options.steps or (20 if toy else 40)
    options.rounds = options.rounds or (1 if toy else 3)
    known = [name for name in RESUMABLE if name != "nothing"]
    usual = [name for name in known if RESUMABLE[name].usual]
    here = [name for name in usual if RESUMABLE[name].missing() is None]
    options.methods = options.methods.split(",") if options.methods else here
    unknown = [name for name in options.methods if name not in known]
    if unknown:
        parser.error(f"unknown methods {', '.join(unknown)}; known are {', '.join(known)}")
    return options


def main() -> None:
    options = arguments()
    if any(os.environ.get(name) != "1" for name in ONE_THREAD):  # ranks are forked from here
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_THREAD})
    clean_up_when_terminated()
    preload()
    parent = options.dir or machine.scratch_parent()
    with temporary(parent) as folder, temporary(SHARED_MEMORY) as memory:
        about = machine.description(folder)
        results = []
        for result in everything(Bench(options, folder, memory)):
            results.append(result)
            if options.json:
                write(options.json, about, options, results)
    print(f"{options.model}, {options.world} ranks; {about['cpu']}, {about['cores']} cores")
    print(f"{about['filesystem']}, torch {about['torch']}, load {os.getloadavg()[0]:.1f}\n")
    print(table(results), "\n")
    print("\n".join(["the toy is not judged"] if options.toy else verdicts(results)))


def write(
    path: Path, about: dict[str, Any], options: argparse.Namespace, results: list[Result]
) -> None:
    """Write all figures so far, in seconds. Replaces the file in one step."""
    rows = [{**asdict(r), "goodput": r.goodput if r.status == "ok" else None} for r in results]
    settings = {k: v for k, v in vars(options).items() if k not in ("json", "dir")}
    document = {**about, "settings": settings, "rows": rows}
    write_json(path, document)


if __name__ == "__main__":
    main()
