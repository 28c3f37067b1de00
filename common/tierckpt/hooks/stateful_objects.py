"""Stateful objects: objects of the process whose classes have a state that a training may need.

They are found by class, and then by whether they belong to this training. Nothing of theirs is
called, except plain attributes of loaders and modules.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from .object_reach import attributes_read, reached, vars_of

SCHEDULES = re.compile(r"(?i:sched|anneal|plateau|warmup)|LR$|LR[A-Z]")
"""Classes of schedulers outside torch (timm's, Megatron's, a user's)."""
AVERAGES = re.compile(r"EMA|Ema(?![a-z])|MovingAverage")
"""Classes of averages outside torch."""
TRAINERS = {
    "lightning": "Trainer",
    "pytorch_lightning": "Trainer",
    "transformers": "Trainer",
    "accelerate": "Accelerator",
}
"""Classes that run a training or hold all of its objects, by package."""
OWN = ("tierckpt", "ddp_ckpt", "horovod_ckpt")


@dataclass
class Found:
    """The objects of the process, of any training."""

    schedulers: list[Any] = field(default_factory=list)
    averages: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    """Loaders that store and load their position (torchdata's)."""
    plain_loaders: list[Any] = field(default_factory=list)
    """Loaders that do not."""
    trainers: list[Any] = field(default_factory=list)
    """Objects of frameworks that run a training, now or earlier."""

    def with_persistent_workers(self) -> list[Any]:
        """Loaders with workers that go on from epoch to epoch."""
        every = (*self.loaders, *self.plain_loaders)
        return [each for each in every if getattr(each, "persistent_workers", False)]


def look() -> Found:
    """Search all objects that Python's collector tracks. Takes half the time of a collection."""
    found = Found()
    kinds: dict[type, list[Any] | None] = {}
    for each in gc.get_objects():
        kind = type(each)
        if kind not in kinds:
            kinds[kind] = _list_for(kind, found)
        if (fitting := kinds[kind]) is not None:
            fitting.append(each)
    return found


def _list_for(kind: type, found: Found) -> list[Any] | None:
    if str(kind.__module__).partition(".")[0] in OWN or issubclass(kind, torch.optim.Optimizer):
        return None
    if issubclass(kind, AveragedModel):
        return found.averages
    if not all(callable(getattr(kind, n, None)) for n in ("state_dict", "load_state_dict")):
        if issubclass(kind, DataLoader):
            return found.plain_loaders
        return found.trainers if package_of(kind) else None
    if issubclass(kind, LRScheduler):
        return found.schedulers
    if issubclass(kind, DataLoader):
        return found.loaders
    names = [each.__name__ for each in kind.__mro__]
    if any(map(AVERAGES.search, names)):
        return found.averages
    if issubclass(kind, torch.nn.Module) or hasattr(kind, "zero_grad"):
        return None
    schedules = callable(getattr(kind, "step", None)) and any(map(SCHEDULES.search, names))
    return found.schedulers if schedules else None


def package_of(kind: type) -> str:
    """The package of `TRAINERS` that the class is of, or a class that it derives from; or empty."""
    for base in kind.__mro__:
        package = str(base.__module__).partition(".")[0]
        if TRAINERS.get(package) == base.__name__:
            return package
    return ""


# --- schedulers ----------------------------------------------------------------------------------


def steps_any(scheduler: Any, optimizers: Iterable[Any]) -> bool:
    """Whether it holds one of these optimizers, or one that shares parameter groups with one of
    them, as Horovod's optimizer does with the original."""
    every = [*optimizers]
    groups = {id(group) for each in every for group in getattr(each, "param_groups", ())}
    held: list[Any] = []
    for value in vars_of(scheduler).values():
        held += value if isinstance(value, (list, tuple)) else [value]
    return any(
        any(value is each for each in every)
        or (
            isinstance(value, torch.optim.Optimizer)
            and any(id(group) in groups for group in getattr(value, "param_groups", ()))
        )
        for value in held
    )


def is_stored(scheduler: Any, stored: set[int]) -> bool:
    """Whether its `id()` is in `stored`, or all of its members are (a ChainedScheduler,
    Accelerate's)."""
    if id(scheduler) in stored:
        return True
    own = vars_of(scheduler)
    members = own.get("_schedulers", ())
    if members and not own.keys() - {"optimizer", "_schedulers", "_last_lr"}:
        return all(id(each) in stored for each in members)
    kind = type(scheduler)
    names = attributes_read(kind, getattr(kind, "state_dict", None))
    return bool(names) and all(id(own.get(name)) in stored for name in names or ())


def outermost(schedulers: list[Any]) -> list[Any]:
    """The schedulers that are not inside another one."""
    return [
        each
        for each in schedulers
        if not any(
            reached(vars_of(other).values(), [each]) for other in schedulers if other is not each
        )
    ]


# --- averages and loaders ------------------------------------------------------------------------


def averages_any(averages: Any, model: torch.nn.Module) -> bool:
    """Whether it has tensors of the shapes of the parameters (all, or the trained ones) of this
    model or of one of its children, and is not part of the model."""
    if any(each is averages for each in model.modules()):
        return False
    every = [[*each.parameters()] for each in (model, *model.children())]
    every += [[param for param in params if param.requires_grad] for params in every]
    shapes = [[param.shape for param in params] for params in every]
    held = [*vars_of(averages).values(), *vars_of(averages).get("_modules", {}).values()]
    return any(found in shapes for found in map(_shapes, held) if found)


SHOWN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def copies_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules outside the model with its class and shapes, whose parameters no optimizer steps:
    averages that a loop makes by itself, targets, references."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    mine, shapes = {id(each) for each in model.modules()}, _shapes(inner)
    every = gc.get_objects()
    alike = [e for e in every if type(e) is type(inner) and id(e) not in mine]
    alike = [each for each in alike if shapes and _shapes(each) == shapes]
    optimizers = [e for e in every if alike and issubclass(type(e), torch.optim.Optimizer)]
    groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
    stepped = {id(param) for group in groups for param in group["params"]}
    return [e for e in alike if not any(id(param) in stepped for param in e.parameters())]


def sample_of(module: torch.nn.Module) -> list[Any]:
    """A few values of its first parameters."""
    return [first_values(each) for each in [*module.parameters()][:8]]


def first_values(tensor: torch.Tensor) -> list[Any]:
    """A few values, to compare; none of a type that Python has no numbers for."""
    return tensor.detach().flatten()[:4].tolist() if tensor.dtype in SHOWN else []


def _shapes(value: Any) -> list[torch.Size]:
    if isinstance(value, torch.nn.Module):
        return [param.shape for param in value.parameters()]
    members = [*value.values()] if isinstance(value, dict) else value
    if not isinstance(members, (list, tuple)):
        return []
    tensors = [each for each in members if isinstance(each, torch.Tensor)]
    return [each.shape for each in tensors] if len(tensors) == len(members) else []


def trained_on(loaders: Iterable[Any]) -> Iterator[Any]:
    """The loader in the middle of a pass, the furthest one, if there is any."""
    amid = [
        each
        for each in loaders
        if (begun := getattr(each, "_iterator", None)) is not None
        and not getattr(begun, "_finished", True)
    ]
    if amid:
        yield max(amid, key=lambda each: getattr(each._iterator, "_num_yielded", 0))


def draws_seeds_again(loader: Any) -> bool:
    """Whether a loader with a position of its own, which makes an iterator in the middle of a
    pass, draws from a generator that the training or its shuffle uses as well."""
    generator = getattr(loader, "generator", None)
    shuffles_with_it = generator is getattr(loader.sampler, "generator", None)
    return generator is None or (shuffles_with_it and not loader.num_workers)


__all__ = [
    "Found",
    "averages_any",
    "copies_of",
    "draws_seeds_again",
    "first_values",
    "is_stored",
    "look",
    "outermost",
    "package_of",
    "sample_of",
    "steps_any",
    "trained_on",
]
