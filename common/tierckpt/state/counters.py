"""Find values that change with the steps, in attributes that no checkpoint stores.

A counter of an optimizer, a running mean in a plain attribute of a module, a generator of an object
in `extra`: what `state_dict()` does not return, `torch.save` would lose as well, and a resumed run
starts with its first value again. Such values are found by comparing a few boundaries.
"""

from __future__ import annotations

import logging
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch.utils.data import DataLoader

from tierckpt._text import some

from .extras import ExtraStates, generator_state, is_generator
from .module_attributes import is_restored
from .names import named_modules
from .optimizers import Foreign, class_name
from .training_state import TrainingState

LOOKS = 3
"""Boundaries with steps at which values are compared."""
# Set by torch's schedulers and profilers, and by torchmetrics.
NOT_THEIRS = ("_step_count", "_opt_called", "_update_count")
LIBRARIES = ("torch", "numpy", "tierckpt", "ddp_ckpt", "horovod_ckpt", "horovod", "torchdata")
"""Their classes are known, or know what they store."""
CLOCK_SECONDS = 3600.0
"""A number this near to a clock is a time."""
ARRAY_BYTES = 2**20
"""Limit of a compared array."""
MAX_NUMBERS = 256
"""The same of a container."""

OF_OPTIMIZER = (
    "Let state_dict() and load_state_dict() of the class, or hooks, save it (see docs/models.md)"
)
OF_MODULE = (
    "Make it a buffer, or return it from get_extra_state() and set it in set_extra_state(); ignore "
    "this if every step sets it before reading it"
)
OF_METRIC = (
    "Call persistent(True) of the metric; ignore this if a resumed run may start its mean again"
)
OF_EXTRA = (
    "Let its state_dict() and load_state_dict() save it; ignore this if every step sets it before "
    "reading it"
)


class _Owner(Struct):
    """An object with attributes."""

    title: str
    kind: str
    cure: str
    attributes: dict[str, Any]
    saved: Callable[[], Any]
    """What a version has of it."""
    numbers_alone: bool = False
    known: Callable[[str], bool] = NOT_THEIRS.__contains__
    """Whether a version has the attribute of this name."""
    seen: list[dict[str, Any]] = field(default_factory=list)


class Counters:
    """Compares the values at the first boundaries. Training thread."""

    def __init__(self, state: TrainingState, say: Callable[[str, int], None]) -> None:
        self._state, self._say = state, say
        self._owners: list[_Owner] = []
        self._looks = 0
        self.done = False
        """Enough boundaries were compared."""

    def boundary(self) -> None:
        """Look at the values; to be called at boundaries after steps."""
        if self.done:
            return
        self._looks += 1
        self.done = self._looks >= LOOKS
        self._owners = self._owners or [
            *self._of_optimizers(),
            *self._of_modules(),
            *self._of_extra(),
        ]
        for owner in self._owners:
            owner.seen.append(_marks(owner))
        if self._looks < LOOKS:
            return
        for owner in self._owners:
            names = [name for name in owner.seen[-1] if _continues(owner, name)]
            if names:
                self._warn(owner, names)
        self._owners = []

    def _warn(self, owner: _Owner, names: list[str]) -> None:
        saved = [*_parts(owner.saved())]
        shown = []
        for name in names:
            values, now = [seen[name] for seen in owner.seen], owner.attributes.get(name)
            if any(_is_saved(name, now, each) for each in saved):
                continue
            numbers = [str(value) for value in values if type(value) in (int, float)]
            shown.append(f"{owner.kind}.{name}" + (f" ({', '.join(numbers)})" if numbers else ""))
        if not shown:
            return
        what = shown[0].partition(" (")
        text = f"{what[0]} changes with the steps{what[1]}{what[2]} and is"
        if shown[1:]:
            text = f"{some(shown)} change with the steps and are"
        self._say(
            f"{owner.title}: {text} not in its state_dict(): a resumed run starts with the first "
            f"value again. {owner.cure}",
            logging.WARNING,
        )

    def _of_optimizers(self) -> Iterator[_Owner]:
        for label, each in self._state.optimizers.items():
            held = vars(each.outside if isinstance(each, Foreign) else each)
            saved = partial(self._remainder_of, label)
            title = f"optimizer {label!r}"
            yield _Owner(title, class_name(each), OF_OPTIMIZER, held, saved, numbers_alone=True)

    def _remainder_of(self, label: str) -> Any:
        return self._state.optimizer_tree.remainders().get(label)

    def _of_modules(self) -> Iterator[_Owner]:
        for name, module in named_modules(self._state.model):
            if _is_of_library(module):
                continue
            title = f"module {name!r}" if name else "the model"
            cure = OF_METRIC if is_metric(module) else OF_MODULE
            known = partial(is_restored, type(module))
            saved = partial(self._saved_of, module)
            yield _Owner(title, type(module).__name__, cure, vars(module), saved, known=known)

    def _saved_of(self, module: torch.nn.Module) -> Any:
        """Its `state_dict()`, and what objects in `extra` have of modules."""
        objects = (*self._state.extra.values(), *self._state.extra_per_rank.values())
        asked = [o for o in objects if hasattr(o, "state_dict") and not isinstance(o, DataLoader)]
        parts = [each for o in asked for _, each in _parts(o.state_dict())]
        return [module.state_dict(), [each for each in parts if isinstance(each, torch.Tensor)]]

    def _of_extra(self) -> Iterator[_Owner]:
        for which in ("extra", "extra_per_rank"):
            for name, each in getattr(self._state, which).items():
                held = getattr(each, "__dict__", None)
                is_other = isinstance(each, ExtraStates) or is_generator(each)
                if is_other or _is_of_library(each) or held is None:
                    continue
                cure = OF_METRIC if is_metric(each) else OF_EXTRA
                yield _Owner(f"{which}[{name!r}]", type(each).__name__, cure, held, each.state_dict)


