"""One rank of one run of `restart.py`'s job; started by it, never by hand.

Its argument is the run as JSON. It prints one line of JSON: when it did what, by the clock that
all processes share, and what it counted.
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
    """Layers whose parameters and Adam state are about so many bytes."""
    return max(1, state_bytes // (3 * 4 * WIDTH * WIDTH))


def build(run_id: dict[str, Any]) -> methods.Job:
    """The model is the same on all ranks, and another one in each run."""
    torch.set_num_threads(1)
    torch.manual_seed(run_id["seed"])
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers_of(run_id["state_bytes"]))]
    module = nn.Sequential(*layers)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)

    def iterate() -> None:
        optimizer.zero_grad()
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()

    folders = Path(run_id["root"]), Path(run_id["memory"])
    return methods.Job(model, module, optimizer, *folders, rank, world, run_id["nodes"], iterate)


def digest(job: methods.Job) -> str:
    """Of parameters and optimizer state, to the bit."""
    hashed = xxhash.xxh3_64()
    for param in job.module.parameters():
        for tensor in (param.detach(), *_sorted(job.optimizer.state.get(param, {}))):
            hashed.update(tensor.contiguous().numpy())
    return hashed.hexdigest()


def _sorted(state: dict[str, Any]) -> list[torch.Tensor]:
    return [state[name] for name in sorted(state) if name != "step"]


def leave(run_id: dict[str, Any]) -> dict[str, Any]:
    """A run that ends and leaves something behind for every way."""
    job = build(run_id)
    told = {}
    for name in run_id["ways"]:
        job.root, job.memory = Path(run_id["root"]) / name, Path(run_id["memory"]) / name
        methods.WAYS[name]().leave(job)
        told[name] = digest(job)
        dist.barrier()
    tensors = sum(p.nbytes for p in job.module.parameters())
    return {"digests": told, "state_bytes": 3 * tensors}


def come_back(run_id: dict[str, Any]) -> dict[str, Any]:
    """The run after."""
    marks = {"begun": BEGUN, "imported": time.monotonic()}
    job = build(run_id)
    way = methods.WAYS[run_id["way"]]()
    importlib.import_module(way.module)
    job.root, job.memory = job.root / run_id["way"], job.memory / run_id["way"]
    before = _bytes_from_storage()
    dist.barrier()
    marks["ready"] = time.monotonic()
    with Peak(run_id["look"]) as peak:
        counted = way.come_back(job)
    marks["restored"] = time.monotonic()
    found = digest(job) if run_id["look"] else ""
    counted["storage"] = _bytes_from_storage() - before
    checked = time.monotonic() - marks["restored"]  # what is ours and not the way's
    job.iterate()
    marks["stepped"] = time.monotonic() - checked
    dist.barrier()
    way.close()
    return {"marks": marks, "counted": counted, "digest": found, "peak_bytes": peak.bytes}


class Peak:
    """The most memory of its own (anonymous and shared, not files' pages) above the beginning."""

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
    """What this process made the kernel fetch from a device, mapped files included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def main() -> None:
    run_id = json.loads(sys.argv[1])
    told = leave(run_id) if run_id["way"] is None else come_back(run_id)
    print(json.dumps(told), flush=True)
    os._exit(0)  # the end of a run is not measured, and gloo's may abort


if __name__ == "__main__":
    main()
