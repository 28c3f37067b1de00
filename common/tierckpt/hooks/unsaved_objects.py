"""Unsaved objects: they belong to the training, have a state, and were not given.

A scheduler's place in its schedule, a scaler's scale, averaged weights: without them a resumed run
differs, and nothing fails. torch keeps no list of them, and an optimizer does not know its
schedulers; they know it. So the process's objects are searched once, at the first boundary, when a
script has made and registered its objects; and again when an option in an optimizer's groups shows
a new scheduler. A scaler is found as the caller of the step.

*Stateful objects* are found by class, and then by whether they belong to this training. Nothing of
theirs is called, except plain attributes of loaders and modules.

*Reach* is all objects that the given ones refer to, as far as their state may come from there. A
scheduler inside another one, inside a user's class, or read by a function given as `state_dict`,
is stored by the object that refers to it. Libraries, optimizers and checkpointers refer to
everything in a process, so no reference is followed through these.
"""

from __future__ import annotations

import dis
import functools
import gc
import logging
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import compress, pairwise
from operator import is_
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from msgspec import Struct, field
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from tierckpt import _process
from tierckpt._text import error_text
from tierckpt.core.parts import Part
from tierckpt.state.extras import PlainValues, first_values
from tierckpt.state.optimizers import optimizers_inside
from tierckpt.state.training_state import TrainingState, optimizer_class

if TYPE_CHECKING:
    from tierckpt.checkpointer.loop import TrainingJob

__all__ = [
    "Found",
    "Unsaved",
    "attributes_read",
    "averages_any",
    "copies_of",
    "draws_seeds_again",
    "is_stored",
    "look",
    "name_in_script",
    "outermost",
    "package_of",
    "reached",
    "sample_of",
    "steps_any",
    "trained_on",
    "vars_of",
]


MAX_OBJECTS = 20_000
"""Limit of objects searched, the nearest first: a loader refers to its dataset."""
MAX_MEMBERS = 1_000
"""A longer container is taken as data."""
CHECKPOINTER = "tierckpt.checkpointer.checkpointer.Checkpointer"
_ENDS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, type, types.ModuleType),
    *(torch.Tensor, torch.Generator, np.ndarray, np.generic, torch.optim.Optimizer),
)


def reached(given: Iterable[Any], wanted: Iterable[Any]) -> set[int]:
    """`id()`s of the objects in `wanted` that one of `given` is or refers to. Calls none of their
    methods."""
    looked_for = {id(each) for each in wanted}
    first = [*given]
    queue = deque(value for each in first for value in _stored_by(each))
    seen = {id(each): each for each in (*first, *queue)}
    """Keeps the objects alive: a new object could get the `id()` of a deleted one."""
    while queue and len(seen) < MAX_OBJECTS and not looked_for <= seen.keys():
        for each in _next(queue.popleft()):
            if id(each) not in seen:
                seen[id(each)] = each
                queue.append(each)
    return looked_for & seen.keys()


def _stored_by(given: Any) -> Iterator[Any]:
    """The objects that its `state_dict()` may read, as far as the code shows; else all
    references."""
    if issubclass(type(given), _ENDS):
        return
    function = getattr(type(given), "state_dict", None)
    names = attributes_read(type(given), function) if "state_dict" not in vars_of(given) else None
    if names is None:
        yield from _next(given)
        return
    yield function
    yield from (value for name, value in vars_of(given).items() if name in names)


def attributes_read(kind: type, function: Any) -> set[str] | None:
    """Names of the attributes of `self` that a method and its callees read. None: possibly all, as
    the method passes `self` on."""
    found: set[str] = set()
    left, seen = [function], list[Any]()
    while left:
        function = left.pop()
        if any(function is each for each in seen):
            continue
        seen.append(function)
        names = _attributes_in(function)
        if names is None or "__dict__" in names:
            return None
        found |= names
        members = (getattr(kind, name, None) for name in names)
        left += (m.fget if isinstance(m, property) else m for m in members if _is_code(m))
    return found


