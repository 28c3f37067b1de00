"""The jobs with checkpoints stored as golden directories: small, and of public parts alone.

A golden directory outlives the code that wrote it, so nothing here may change the names, shapes or
kinds of a job's state. A new kind of state is a new model in `MODELS`.
"""

from __future__ import annotations

import enum
import importlib
import os
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tests.support import exact

ALONE, DDP, HOROVOD = "alone", "ddp", "horovod"
"""Ways in which a job reduces its gradients: not at all, or by the library of an adapter."""

FILES = "files"
"""In place of a model: versions of files."""
INPUTS = 4
PATIENCE_SECONDS = 60.0
OPTIONS = ("lr", "initial_lr", "momentum", "betas", "weight_decay", "eps")
"""Options of an optimizer that count; others come and go with torch."""


@dataclass
class Objects:
    """What a training script makes before it attaches."""

    model: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    extra: dict[str, Any] = field(default_factory=dict)
    extra_per_rank: dict[str, Any] = field(default_factory=dict)


def plain() -> Objects:
    """Buffers, random numbers, Adam, a schedule, a generator: the usual."""
    model = nn.Sequential(
        nn.Linear(INPUTS, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 2)
    )
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 3, gamma=0.5)
    return Objects(model, {"": adam}, {"schedule": schedule}, {"shuffle": np.random.default_rng(1)})


def exactly() -> Objects:
    """All numbers are multiples of small powers of two, and no sum is rounded: every machine makes
    the same steps, so the steps of a journal can be repeated on it."""
    model = nn.Linear(INPUTS, 2)
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_((torch.arange(param.numel()) - 3.0 - number).view_as(param))
    return Objects(model, {"": torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)})


class Color(enum.Enum):
    """A value that a tree names by its class."""

    RED = "red"


class Point(NamedTuple):
    """Another one."""

    x: int
    y: float


class Tree:
    """An object with all kinds of values that FORMAT.md knows."""

    def __init__(self, seed: int) -> None:
        self.value: Any = seed

    def grow(self) -> None:
        """Values that no restart finds by chance."""
        self.value = {
            "tensor": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
            "item": (torch.tensor(7), 8, -9.5, 1 << 80, True, None),
            "text": 'quote " and \u00e9',
            "floats": [float("nan"), float("inf"), -0.0, 0.1],
            "complex": complex(1.5, float("-inf")),
            "sets": [{3}, frozenset({"f"}), torch.Size([2, 3])],
            "deque": deque([1, 2], maxlen=5),
            "dicts": [{1: "one", (2, 3): "pair"}, OrderedDict(b=1, a=2), Counter("aab")],
            "default": defaultdict(list, {"k": [1]}),
            "bytes": [b"ab", bytearray(b"\0\xff"), bytes(range(256)) * 8],
            "names": [torch.bfloat16, torch.device("cpu")],
            "classes": [Color.RED, Point(1, 2.5)],
            "numpy": [np.arange(5, dtype=">i4"), np.float32(0.1), np.zeros((0, 3))],
        }

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Counted(nn.Module):
    """A module with a state of its own beside tensors, and an option that training changes."""

    __constants__ = ("slope",)

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.slope = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.slope = 0.25 * self.calls
        return x

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Kinds(nn.Module):
    """Parameters and buffers of many types and layouts, tied and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        new = torch.arange(12.0).view(3, 4)
        self.single = nn.Parameter(new / 8)
        self.double_ = nn.Parameter(new.double() / 3)
        self.half_ = nn.Parameter((new / 16).half())
        self.brain = nn.Parameter((new / 16).bfloat16())
        self.turned = nn.Parameter(new.clone().t())
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(new + 1, requires_grad=False)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.single
        self.counted = Counted()
        self.register_buffer("whole", torch.arange(5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("phase", torch.tensor([1 + 2j, -1j]))
        self.register_buffer("small", torch.arange(4.0).to(torch.float8_e4m3fn))
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.whole.add_(2)  # type: ignore[operator]
        self.mask.logical_not_()  # type: ignore[operator]
        self.phase.mul_(1j)  # type: ignore[operator]
        weights = self.single + self.double_ + self.half_ + self.brain + self.turned.t()
        return self.counted(self.tied(x) @ weights.to(x.dtype) * self.scalar) + self.empty.sum()


def kinds() -> Objects:
    """Many kinds of tensors and values, two optimizers, groups."""
    model = Kinds()
    first = torch.optim.AdamW(
        [
            {"params": [model.single, model.turned, model.empty], "lr": 0.5},
            {"params": [model.scalar], "weight_decay": 0.0},
        ],
        lr=0.01,
        amsgrad=True,
    )
    second = torch.optim.SGD([model.double_, model.half_, model.brain], lr=0.125, momentum=0.5)
    generator = torch.Generator().manual_seed(3)
    loop = tierckpt.LoopState(best=0.5, names=["a"])
    extra = {"tree": Tree(0), "generator": generator, "loop": loop}
    return Objects(model, {"first": first, "second": second}, extra, {"own": Tree(1)})


def lbfgs() -> Objects:
    """An optimizer with a closure, and lists of tensors in its state."""
    model = nn.Linear(INPUTS, 2)
    return Objects(model, {"": torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)})


def data() -> Objects:
    """A place in the data."""
    found = plain()
    numbers = torch.utils.data.TensorDataset(torch.arange(24.0).view(24, 1))
    loader = torch.utils.data.DataLoader(numbers, batch_size=2, shuffle=True)
    found.extra_per_rank["data"] = tierckpt.ResumableLoader(loader)
    return found


class Wide(nn.Module):
    """Several blocks of a shard: some never change, some in a few places only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter((torch.arange(300_000) % 64) / 64.0, requires_grad=False)
        self.weight = nn.Parameter((torch.arange(150_000) % 97) / 64.0)
        self.last = nn.Linear(INPUTS, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x) + self.weight[:200].sum() * self.table[1]


