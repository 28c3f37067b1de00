"""One rank of SCR-Exa's jobs: it resumes, trains, takes a checkpoint each epoch, and keeps a log.

The argument is the plan as JSON (`lib.papers.scr_exa.jobs`). The log has the exact loss of every
step, and the moments of each start by the clock of the day, which all processes share.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch  # noqa: E402

from lib.methods.method import Job  # noqa: E402
from lib.papers.models import MODELS  # noqa: E402
from lib.papers.scr_exa.jobs import Plan, of_json  # noqa: E402
from lib.papers.scr_exa.savers import SAVERS  # noqa: E402
from lib.training.launchers import LAUNCHERS, Ranks  # noqa: E402


class Log:
    """The log of a rank, over all starts; a line is in the file when a call returns."""

    def __init__(self, plan: Plan, rank: int) -> None:
        path = plan.log_of(rank)
        self.starts = path.read_text().count('"begun"') if path.exists() else 0
        """How often the job has started before."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, **line: Any) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())


def main() -> None:
    plan = of_json(sys.argv[1])
    moments = {"begun": BEGUN, "imported": time.time()}
    torch.set_num_threads(1)
    ranks = LAUNCHERS[plan.launcher]("gloo")
    found = MODELS[plan.model]
    torch.manual_seed(1)
    module = found.make()
    torch.manual_seed(100 + ranks.rank)
    model, optimizer = ranks.distribute(module, found.optimizer(module.parameters()))
    method = SAVERS[plan.launcher][plan.method]()
    job = _job(plan, ranks, model, module, optimizer)
    moments["built"] = time.time()
    version = method.resume(job, plan.every)
    log = Log(plan, ranks.rank)
    log.add(**moments, restored=time.time(), resumed_from=version)
    killed_at = plan.killed_at[log.starts] if log.starts < len(plan.killed_at) else 0
    while version < plan.steps:
        chance = torch.Generator().manual_seed(1000 * version + ranks.rank)
        inputs = found.sample(found.batch, chance)
        optimizer.zero_grad()
        loss = found.loss(model, *inputs)
        torch.autograd.backward(loss)
        method.before_optimizer_step()
        optimizer.step()
        version += 1
        method.boundary(version, version % plan.every == 0)
        log.add(step=version, loss=loss.item().hex(), end=time.time())
        if version == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        plan.hold(version)
    ranks.barrier()
    os._exit(0)  # without the teardown of gloo, which sometimes aborts


def _job(plan: Plan, ranks: Ranks, model: Any, module: Any, optimizer: Any) -> Job:
    """The job as a method sees it, with the directory that it writes to."""
    is_shared = plan.method == "root-shared"
    name = "shared" if is_shared else os.environ.get("TIERCKPT_NODE", "node0")
    directory = Path(plan.folder) / name
    memory = Path(plan.memory) / name
    for each in (directory, memory):
        each.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu")
    return Job(model, module, optimizer, directory, memory, ranks.rank, ranks.world, device)


if __name__ == "__main__":
    main()
