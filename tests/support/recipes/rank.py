"""A rank of another project's script, with a record of each optimizer step: rank.py SCRIPT ARGS.

The script is run as it is. Hooks of torch that all optimizers call record weights, gradients and
learning rates after each step; output goes to a file of the rank.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook as after_steps
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_steps

from tests.support.exact import digest_of_tensors as digest

VARIABLE = "RECIPE"
"""A JSON object: `folder` for the records, `run`, a number, `kill`, the rank and the number of its
steps after which it kills itself, and `averages`, names of classes of averaged weights."""


class Recorder:
    """The records of one rank and run."""

    def __init__(self, order: dict[str, Any], rank: int) -> None:
        self._folder, self._rank = Path(order["folder"]), rank
        self._kill, self._names = order.get("kill"), set(order["averages"])
        self._file = (self._folder / f"run{order['run']}-rank{rank}").open("w")
        self._averages: list[Any] | None = None
        self._steps = self._depth = 0

    def write(self, kind: str, **facts: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **facts}) + "\n")
        self._file.flush()

    def before(self, optimizer: Any, *_: Any) -> None:
        """Record averages as the last iteration left them; be killed. A step of Horovod's optimizer
        is around another one."""
        self._depth += 1
        if self._depth > 1:
            return
        if self._averages is None:
            self._averages = [
                each for each in gc.get_objects() if type(each).__name__ in self._names
            ]
        if self._averages:
            values = [value for each in self._averages for value in each.state_dict().values()]
            self.write("averages", averages=digest(values))
        mark = self._folder / "killed"
        if self._kill == [self._rank, self._steps] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, optimizer: Any, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._steps += 1
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        self.write(
            "step",
            weights=digest(weights),
            gradients=digest(each.grad for each in weights),
            rates=[float(group["lr"]) for group in optimizer.param_groups],
        )


def main() -> None:
    order = json.loads(os.environ[VARIABLE])
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ.get("RANK") or 0)
    output = Path(order["folder"]) / f"run{order['run']}-rank{rank}.log"
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    seed = 1000 * order["run"] + rank  # a restarted job draws other numbers until it restores
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    recorder = Recorder(order, rank)
    before_steps(recorder.before)
    after_steps(recorder.after)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    recorder.write("done")


if __name__ == "__main__":
    main()
