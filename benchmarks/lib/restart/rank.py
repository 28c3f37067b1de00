"""One rank of one run, started by `restart.py`.

The argument is the plan of the run as JSON. The rank prints one line of JSON: the times of its
phases, by the clock that all processes share, and its counts.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

BEGUN = time.monotonic()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import xxhash  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.restart import methods  # noqa: E402

WIDTH = 1024
ROWS = 4
SAMPLE_SECONDS = 0.002


def layers_of(state_bytes: int) -> int:
    """Number of layers with about `state_bytes` of parameters and Adam state."""
    return max(1, state_bytes // (3 * 4 * WIDTH * WIDTH))


def build(plan: dict[str, Any]) -> methods.Job:
    """Make the job. The weights are the same on all ranks, and differ between runs."""
    torch.set_num_threads(1)
    torch.manual_seed(plan["seed"])
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers_of(plan["state_bytes"]))]
    module = nn.Sequential(*layers)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)

    def iterate() -> None:
        optimizer.zero_grad()
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()

    folders = Path(plan["root"]), Path(plan["memory"])
    return methods.Job(model, module, optimizer, *folders, rank, world, plan["nodes"], iterate)


def digest(job: methods.Job) -> str:
    """Hash of all parameters and the optimizer state."""
    hashed = xxhash.xxh3_64()
    for param in job.module.parameters():
        for tensor in (param.detach(), *_sorted(job.optimizer.state.get(param, {}))):
            hashed.update(tensor.contiguous().numpy())
    return hashed.hexdigest()


def _sorted(state: dict[str, Any]) -> list[torch.Tensor]:
    return [state[name] for name in sorted(state) if name != "step"]


def leave(plan: dict[str, Any]) -> dict[str, Any]:
    """Train and leave a checkpoint for every way."""
    job = build(plan)
    digests = {}
    for name in plan["ways"]:
        job.root, job.memory = Path(plan["root"]) / name, Path(plan["memory"]) / name
        methods.WAYS[name]().leave(job)
        digests[name] = digest(job)
        dist.barrier()
    tensors = sum(p.nbytes for p in job.module.parameters())
    return {"digests": digests, "state_bytes": 3 * tensors}


def restart(plan: dict[str, Any]) -> dict[str, Any]:
    """Restore in one way, and train one step."""
    marks = {"begun": BEGUN, "imported": time.monotonic()}
    job = build(plan)
    way = methods.WAYS[plan["way"]]()
    importlib.import_module(way.module)
    job.root, job.memory = job.root / plan["way"], job.memory / plan["way"]
    before = _bytes_from_storage()
    dist.barrier()
    marks["ready"] = time.monotonic()
    with Peak(plan["checked"]) as peak:
        counted = way.restore(job)
    marks["restored"] = time.monotonic()
    found = digest(job) if plan["checked"] else ""
    counted["storage"] = _bytes_from_storage() - before
    digest_seconds = time.monotonic() - marks["restored"]  # not part of the way
    job.iterate()
    marks["stepped"] = time.monotonic() - digest_seconds
    dist.barrier()
    way.close()
    return {"marks": marks, "counted": counted, "digest": found, "peak_bytes": peak.bytes}


class Peak:
    """Peak growth of the process's anonymous memory inside the `with` block."""

    def __init__(self, wanted: bool) -> None:
        self.bytes = 0
        self._wanted, self._over = wanted, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._first = _own_bytes()
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._wanted:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, _own_bytes() - self._first)


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _bytes_from_storage() -> int:
    """Bytes that the kernel fetched from devices for this process, mapped files included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def main() -> None:
    plan = json.loads(sys.argv[1])
    result = leave(plan) if plan["way"] is None else restart(plan)
    print(json.dumps(result), flush=True)
    os._exit(0)  # the end of a run is not measured, and gloo may abort there


if __name__ == "__main__":
    main()
