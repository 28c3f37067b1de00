"""Small data-parallel jobs for scenarios. Their results depend only on seed, rank and iteration,
and, by dropout, on the random streams that a checkpoint has to restore.

They use DDP or Horovod, like the ranks. Only ranks of a launcher import Horovod, and only they call
`horovod()`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tests.support import exact
from tierckpt.snapshot import snapshot
from tierckpt.state import unwrap

WIDTH = 24
ROWS = 6
PATIENCE_SECONDS = 60.0


class Net(nn.Module):
    """Enough layers for many buckets, dropout, and (if wanted) normalizations and a side branch."""

    def __init__(
        self,
        norm: Callable[[int], nn.Module] | None = None,
        branch: bool = False,
        layers: int = 4,
    ) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        for _ in range(layers):
            steps += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)]
            steps += [norm(WIDTH)] if norm else []
        self.body = nn.Sequential(*steps)
        self.branch = nn.Linear(WIDTH, WIDTH) if branch else None
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        x = self.body(x)
        if self.branch is not None and use_branch:
            x = x + self.branch(x)
        return self.head(x)


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        return self.table((9 * x.abs()).long() % 50)


class Sentences(Net):
    """Layers with sparse gradients, followed by layers with dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        return super().forward(self.table((9 * x.abs()).long() % 50).mean(1))


def horovod() -> Any:
    """The module `horovod.torch`."""
    return importlib.import_module("horovod.torch")


def init_again(place: Place, rank: int) -> None:
    """Call `hvd.init()` after the shutdown has ended on both ranks: before, one rank would look for
    the other at its old address."""
    folder = Path(place.path).parent
    (folder / f"down{rank}").touch()
    while len(list(folder.glob("down*"))) < 2:
        time.sleep(0.005)
    horovod().init()


def import_adapter() -> Any:
    """The module `horovod_ckpt`, in ranks; the test process does not import it."""
    return importlib.import_module("horovod_ckpt")


def under_horovod() -> bool:
    """True in the ranks of a launcher."""
    return "horovod.torch" in sys.modules and bool(horovod().is_initialized())


@contextmanager
def rank_0_first() -> Iterator[None]:
    """The other ranks of a Horovod job enter the block after rank 0 has left it."""
    if rank() > 0:
        horovod().barrier()
    yield
    if rank() == 0:
        horovod().barrier()


def rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    return int(horovod().rank()) if under_horovod() else 0


def batch(iteration: int, part: int = 0) -> torch.Tensor:
    """This rank's data, which differ from those of all other ranks."""
    source = torch.Generator().manual_seed(10_000 * rank() + 100 * part + iteration)
    return torch.randn(ROWS, WIDTH, generator=source)