def wide() -> Objects:
    """For increments and differences."""
    model = Wide()
    return Objects(model, {"": torch.optim.SGD(model.parameters(), lr=0.125)})


MODELS: dict[str, Callable[[], Objects]] = {
    made.__name__: made for made in (plain, exactly, kinds, lbfgs, data, wide)
}


def rank_and_size(adapter: str) -> tuple[int, int]:
    if adapter == DDP and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if adapter == HOROVOD:
        hvd = importlib.import_module("horovod.torch")
        return int(hvd.rank()), int(hvd.size())
    return 0, 1


class Job:
    """A training with a Checkpointer.

    Args:
        model: a name in `MODELS`.
        adapter: ALONE, DDP or HOROVOD.
        seed: of everything random. A restart takes another one, so that nothing is right by chance.
        settings: of the Checkpointer.
    """

    def __init__(self, model: str, adapter: str, seed: int, settings: Mapping[str, Any]) -> None:
        self.rank, self.size = rank_and_size(adapter)
        torch.manual_seed(seed)
        self.objects = MODELS[model]()
        self.bare = self.objects.model
        # The same streams on all ranks, at different places: archives stay small.
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self._draw(self.rank)
        self.optimizers = list(self.objects.optimizers.values())
        self._model: nn.Module = self.bare
        if adapter == DDP and dist.is_initialized():
            self._model = DistributedDataParallel(self.bare, broadcast_buffers=False)
        if adapter == HOROVOD:
            hvd = importlib.import_module("horovod.torch")
            named = list(self.bare.named_parameters())
            self.optimizers = [hvd.DistributedOptimizer(o, named) for o in self.optimizers]
            labels = self.objects.optimizers
            self.objects.optimizers = dict(zip(labels, self.optimizers, strict=True))
        self.events: list[tierckpt.Event] = []
        self.iteration = 0
        self.routed: dict[str, bytes] = {}
        """Content of the files of this rank."""
        self._batches: Iterator[Any] | None = None
        made = {ALONE: "tierckpt", DDP: "ddp_ckpt", HOROVOD: "horovod_ckpt"}[adapter]
        several = self.objects.optimizers.keys() != {""}
        self.ckpt: tierckpt.Checkpointer = importlib.import_module(made).Checkpointer(
            self._model,
            self.objects.optimizers if several else self.optimizers[0],
            extra=self.objects.extra,
            extra_per_rank=self.objects.extra_per_rank,
            on_event=self.events.append,
            **settings,
        )

    def _draw(self, numbers: int) -> None:
        for _ in range(numbers):
            random.random()
            np.random.rand()
            torch.rand(1)

    def iterate(self) -> None:
        """One iteration up to, not including, the boundary."""
        self._draw(1)
        if (shuffle := self.objects.extra_per_rank.get("shuffle")) is not None:
            shuffle.random(1 + self.rank)
        rows = 2 * self.size
        numbers = torch.arange(rows * INPUTS).view(rows, INPUTS)
        batch = (numbers * (3 + self.iteration) + self.rank) % 5 - 2.0

        def loss() -> torch.Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            found = self._model(batch).sum()
            if isinstance(self.optimizers[0], torch.optim.LBFGS):
                found = found.square()
            found.backward()
            return found  # type: ignore[no-any-return]

        if isinstance(self.optimizers[0], torch.optim.LBFGS):
            self.optimizers[0].step(loss)
        else:
            loss()
            for optimizer in self.optimizers:
                optimizer.step()
        for each in (*self.objects.extra.values(), *self.objects.extra_per_rank.values()):
            if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
                each.step()
            elif isinstance(each, Tree):
                each.grow()
            elif isinstance(each, torch.Generator):
                torch.rand(1, generator=each)
            elif isinstance(each, tierckpt.LoopState):
                each.best = each.best / 2
            elif isinstance(each, tierckpt.ResumableLoader):
                self._batches = self._batches or iter(each)
                next(self._batches)
        self.iteration += 1

    def write_files(self, contents: Mapping[str, str]) -> None:
        """Route files, which differ by rank."""
        with self.ckpt.files() as files:
            for name, text in contents.items():
                self.routed[name] = f"{text} of rank {self.rank}".encode()
                Path(files.route(name)).write_bytes(self.routed[name])

    def image(self) -> dict[str, str]:
        """Digests of all that a restart has to bring back, by name."""
        found: dict[str, Any] = {**exact.parameters(self.bare), **exact.buffers(self.bare)}
        for label, optimizer in self.objects.optimizers.items():
            for name, value in exact.optimizer(optimizer, f"optimizer {label}".strip()).items():
                kept = name.endswith(" options") and {k: value[k] for k in OPTIONS if k in value}
                found[name] = kept or value
        found |= {f"stream {name}": value for name, value in exact.streams().items()}
        for name, module in self.bare.named_modules():
            if isinstance(module, Counted):
                found[f"module {name}"] = (module.calls, module.slope)
        for name, path in self.ckpt.restored_files.items():
            self.routed[name] = Path(path).read_bytes()
        for name, content in self.routed.items():
            found[f"file {name}"] = content
        for name, each in {**self.objects.extra, **self.objects.extra_per_rank}.items():
            found[f"extra {name}"] = exact.image(state_of(each))
        return {name: exact.digest(value) for name, value in found.items()}

    def reached(self, level: str, version: int) -> None:
        """Return when the version is on that level, as far as this rank is told."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (level, version) not in self.committed():
            assert time.monotonic() < deadline, [e.text() for e in self.events]
            self.ckpt.wait(0.05)
            time.sleep(0.05)

    def committed(self) -> set[tuple[str | None, int | None]]:
        """Levels and versions that are complete, as far as this rank is told."""
        return {(e.level, e.version) for e in self.events if e.name == "committed"}


def state_of(each: Any) -> Any:
    if isinstance(each, np.random.Generator):
        return each.bit_generator.state
    if isinstance(each, torch.Generator):
        return each.get_state()
    return each.state_dict()


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