def _is_code(member: Any) -> bool:
    return isinstance(member, (types.FunctionType, property))


def _attributes_in(function: Any) -> set[str] | None:
    if not isinstance(function, types.FunctionType) or not function.__code__.co_argcount:
        return None
    code = function.__code__
    me, names = code.co_varnames[0], set[str]()
    if me in code.co_cellvars or "super" in code.co_names:
        return None
    for one, after in pairwise(dis.get_instructions(function)):
        if isinstance(one.argval, tuple) and me in one.argval:
            return None
        if one.argval != me or not one.opname.startswith("LOAD_FAST"):
            continue
        if after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.add(after.argval)
        elif after.opname != "STORE_ATTR":
            return None
    return names


def vars_of(each: Any) -> dict[str, Any]:
    """The object's attributes; empty if it has no dict."""
    found = getattr(each, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _next(each: Any) -> Iterator[Any]:
    kind = type(each)  # not `__class__`: that of a lazy proxy would create the object
    if issubclass(kind, _ENDS) or _is_checkpointer(kind):
        return
    if issubclass(kind, (list, tuple, set, frozenset, deque, dict)):
        if len(each) <= MAX_MEMBERS:
            yield from each.values() if issubclass(kind, dict) else each
    elif issubclass(kind, types.FunctionType):
        yield from _of_function(each)
    elif issubclass(kind, types.MethodType):
        yield from (each.__self__, each.__func__)
    elif issubclass(kind, functools.partial):
        yield from (each.func, *each.args, *each.keywords.values())
    elif issubclass(kind, torch.nn.Module):  # hooks refer to other code
        yield from each._modules.values()
        yield from (value for name, value in vars(each).items() if not name.startswith("_"))
    else:
        yield from _of_instance(each)


def _of_instance(each: Any) -> Iterator[Any]:
    yield from vars_of(each).values()
    for kind in type(each).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(each, name, None)
    function = getattr(type(each), "state_dict", None)
    if isinstance(function, types.FunctionType):
        yield function


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    """Objects in its closure, its defaults, and the globals that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if not f"{function.__module__}.".startswith(("torch.", "numpy.")):
        names = set(_names(function.__code__))
        yield from (function.__globals__[n] for n in names if n in function.__globals__)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_checkpointer(kind: type) -> bool:
    """A script's object may refer to the checkpointer, which refers to all wanted objects."""
    return any(f"{each.__module__}.{each.__name__}" == CHECKPOINTER for each in kind.__mro__)


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


class Found(Struct):
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
        """Loaders with workers that stay from epoch to epoch."""
        every = (*self.loaders, *self.plain_loaders)
        return [each for each in every if getattr(each, "persistent_workers", False)]


def look() -> Found:
    """Search all objects that Python's collector tracks. Takes half the time of a collection."""
    found = Found()
    lists: dict[type, list[Any] | None] = {}

    def fits(kind: type) -> bool:
        if kind not in lists:
            lists[kind] = _list_for(kind, found)
        return lists[kind] is not None

    for each in _objects_of(fits):
        if (fitting := lists[type(each)]) is not None:
            fitting.append(each)
    return found


def _objects_of(fits: Callable[[type], bool]) -> list[Any]:
    """The tracked objects of the types that fit. The collector must be paused.

    Young objects are looked at by themselves, and let go at once: a tuple that another thread is
    about to make fails there with a SystemError, if it is referred to meanwhile.
    """
    found: list[Any] = []
    for generation in range(3):
        every = gc.get_objects(generation)
        kinds = [*map(type, every)]
        wanted = {kind for kind in {*kinds} if fits(kind)}
        found += compress(every, map(wanted.__contains__, kinds))
        del every
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


def copies_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules outside the model with its class and shapes, without an optimizer: averages that a
    loop makes by itself, targets, references."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    mine = {id(each) for each in model.modules()}
    alike = [
        each for each in _objects_of(functools.partial(is_, type(inner))) if id(each) not in mine
    ]
    if not alike or not (shapes := _shapes(inner)):
        return []
    alike = [each for each in alike if _shapes(each) == shapes]
    optimizers = _objects_of(lambda kind: issubclass(kind, torch.optim.Optimizer)) if alike else []
    groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
    stepped = {id(param) for group in groups for param in group["params"]}
    return [e for e in alike if not any(id(param) in stepped for param in e.parameters())]


def sample_of(module: torch.nn.Module) -> list[Any]:
    """A few values of its first parameters."""
    return [first_values(each) for each in [*module.parameters()][:8]]


def _shapes(value: Any) -> list[torch.Size]:
    if isinstance(value, torch.nn.Module):
        whole = "_parameters" in vars_of(value)  # else half made, or half gone, on another thread
        return [param.shape for param in value.parameters()] if whole else []
    members = [*value.values()] if isinstance(value, dict) else value
    if not isinstance(members, (list, tuple)):
        return []
    tensors = [each for each in members if isinstance(each, torch.Tensor)]
    return [each.shape for each in tensors] if len(tensors) == len(members) else []


def trained_on(loaders: Iterable[Any]) -> Iterator[Any]:
    """The loader in the middle of a pass, the furthest one, if there is any."""
    under_way = [
        each
        for each in loaders
        if (iterator := getattr(each, "_iterator", None)) is not None
        and not getattr(iterator, "_finished", True)
    ]
    if under_way:
        yield max(under_way, key=lambda each: getattr(each._iterator, "_num_yielded", 0))


def draws_seeds_again(loader: Any) -> bool:
    """Whether a loader with a position of its own, which makes an iterator in the middle of a
    pass, draws from a generator that the training or its shuffle uses as well."""
    generator = getattr(loader, "generator", None)
    shuffles_with_it = generator is getattr(loader.sampler, "generator", None)
    return generator is None or (shuffles_with_it and not loader.num_workers)


MAX_FRAMES = 24
"""Limit of frames between a scaler and the optimizer's step that it calls: wrappers and hooks."""
MARKS = ("_wrapped_by_lr_sched", "_with_counter")
"""torch's schedulers set one of them on the `step` of their optimizer; the second in older
versions."""
MAX_LOOKS = 8
"""Limit of searches: some optimizers may keep changing the keys of their groups."""
COMPARED = 3
"""Boundaries at which copies of the model are compared."""
OFTEN, SELDOM = 64, 16
"""So many boundaries look for the marks of a new scheduler; then one in so many does."""
EXTRA, PER_RANK = "extra=", "extra_per_rank="

Say = Callable[[str, int], None]
_Ref = Callable[[], Any]

_earlier: list[_Ref] = []
"""Averages and loaders of trainings that this process has ended."""


class Unsaved(Part):
    """Searches for unsaved objects and reports how to give them. Training thread; not
    collective."""

    def __init__(
        self,
        state: TrainingState,
        unregistered: Callable[[], Iterable[torch.optim.Optimizer]],
        line: str,
        say: Say,
        speaks: bool,
    ) -> None:
        """`unregistered` returns optimizers that step the model's parameters and were not given.
        `line` shows how to give an object, with `{name}` and `{it}`. `say` takes text and
        severity. Only the rank that `speaks` searches, as the objects are the same on all
        ranks."""
        self._speaks = speaks
        self._state, self._unregistered, self._line, self._say = state, unregistered, line, say
        self._scalers: list[_Ref] = []
        self._looks = self._boundaries = 0
        self._marks: list[Any] = []
        self._copies: list[tuple[_Ref, list[Any]]] = []
        """Copies of the model, with samples of their values at the first boundaries."""
        self._reported: list[_Ref] = []
        self._known: list[_Ref] = []
        """Averages and loaders of this training, given or not."""
        self.texts: list[str] = []
        """The warnings so far."""
        self.schedulers = 0
        """Number of schedulers found, given or not."""

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Of every job."""
        line, say = job.adapter.extra_syntax, job.reports.notice_of_all
        return cls(job.state, lambda: job.hooks.unregistered, line, say, job.group.rank == 0)

    def end(self, remove: bool) -> None:
        """Leave the objects of this training out of the searches of later ones in the process."""
        weak = [each for each in self._known if isinstance(each, weakref.ref)]
        _earlier[:] = [*(each for each in _earlier if each() is not None), *weak]
        self._known = []

    def optimizer_called(self) -> None:
        """Look for a GradScaler that makes the step."""
        frame = sys._getframe(1)
        for _ in range(MAX_FRAMES):
            if frame.f_code.co_name == "step":
                scaler: Any = frame.f_locals.get("self")
                if issubclass(type(scaler), torch.amp.GradScaler) and scaler.is_enabled():
                    if not _has(self._scalers, scaler):
                        self._scalers.append(_ref(scaler))
                    return
            if frame.f_back is None:
                return
            frame = frame.f_back

    def boundary_begins(self, in_forward: bool) -> None:
        """Search at the first boundary, or if something shows a new object."""
        try:
            if self._is_due():
                try:
                    self._look()
                except Exception:  # of an object that another thread is about to give up
                    gc.collect()
                    self._look()
            elif self._copies:
                self._compare_copies()
        except Exception as error:  # the search reads other libraries' objects
            self._looks = MAX_LOOKS
            text = f"the search for unsaved objects failed: {error_text(error)}"
            self._say(text, logging.INFO)
        if not (self.patient or self._copies) and (
            self._looks >= MAX_LOOKS or self._boundaries > OFTEN or not self._speaks
        ):
            self.wait_for_looks("boundary_begins")

    def _is_due(self) -> bool:
        if self._looks >= MAX_LOOKS or (self._looks and not self._speaks):
            return False
        self._boundaries += 1
        if self._looks and self._boundaries > OFTEN and self._boundaries % SELDOM:
            return False
        marks = [_marks_of(each) for each in self._state.given.values()]
        if self._looks and marks == self._marks:
            return False
        self._looks, self._marks = self._looks + 1, marks
        self.sleep("optimizer_called")
        return self._speaks

    @_process.collector_paused()
    def _look(self) -> None:
        found = look()
        if by_hand := self._by_hand(found.trainers):
            self._warn(by_hand)
            self._looks = MAX_LOOKS
            return
        missing = self._missing(found)
        if self._looks == 1 and EXTRA in self._line:
            self._look_for_copies(found.averages)
        del found
        if missing:
            gc.collect()  # objects kept alive only by a cycle are not in use
        for ref, name, text in missing:
            if (each := ref()) is not None:
                self._report(each, name, text)
        if not self.schedulers:
            self._say_of_hidden()

    def _look_for_copies(self, averages: list[Any]) -> None:
        copies = copies_of(self._state.model)
        stored = reached([*self._given(), *averages], copies)
        lost = [each for each in copies if id(each) not in stored and not _has(_earlier, each)]
        self._copies = [(_ref(each), [sample_of(each)]) for each in lost]

    def _compare_copies(self) -> None:
        """Report copies that change with every step: averages of the weights."""
        for ref, samples in self._copies:
            if (each := ref()) is not None:
                samples.append(sample_of(each))
                if len(samples) == COMPARED and all(a != b for a, b in pairwise(samples)):
                    self._report(each, "averages", OF_MEAN)
        self._copies = [pair for pair in self._copies if len(pair[1]) < COMPARED and pair[0]()]

    def _given(self) -> list[Any]:
        every = (*self._state.extra.values(), *self._state.extra_per_rank.values())
        return [each for each in every if not isinstance(each, PlainValues)]

    def _by_hand(self, trainers: list[Any]) -> str:
        """A warning if a framework runs this training, and no integration was used; or empty."""
        if not trainers or reached(self._given(), trainers):
            return ""
        frame: Any = sys._getframe(2)  # a look at `_look`'s own would keep all that it has found
        running = set()
        while frame is not None:
            running.add(id(frame.f_locals.get("self")))
            frame = frame.f_back
        stepped = [*self._ours()]
        for each in trainers:
            held = [getattr(it, "optimizer", it) for it in vars_of(each).get("_optimizers", ())]
            if id(each) in running or any(it is mine for it in held for mine in stepped):
                package = package_of(type(each))
                name = TRAINERS[package]
                return BY_HAND.format(package=package, name=name, line=LINES[package])
        return ""

    def _missing(self, found: Found) -> list[tuple[_Ref, str, str]]:
        """Objects that were not given: a reference, a name, and a description of each."""
        ours = [*self._ours()]
        schedulers = [each for each in found.schedulers if steps_any(each, ours)]
        self.schedulers = len(schedulers)
        averages = [e for e in found.averages if averages_any(e, self._state.model)]
        scalers = [each for ref in self._scalers if (each := ref()) is not None]
        loaders = found.loaders if EXTRA in self._line else []
        seeded = [each for each in loaders if any(each is it for it in self._given())]
        seeded = [*filter(draws_seeds_again, seeded)]
        stored = reached(self._given(), [*schedulers, *scalers, *averages, *loaders])
        if any(id(each) in stored for each in loaders):  # the others are an evaluation's
            loaders = []
        lost = [each for each in schedulers if not is_stored(each, stored)]
        missing = [(_ref(each), "scheduler", self._of_scheduler(each)) for each in outermost(lost)]
        for name, text, every in (
            ("scaler", OF_SCALER, scalers),
            ("averages", OF_MEAN, averages),
            ("data", OF_LOADER, trained_on(loaders)),
        ):
            missing += [(_ref(each), name, text) for each in every if id(each) not in stored]
        lasting = found.with_persistent_workers()[:1]
        missing += [(_ref(each), "loader", PERSISTENT) for each in lasting]
        missing += [(_ref(each), "loader", SEEDS) for each in seeded[:1]]
        self._known = [*map(_ref, (*averages, *loaders, *lasting))]
        missing = [each for each in missing if not _has((*self._reported, *_earlier), each[0]())]
        others = self._of_others(found.trainers, [ref() for ref, *_ in missing])
        return [each for each in missing if id(each[0]()) not in others]

    def _of_others(self, trainers: list[Any], objects: list[Any]) -> set[int]:
        """`id()`s of the objects that only other Trainers than this training's refer to."""
        mine = reached(self._given(), trainers) if objects else ()
        if not mine:  # no Trainer's training, or one that the checkpointer does not know
            return set()
        ours = reached([each for each in trainers if id(each) in mine], objects)
        return reached([each for each in trainers if id(each) not in mine], objects) - ours

    def _ours(self) -> Iterator[Any]:
        """Optimizers that change the model."""
        for each in (*self._state.given.values(), *self._unregistered()):
            yield each
            yield from (inner for _, inner in optimizers_inside(each))

    def _of_scheduler(self, scheduler: Any) -> str:
        label, optimizer = next(
            (
                (label, each)
                for label, each in self._state.given.items()
                if steps_any(scheduler, [each])
            ),
            ("", None),
        )
        owner = f"optimizer {label!r}, {optimizer_class(optimizer)}" if optimizer else SOME
        return OF_SCHEDULER.format(owner=owner)

    def _report(self, obj: Any, name: str, text: str) -> None:
        self._reported.append(_ref(obj))
        if text in (PERSISTENT, SEEDS):
            self._warn(f"a {type(obj).__name__} {text}")
            return
        it = name_in_script(obj) or name
        name = it.rpartition(".")[2]
        if text is OF_LOADER:
            line = self._line.replace(EXTRA, PER_RANK).format(name=name, it=it)
            line = f"{it} = tierckpt.ResumableLoader({it}), and give that: {line}"
            self._warn(f"{type(obj).__name__} {text} Wrap it, {line}")
            return
        line = self._line.format(name=name, it=it)
        self._warn(f"{type(obj).__name__} {text} Give it, too: {line}")

    def _say_of_hidden(self) -> None:
        """Warn of a scheduler after gc.freeze(), which hides objects; torch's mark is still
        there."""
        marked = any(_marks_of(each)[0] for each in self._state.given.values())
        given = any(isinstance(each, LRScheduler) for each in self._given())
        if marked and not given and gc.get_freeze_count():  # which counts them one by one
            line = self._line.format(name="scheduler", it="scheduler")
            self._warn(f"A scheduler {OF_SCHEDULER.format(owner=SOME)} Give it, too: {line}")

    def _warn(self, text: str) -> None:
        self.texts.append(text)
        self._say(text, logging.WARNING)


LIGHTNING = "Trainer(callbacks=[tierckpt.lightning.TierCheckpoint(path=...)])"
LINES = {
    "lightning": LIGHTNING,
    "pytorch_lightning": LIGHTNING,
    "transformers": "tierckpt.transformers.TierTrainer(..., tierckpt={'path': ...}).train()",
    "accelerate": "ckpt = tierckpt.accelerate.attach(accelerator, path=...), and loop over "
    "ckpt.resume(loader)",
}
"""The lines of the integrations, by the framework's package."""
BY_HAND = (
    "this training belongs to {package}'s {name}, and the checkpointer was attached by hand: "
    "loops, counters, schedulers and the place in the data are in no checkpoint, so a resumed run "
    "is not exact. Use the integration in its place: {line}"
)
SOME = "an optimizer that steps parameters of the model"
NOTHING = "and no object given to the checkpointer stores it:"
OF_SCHEDULER = (
    f"sets the learning rate of {{owner}}, {NOTHING} its place in the schedule is in no "
    "checkpoint, so a resumed run starts the schedule again."
)
OF_SCALER = (
    f"scales the loss, {NOTHING} its scale is in no checkpoint, so a resumed run starts with the "
    "first scale, and skips other steps."
)
OF_MEAN = (
    f"has averages of the model's weights, {NOTHING} they are in no checkpoint, so a resumed run "
    "starts new averages."
)
OF_LOADER = (
    f"is in the middle of a pass, {NOTHING} its place in the data is in no checkpoint, so a "
    "resumed run starts the epoch again."
)

PERSISTENT = (
    "has persistent_workers=True: random numbers that samples draw in its workers continue from "
    "epoch to epoch, and it draws from torch's generator only at its first pass in a process. Both "
    "are in no checkpoint, so a resumed run draws other random numbers in later epochs. For an "
    "exact restart set persistent_workers=False, also for the loader of an evaluation."
)
SEEDS = (
    "was given itself: it stores its place in the data, and not the random numbers. In a resumed "
    "run it draws seeds again when it continues in the middle of a pass, so dropout, random "
    "transforms or later shuffles differ. For an exact restart wrap it: data = "
    "tierckpt.ResumableLoader(loader), loop over data, and give extra_per_rank={'data': data}."
)


def _ref(obj: Any) -> _Ref:
    """A weak reference, if the class allows it."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return lambda: obj


def _has(refs: Iterable[_Ref], obj: Any) -> bool:
    return any(ref() is obj for ref in refs)


def _marks_of(optimizer: Any) -> tuple[bool, int]:
    """Traces of schedulers on an optimizer: a mark, and their own options in the groups."""
    groups = getattr(optimizer, "param_groups", None) or [{}]
    step = getattr(optimizer, "step", None)
    step = getattr(step, "before", step)
    return any(hasattr(step, mark) for mark in MARKS), len(groups[0])


def name_in_script(obj: Any) -> str:
    """The name of the variable, or attribute of `self`, in the running functions that holds the
    object; empty if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in OWN:
            names: dict[str, Any] = {**frame.f_globals, **frame.f_locals}
            for name, value in names.items():
                if value is obj and not name.startswith("_"):
                    return name
            for name, value in getattr(names.get("self"), "__dict__", {}).items():
                if value is obj:
                    return f"self.{name}"
        frame = frame.f_back
    return ""