@dataclass
class Job:
    """Objects of a training script."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    dtype: torch.dtype = torch.float32
    adapter: str = "ddp_ckpt"
    keeps_gradients: bool = False
    """True: gradients stay allocated between iterations, and are set to zero."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    @property
    def bare(self) -> nn.Module:
        return unwrap(self.model)

    def loss(self, iteration: int, part: int = 0) -> torch.Tensor:
        # The branch is used by some ranks only, by turns.
        uses_branch = (iteration + rank()) % 2 == 0
        return self.model(batch(iteration, part).to(self.dtype), uses_branch).square().mean()

    def iterate(self, iteration: int) -> str:
        """Run one iteration; returns the digest of its gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        self.loss(iteration).backward()
        gradients = exact.digest(exact.gradients(self.bare))
        for optimizer in self.optimizers:
            optimizer.step()
        return gradients

    def image(self) -> dict[str, Any]:
        return {**self.replicated(), **exact.buffers(self.bare), **exact.streams()}

    def replicated(self) -> dict[str, Any]:
        return exact.replicated(self.bare, *self.optimizers)

    def digest(self) -> str:
        return exact.digest(self.image())


def make_job(
    net: Callable[[], nn.Module] = Net,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    keeps_gradients: bool = False,
    **ddp: Any,
) -> Job:
    """A job on the process group of this process, if there is one."""
    torch.manual_seed(seed)
    model = net().to(dtype)
    wrapped = DistributedDataParallel(model, **ddp) if dist.is_initialized() else model
    torch.manual_seed(1000 * seed + rank())  # dropout differs by rank
    optimizers = [optimizer(model.parameters(), lr=0.01)]
    return Job(wrapped, optimizers, dtype, keeps_gradients=keeps_gradients)


@dataclass
class HorovodJob(Job):
    """The same job with Horovod."""

    adapter: str = "horovod_ckpt"
    passes: int = 1
    """Backward passes for a step."""
    steps: int = 0
    """Backward passes of the training, counted by its loop."""
    phase: str = ""
    """`backward` or `step` during that phase."""
    extra: dict[str, Any] = field(default_factory=dict)

    def iterate(self, iteration: int) -> str:
        """Run one iteration, as above; but gradients are reduced only after the step."""
        self.zero_grad()
        self.backward(iteration)
        self.step()
        return self.gradients()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, iteration: int) -> None:
        for part in range(self.passes):
            loss = self.loss(iteration, part)
            with self.in_phase("backward"):
                loss.backward()

    def step(self) -> None:
        with self.in_phase("step"):
            for optimizer in self.optimizers:
                optimizer.step()
        self.steps += 1

    @contextmanager
    def in_phase(self, phase: str) -> Any:
        self.phase = phase
        yield
        self.phase = ""

    def gradients(self) -> str:
        return exact.digest(exact.gradients(self.bare))


Named = list[tuple[str, nn.Parameter]]


def plain_options(hvd: Any, model: nn.Module) -> dict[str, Any]:
    return {}


def in_one(model: nn.Module) -> list[Named]:
    return [list(model.named_parameters())]


def make_horovod_job(
    net: Callable[[], nn.Module] = Net,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    options: Callable[[Any, nn.Module], dict[str, Any]] = plain_options,
    parts: Callable[[nn.Module], list[Named]] = in_one,
    passes: int = 1,
    seed: int = 1,
) -> HorovodJob:
    """A job on the ranks of a launcher.

    Args:
        net: makes the model.
        optimizer: makes an optimizer; its attribute `extra`, if any, is the job's, too.
        options: those of `hvd.DistributedOptimizer`.
        parts: the parameters of each optimizer.
        passes: backward passes for a step.
        seed: of everything random.
    """
    hvd = horovod()
    torch.manual_seed(seed)
    model = net()
    torch.manual_seed(1000 * seed + rank())
    job = HorovodJob(model, [], passes=passes)
    for named in parts(model):
        plain = optimizer([p for _, p in named], lr=0.01)
        job.extra.update(getattr(plain, "extra", {}))
        job.optimizers.append(
            hvd.DistributedOptimizer(
                plain,
                named_parameters=named,
                backward_passes_per_step=passes,
                **options(hvd, model),
            )
        )
    return job


@dataclass
class Place:
    """Folders of a job's checkpoints."""

    path: str
    shm: str

    @staticmethod
    def under(tmp_path: Path, shm_dir: Path) -> Place:
        return Place(str(tmp_path / "ckpts"), str(shm_dir))

    def segments(self) -> list[Path]:
        """Files in the memory file system."""
        return [p for p in Path(self.shm).rglob("*") if p.is_file()]

    def shards(self) -> list[Path]:
        """Files of shards on disk."""
        return sorted(Path(self.path).glob("v*.safetensors"))


Events = list[tierckpt.Event]


