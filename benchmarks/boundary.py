"""How much CPU time does a version cost besides its bytes? By part, for each thread.

    python benchmarks/boundary.py --toy
    python benchmarks/boundary.py --model deep --rounds 9
    python benchmarks/boundary.py --off                        # attached, and no version is taken
    python benchmarks/boundary.py --device cuda --ranks 1      # one GPU, NCCL

DDP training with a version to memory at every step; blocks of steps of a plain twin take turns with
it in the same processes. The functions below are wrapped: each one's time is CPU time of its
thread, without that of the functions within it. The clock's own time is subtracted. The sum of all
parts is compared with the difference between the twins, which also has the cost of caches and
wake-ups. `--ranks 1` runs in this process alone.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
from lib.files import job_in_memory
from lib.step_models import cnn, deep, mlp
from lib.terminal import parser_of

PARTS = {
    "step hook": (
        "hooks.iterations:Hooks._before_any_step",
        "hooks.iterations:Iterations.step_starts",
    ),
    "step()": ("checkpointer.checkpointer:Checkpointer.step",),
    "hooks at the boundary": (
        "hooks.iterations:Hooks.called",
        "hooks.epoch_ends:EpochEnds.iteration_ends",
        "hooks.unsaved_objects:Unsaved.boundary_begins",
    ),
    "release": (
        "ddp_ckpt.comm_hook:ReleaseHook._release_group",
        "checkpointer.loop:CheckpointerCore._release",
        "checkpointer.loop:ActiveSnapshot.release",
    ),
    "boundary": ("checkpointer.loop:CheckpointerCore._boundary",),
    "read the votes": (
        "checkpointer.loop:Rounds.read",
        "coordination.agreement:Agreement.read",
    ),
    "take stock": ("coordination.versions:SlotHandoff.take_stock",),
    "agent": ("checkpointer.levels:Tiers.collect",),
    "decide": ("checkpointer.loop:Rounds.decide",),
    "cast the vote": (
        "checkpointer.loop:Rounds.vote",
        "coordination.agreement:Agreement.launch",
    ),
    "halt": (
        "halt.controller:HaltController.vote",
        "halt.controller:HaltController.read",
    ),
    "facts": ("checkpointer.loop:CheckpointerCore._facts",),
    "open": (
        "checkpointer.loop:CheckpointerCore._open_snapshot",
        "checkpointer.loop:ActiveSnapshot.take",
        "checkpointer.loop:ActiveSnapshot.start",
    ),
    "does the plan fit": ("snapshot.copy_plan:CopyPlan.fits",),
    "counters": ("snapshot.copy_plan:CopyPlan.counters",),
    "stage buffers": ("snapshot.copy_plan:_Buffers.stage",),
    "stage": ("snapshot.staging:Staging._stage",),
    "random streams": ("snapshot.staging:Staging._own_now",),
    "groups, extra": (
        "state.optimizer_state:OptimizerTree.pack_groups",
        "state.optimizer_state:OptimizerTree.pack_remainders",
        "state.training_state:TrainingState.pack_extra",
        "state.training_state:TrainingState.look_again",
        "state.training_state:TrainingState.pack_module_states",
    ),
    "encode the tree": ("state.tree_codec:EncodedTree.__init__",),
    "copy the tree": ("state.tree_codec:EncodedTree.copy",),
    "replica check": (
        "replicas.monitor:ReplicaMonitor.read",
        "replicas.monitor:ReplicaMonitor.vote",
        "replicas.monitor:ReplicaMonitor.voted",
        "replicas.monitor:ReplicaMonitor.settle",
        "replicas.replicated_state:Look.run",
    ),
    "unchanged": (
        "replicas.unchanged:Unchanged.sealed",
        "replicas.unchanged:Unchanged.read",
    ),
    "report": (
        "checkpointer.loop:ActiveSnapshot._report",
        "coordination.versions:Reports.sealed",
    ),
    "barrier": (
        "checkpointer.loop:CheckpointerCore._before_change",
        "snapshot.snapshot:Snapshot.barrier",
    ),
    "copier": ("snapshot.snapshot:Snapshot.run",),
    "feed (GPU)": ("snapshot.cuda:CudaSnapshot.run", "snapshot.cuda:CudaSnapshot._feed"),
    "let go (GPU)": (
        "snapshot.cuda:CudaSnapshot.barrier",
        "snapshot.cuda:CudaSnapshot._release_batch",
        "snapshot.cuda:CudaSnapshot._clone_rest",
    ),
    "receive (GPU)": ("snapshot.cuda:CudaSnapshot._receive",),
    "hash (GPU)": ("snapshot.cuda:CudaSnapshot._hash",),
    "bind": ("snapshot.snapshot:Snapshot.bind", "snapshot.native_snapshot:NativeSnapshot._post"),
    "post": ("snapshot.copy_engine:Desk.post",),
    "choose a slot": ("storage.slot_pool:SlotPool.choose",),
    "copy": (
        "snapshot.snapshot:Snapshot.work",
        "snapshot.snapshot:Snapshot._copy_and_digest",
        "snapshot.native_snapshot:NativeSnapshot._advance",
    ),
    "seal": ("snapshot.snapshot:Snapshot._seal", "storage.slots:Slot.seal"),
    "manifest": ("format.manifest:Manifest.encode",),
    "hand over": ("coordination.versions:SlotHandoff.done",),
}


class Parts:
    """CPU seconds of threads inside the wrapped functions."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        """By part and thread."""
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self.on = False
        self._inside = threading.local()
        self._names: dict[int, str] = {}
        begin = time.perf_counter()
        for _ in range(10000):
            time.thread_time()
        self._clock_seconds = (time.perf_counter() - begin) / 10000
        for part, places in PARTS.items():
            for place in places:
                self._wrap(part, place)

    def name_threads(self) -> None:
        """Find the threads; others (of gloo) have no Python name."""
        for thread in threading.enumerate():
            main = thread is threading.main_thread()
            self._names[thread.native_id or 0] = "training" if main else thread.name

    def _wrap(self, part: str, place: str) -> None:
        module, _, path = place.partition(":")
        root = "" if module.startswith("ddp_ckpt") else "tierckpt."
        owner: Any = importlib.import_module(f"{root}{module}")
        *within, name = path.split(".")
        for each in within:
            owner = getattr(owner, each, None)
        if owner is not None and hasattr(owner, name):
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        inside, names = self._inside, self._names

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            before = getattr(inside, "within", 0.0)
            inside.within = 0.0
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                all_seconds = time.thread_time() - begin
                key = part, names.get(threading.get_native_id(), "")
                self.seconds[key] += all_seconds - inside.within - self._clock_seconds
                self.calls[key] += 1
                inside.within = before + all_seconds + self._clock_seconds

        return timed


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (cnn, (64, 1, 8, 8)),
    "mlp": (mlp, (64, 256)),
    "deep": (deep, (64, 64)),
    "wide": (lambda: mlp(3, 2048), (256, 2048)),
    "huge": (lambda: mlp(24, 2048), (1024, 2048)),
}


class Rank:
    """One rank: a plain model, and its twin with a checkpointer."""

    def __init__(self, name: str, folder: str, off: bool, device: str) -> None:
        torch.set_num_threads(1)
        self.on_gpu = device == "cuda"
        make, shape = MODELS[name]
        torch.manual_seed(0)
        self.x = torch.randn(shape).to(device)
        self.y = torch.randint(0, 10, shape[:1]).to(device)
        models = [DistributedDataParallel(make().to(device)) for _ in range(2)]
        self.sides = [(m, torch.optim.AdamW(m.parameters(), lr=1e-4)) for m in models]
        every = {"memory_every_steps": 0 if off else 1, "local_every_seconds": 0}
        places = {"path": f"{folder}/ckpts", "shm_dir": f"{folder}/shm"}
        self.parts = Parts()
        self.ckpt = ddp_ckpt.Checkpointer(*self.sides[1], **places, **every)
        self.ckpt.restore()

    def block(self, steps: int, ours: bool) -> Counter[str]:
        """Train; return the CPU seconds per step by the name of the thread."""
        model, optimizer = self.sides[ours]
        dist.barrier()
        before = threads_seconds()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(self.x), self.y).backward()
            optimizer.step()
            if ours:
                self.ckpt.step()
            if self.on_gpu:
                torch.cuda.synchronize()
        found = threads_seconds()
        dist.barrier()
        return Counter({name: (found[name] - before[name]) / steps for name in found})


def threads_seconds() -> Counter[str]:
    """CPU seconds of this process's threads; those with one name together."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        name = "training" if int(task.name) == os.getpid() else (task / "comm").read_text().strip()
        found[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def measure(rank: int, options: argparse.Namespace, rounds: int, steps: int, at: str) -> None:
    """Run one rank; rank 0 prints the table."""
    logging.basicConfig()
    # NCCL refuses ranks that share a GPU.
    backend = "nccl" if options.device == "cuda" and options.ranks == 1 else "gloo"
    meeting = f"file://{at}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=options.ranks)
    one = Rank(options.model, at, options.off, options.device)
    one.block(24, False)
    one.block(24, True)
    more: list[Counter[str]] = []
    for turn in range(rounds):
        found = {}
        for ours in (turn % 2 == 0, turn % 2 == 1):
            found[ours] = one.block(steps, ours)
        more.append(Counter(found[True]))
        more[-1].subtract(found[False])
    one.parts.name_threads()
    one.parts.on = True
    for _ in range(rounds):
        one.block(steps, True)
        one.block(steps // 2, False)
    one.parts.on = False
    if rank == 0:
        show(one.parts, rounds * steps)
        names = {name for each in more for name in each}
        by_thread = {name: 1e3 * median(each[name] for each in more) for name in names}
        by_thread["all"] = 1e3 * median(each.total() for each in more)
        text = ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(by_thread.items()))
        print(f"more than the plain twin: {text}", flush=True)
    one.ckpt.close()
    dist.barrier()
    dist.destroy_process_group()


def show(parts: Parts, versions: int) -> None:
    """Print CPU milliseconds of each part by thread."""
    totals: dict[str, float] = defaultdict(float)
    print(f"{'part':<25}{'thread':<16}{'calls':>7}{'ms':>9}")
    for (part, thread), seconds in sorted(parts.seconds.items(), key=lambda each: -each[1]):
        totals[thread] += seconds
        calls = parts.calls[part, thread] / versions
        print(f"{part:<25}{thread:<16}{calls:>7.2f}{1e3 * seconds / versions:>9.4f}")
    shown = ", ".join(f"{thread} {1e3 * s / versions:.3f}" for thread, s in sorted(totals.items()))
    print(f"all parts: {shown}", flush=True)


def main() -> None:
    parser = parser_of(__doc__, results="")
    parser.add_argument("--model", default="cnn", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=48, help="steps of a block")
    parser.add_argument("--off", action="store_true", help="all levels are off")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    rounds, steps = (2, 8) if options.toy else (options.rounds, options.steps)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; CPU ms a step, {options.model}")
    with job_in_memory() as folder:
        args = (options, rounds, steps, folder)
        if options.ranks == 1:
            measure(0, *args)
        else:
            torch.multiprocessing.spawn(measure, args, nprocs=options.ranks)


if __name__ == "__main__":
    main()