def is_metric(each: Any) -> bool:
    """Whether it is a metric of torchmetrics, or a collection of them."""
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(each).__mro__)


def _is_of_library(each: Any) -> bool:
    return str(type(each).__module__).partition(".")[0] in LIBRARIES


def _marks(owner: _Owner) -> dict[str, Any]:
    """By attribute, something that differs when the value does."""
    found = {}
    for name, value in owner.attributes.items():
        if name in NOT_THEIRS or owner.known(name):
            continue
        if owner.cure is OF_METRIC and name not in owner.attributes.get("_defaults", ()):
            continue  # made of its state
        if type(value) in (int, float):
            found[name] = value
        elif not owner.numbers_alone and (mark := _mark_of(value)) is not None:
            found[name] = mark
    return found


def _mark_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # What autograd has made belongs to one step.
        return None if value.requires_grad else (_Ref(value), value._version)
    if isinstance(value, np.ndarray) and value.nbytes <= ARRAY_BYTES:
        return value.tobytes() if value.dtype != object else None
    return _state_of(value) or _numbers_of(value)


def _numbers_of(value: Any) -> tuple[int, Any] | None:
    """Size and content of a container of numbers: a moving window, or means by name. One that grows
    is a record; see `_continues`."""
    if not isinstance(value, (list, deque, dict)) or not 0 < len(value) <= MAX_NUMBERS:
        return None
    held = [*(value.values() if isinstance(value, dict) else value)]
    if any(type(each) not in (int, float) for each in held):
        return None
    size = value.maxlen if isinstance(value, deque) else None
    return (size or len(value), held)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return repr(generator_state(generator))
    return generator.getstate() if isinstance(generator, random.Random) else None


class _Ref:
    """Equal for one object, also if its address is used again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ref) and other._ref is self._ref

    __hash__ = None  # type: ignore[assignment]


def _continues(owner: _Owner, name: str) -> bool:
    values = [seen.get(name) for seen in owner.seen]
    if any(one == other for one, other in pairwise(values)) or None in values:
        return False
    if isinstance(owner.attributes.get(name), (list, deque, dict)):
        return len({each[0] if isinstance(each, tuple) else each for each in values}) == 1
    return owner.numbers_alone or not all(map(_is_time, values))


def _is_time(value: Any) -> bool:
    clocks = time.time(), time.monotonic(), time.perf_counter()
    return type(value) is float and any(abs(value - now) < CLOCK_SECONDS for now in clocks)


def _parts(value: Any, name: Any = "") -> Iterator[tuple[Any, Any]]:
    """All values in a `state_dict()`, with their keys."""
    yield name, value
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _parts(each, key)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _parts(each)


def _is_saved(name: str, value: Any, part: tuple[Any, Any]) -> bool:
    key, each = part
    if type(value) in (int, float):
        each = each.item() if isinstance(each, torch.Tensor) and each.numel() == 1 else each
        return type(each) in (int, float) and bool(value == each)
    if key == name or each is value:
        return True
    if isinstance(value, torch.Generator):
        return isinstance(each, torch.Tensor) and torch.equal(value.get_state(), each)
    if isinstance(value, np.random.Generator):
        return repr(each) == repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return bool(each == value.getstate()) if isinstance(each, tuple) else False
    if isinstance(value, torch.Tensor) and isinstance(each, torch.Tensor):
        return value.shape == each.shape and torch.equal(value.cpu(), each.cpu())
    if isinstance(value, np.ndarray) and isinstance(each, np.ndarray):
        return np.array_equal(value, each)
    mine, theirs = _numbers_of(value), _numbers_of(each)
    return mine is not None and theirs is not None and mine[1] == theirs[1]


__all__ = ["LOOKS", "Counters", "is_metric"]