@dataclass
class Attached:
    """A checkpointer and what it reported."""

    ckpt: tierckpt.Checkpointer
    events: Events = field(default_factory=list)

    def versions(self, name: str, level: str) -> list[int]:
        return [e.version for e in self.events if (e.name, e.level) == (name, level)]

    def said(self, text: str) -> list[tierckpt.Event]:
        return [e for e in self.events if text in e.text()]

    def await_event(self, level: str, version: int, *names: str) -> None:
        """Wait until agents have reported one of these events, between two boundaries."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any(version in self.versions(name, level) for name in names):
            assert time.monotonic() < deadline, [e.text() for e in self.events]
            time.sleep(0.01)
            self.ckpt._levels.collect()


def attach(job: Job, place: Place, **settings: Any) -> Attached:
    """By default a version to memory at every step, and nothing to disk."""
    events: Events = []
    defaults: dict[str, Any] = {"local_every_steps": 0, "local_every_seconds": 0}
    several = len(job.optimizers) > 1
    ckpt: tierckpt.Checkpointer = importlib.import_module(job.adapter).Checkpointer(
        job.model,
        settings.pop("optimizer", job.optimizers if several else job.optimizer),
        path=place.path,
        shm_dir=place.shm,
        on_event=events.append,
        **{**defaults, **settings},
    )
    return Attached(ckpt, events)


@contextmanager
def only_layers_release() -> Iterator[None]:
    """Wait so long that a step of a slow machine is not taken for an evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "QUIET_SECONDS", 1e6)
        patch.setattr(snapshot, "RELEASE_AT_ONCE_BYTES", -1)
        yield


def train(job: Job, ckpt: tierckpt.Checkpointer, iterations: Iterable[int]) -> dict[int, str]:
    """Run the ordinary loop; returns digests of the state after each iteration."""
    course = {}
    for iteration in iterations:
        job.iterate(iteration)
        ckpt.step()
        course[iteration + 1] = job.digest()
    return course


def crash_after(job: Job, attached: Attached, iterations: int) -> dict[int, str]:
    """Train, and end as a crash would: in the middle of the iteration after the last boundary."""
    course = train(job, attached.ckpt, range(iterations))
    job.iterate(iterations)
    attached.ckpt.abandon()
    return course


def no_boundary() -> None:
    """Stands for a checkpointer in `course_of` without checkpoints."""


def course_of(job: Job, iterations: range, boundary: Callable[[], None]) -> dict[int, Any]:
    """Digests of every iteration's gradients, and of the state after it."""
    course = {}
    for iteration in iterations:
        gradients = job.iterate(iteration)
        boundary()
        course[iteration] = (gradients, job.digest())
    return course


def through_a_crash(
    make: Callable[[int], Job],
    place: Place,
    crash: int,
    end: int,
    attaches: Callable[..., Attached] = attach,
    **settings: Any,
) -> dict[str, Any]:
    """The course of an undisturbed job, and that of one that crashes in the iteration after `crash`
    boundaries, and is continued by new objects. `make(seed)` makes the objects of a job."""
    plain = course_of(make(1), range(end), no_boundary)
    job = make(1)
    first = attaches(job, place, **settings)
    course = course_of(job, range(crash), first.ckpt.step)
    job.iterate(crash)
    first.ckpt.abandon()
    job = make(2)
    second = attaches(job, place, **settings)
    restored = second.ckpt.restore()
    found = job.digest()
    course |= course_of(job, range(restored, end), second.ckpt.step)
    second.ckpt.close()
    events = first.events + second.events
    return {
        "plain": plain,
        "course": course,
        "restored": (int(restored), restored.levels),
        "found": found,
        "sealed": first.versions("sealed", "memory"),
        "failed": first.versions("failed", "memory"),
        "said": [e.text() for e in events],
        "complaints": [e.text() for e in events if e.severity > 20],
    }


def restored_into(job: Job, attached: Attached) -> dict[str, Any]:
    """Restore; returns the restored state and its source."""
    restored = attached.ckpt.restore()
    return {
        "restored": (restored.version, restored.levels),
        "digest": job.digest(),
        "replicated": exact.digest(job.replicated()),
        "rejected": restored.rejected,
    }


@contextmanager
def working_in(folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


sgd = partial(torch.optim.SGD, momentum=0.9)
fused_adamw = partial(torch.optim.AdamW, fused=True)
