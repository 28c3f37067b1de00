"""One rank of a job: it resumes, trains, takes checkpoints, and keeps a log.

The argument is the plan as JSON (`lib.jobs.plan`). The log has the exact loss of every step.
"""

from __future__ import annotations

import time

BEGUN = time.time()

import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

if __name__ == "__main__" and "RANK" in os.environ:  # whoever kills it may do so from now on
    Path(json.loads(sys.argv[1])["folder"], f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from lib import models  # noqa: E402
from lib.jobs.plan import Log, Plan  # noqa: E402
from lib.methods.method import Job, Method  # noqa: E402
from lib.methods.ours import ADAPTERS  # noqa: E402
from lib.methods.resumable import RESUMABLE  # noqa: E402
from lib.training.launchers import LAUNCHERS, Ranks  # noqa: E402


def train(
    plan: Plan,
    ranks: Ranks,
    moments: dict[str, float],
    made: tuple[models.Model, torch.nn.Module] | None = None,
    opened: list[Method] | None = None,
) -> None:
    """Train one rank of a job from the newest version on.

    Args:
        plan: the job.
        ranks: its process group.
        moments: those of this start so far.
        made: the model, if it is there already.
        opened: receives the method, for a caller that trains again in the same process.
    """
    moments["met"] = time.time()
    torch.set_num_threads(1)
    kind, module = made or models.made(plan.model)
    kind = replace(kind, batch=plan.batch or kind.batch)
    torch.manual_seed(100 + ranks.rank)
    model, optimizer = ranks.distribute(module, kind.optimizer(module.parameters()))
    method = RESUMABLE[plan.method]()
    moments["built"] = time.time()
    version = method.resume(_job(plan, ranks, model, module, optimizer), plan.every)
    if opened is not None:
        opened.append(method)
    log, stalls = Log(plan, ranks.rank), list[float]()
    log.add(**moments, attached=method.attached, restored=time.time(), resumed_from=version)
    killed_at = plan.killed_at[log.starts] if log.starts < len(plan.killed_at) else 0
    is_victim = ranks.rank in plan.victims or not plan.victims
    while version < plan.steps:
        optimizer.zero_grad()
        loss = kind.loss(model, *kind.batch_of(version, ranks.rank))
        torch.autograd.backward(loss)
        waits = time.perf_counter()
        method.before_optimizer_step()
        waits -= time.perf_counter()
        optimizer.step()
        version += 1
        due, calls = version % plan.every == 0, time.perf_counter()
        method.boundary(version, due)
        if due:
            stalls.append(time.perf_counter() - calls - waits)
            method.retire()
        log.add(step=version, loss=loss.item().hex(), end=time.time())
        if version == killed_at:
            if plan.drains:
                method.drain()
                ranks.barrier()
            if is_victim:
                log.add(killed=time.time())
                os.kill(os.getpid(), signal.SIGKILL)
        plan.hold(version)
    ranks.barrier()
    log.add(stall=median(method.stall_seconds() or stalls or [0.0]))
    method.close()


def _job(plan: Plan, ranks: Ranks, model: Any, module: Any, optimizer: Any) -> Job:
    """The job as a method sees it: a node has a folder for its disk, and one for its memory.

    All ranks of a node-less method share the folder of a store.
    """
    is_ours = plan.method.startswith("ours")
    name = os.environ.get("TIERCKPT_NODE", "node0") if is_ours else "shared"
    directory, memory = Path(plan.folder) / name, Path(plan.memory) / name
    for each in (directory, memory):
        each.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu")
    return Job(
        model,
        module,
        optimizer,
        directory,
        memory,
        ranks.rank,
        ranks.world,
        device,
        plan.launcher,
    )


def main() -> None:
    plan = Plan.of_json(sys.argv[1])
    models.preload(plan.model)
    if plan.method.startswith("ours"):
        importlib.import_module(ADAPTERS[plan.launcher])
    moments = {"begun": BEGUN, "imported": time.time()}
    train(plan, LAUNCHERS[plan.launcher]("gloo"), moments)
    os._exit(0)  # without the teardown of gloo, which sometimes aborts


if __name__ == "__main__":
    main()
