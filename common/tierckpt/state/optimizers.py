"""Models and optimizers as a script gives them: optimizers inside others, and refusals of state
that cannot be checkpointed.

A wrapper (SAM, Lookahead, ScheduleFree, Accelerate's) steps an optimizer in one of its attributes.
The inner optimizer's state belongs to the training as well, whether or not the wrapper's
`state_dict()` includes it. If the wrapper's own step is never called, the inner optimizer's steps
are the training's steps.

Each refusal raises UnsupportedStateError with advice.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from msgspec import Struct, field

from tierckpt.errors import UnsupportedStateError

__all__ = [
    "METHODS",
    "ORDER",
    "Aliases",
    "Expanded",
    "Foreign",
    "class_name",
    "expand",
    "is_hollow",
    "optimizers_inside",
    "refuse_model",
    "refuse_odd_keys",
    "refuse_optimizer",
    "refuse_same_names",
    "refuse_several_gpus",
    "stands_for_some",
    "unstorable",
]


_HOOKS = tuple(
    f"_optimizer_{what}_{when}_hooks"
    for what in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
)
METHODS = ("step", "state_dict", "load_state_dict")
"""Methods by which an object but no torch.optim.Optimizer can stand for those inside it."""


class Expanded(Struct):
    """The given optimizers, with all optimizers inside them."""

    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    """Optimizers with stored state: each given one, then, as `label.attribute`, the inner ones with
    a state of their own."""
    steppers: dict[str, list[torch.optim.Optimizer]] = field(default_factory=dict)
    """For each of `optimizers`, the ones that make its steps, with torch's hooks."""
    outer: dict[str, str] = field(default_factory=dict)
    """For each of `optimizers`, the label of the given one."""
    hollow: list[Any] = field(default_factory=list)
    """Optimizers for which torch calls no step hooks."""


def expand(given: Mapping[str, Any]) -> Expanded:
    """Find all optimizers inside the given ones. A given one always keeps its name."""
    found = Expanded()
    known = {id(each) for each in given.values()}
    for label, each in given.items():
        _add(found, label, each, label, known)
    for label, each in given.items():
        for path, inner in optimizers_inside(each):
            if id(inner) in known:
                continue
            known.add(id(inner))
            shared = next((n for n, o in found.optimizers.items() if o.state is inner.state), None)
            if shared is None:
                _add(found, f"{label}.{path}", inner, label, known)
            elif not is_hollow(inner):
                found.steppers[shared].append(inner)
    return found


def _add(found: Expanded, label: str, each: Any, outer: str, known: set[int]) -> None:
    if label in found.optimizers:
        raise UnsupportedStateError(f"two optimizers are called {label!r}; give them other names")
    hollow = is_hollow(each)
    if hollow:
        found.hollow.append(each)
    real = isinstance(each, torch.optim.Optimizer) and hasattr(each, "state")
    if real and hollow:
        _complete(each)
    found.optimizers[label] = each if real else Foreign(each)  # type: ignore[assignment]
    found.steppers[label] = [] if hollow else [each]
    found.outer[label] = outer


def optimizers_inside(optimizer: Any) -> list[tuple[str, torch.optim.Optimizer]]:
    """Optimizers in its attributes, and in theirs, with the path to each."""
    found: list[tuple[str, torch.optim.Optimizer]] = []
    known = {id(optimizer)}

    def look(path: str, each: Any) -> None:
        for name, inner in _attributes(each):
            if isinstance(inner, torch.optim.Optimizer) and id(inner) not in known:
                known.add(id(inner))
                found.append((f"{path}{name}", inner))
                look(f"{path}{name}.", inner)

    look("", optimizer)
    return found


def _attributes(each: Any) -> Iterator[tuple[str, Any]]:
    for name, value in getattr(each, "__dict__", {}).items():
        yield name, value
        if isinstance(value, Mapping) and name != "state":
            yield from ((f"{name}.{key}", v) for key, v in value.items() if isinstance(key, str))
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{number}", v) for number, v in enumerate(value))


class Aliases:
    """State and groups that a wrapper shares with the optimizers inside it. A `load_state_dict()`
    may replace them in one of them only."""

    def __init__(self, outer: Any) -> None:
        """Record what a given optimizer and those inside it share now."""
        every = [outer, *(inner for _, inner in optimizers_inside(outer))]
        self._shared = [
            (name, one, other)
            for name in ("param_groups", "state")
            for number, one in enumerate(every)
            for other in every[number + 1 :]
            if getattr(one, name, None) is getattr(other, name, self)
        ]

    def mend(self) -> None:
        """Share the outer one's objects again."""
        for name, one, other in self._shared:
            if getattr(one, name) is not getattr(other, name):
                with contextlib.suppress(AttributeError):
                    setattr(other, name, getattr(one, name))


def is_hollow(optimizer: Any) -> bool:
    """True if torch calls no hooks: torch.optim.Optimizer's own __init__ never ran."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    try:
        optimizer.register_step_post_hook(_do_nothing).remove()
    except AttributeError:
        return True
    return not getattr(type(optimizer).step, "hooked", False)


def _complete(optimizer: torch.optim.Optimizer) -> None:
    """Add the attributes that torch's `state_dict()` and `load_state_dict()` need."""
    for name in _HOOKS:
        vars(optimizer).setdefault(name, OrderedDict())


def _do_nothing(*_: Any) -> None:
    """Do nothing, as a hook."""


def class_name(optimizer: Any) -> str:
    """Name of the class. For a wrapper without a state of its own, that of the optimizer inside:
    the same state can be loaded with and without the wrapper."""
    optimizer = optimizer.outside if isinstance(optimizer, Foreign) else optimizer
    if is_hollow(optimizer):
        for _, inner in optimizers_inside(optimizer):
            if inner.state is getattr(optimizer, "state", None):
                return class_name(inner)
    return type(optimizer).__name__


class Foreign:
    """Adapter that presents an object with optimizers inside as one torch.optim.Optimizer."""

    def __init__(self, outside: Any) -> None:
        self.outside = outside

    @property
    def state(self) -> Any:
        """State of the object by parameter, if it has any."""
        return getattr(self.outside, "state", {})

    @property
    def defaults(self) -> Any:
        """Defaults of the object, if it has any."""
        return getattr(self.outside, "defaults", {})

    @property
    def param_groups(self) -> Any:
        """Groups of the object, if it has any."""
        return getattr(self.outside, "param_groups", [])

    def state_dict(self) -> Any:
        """Call the object's own method."""
        return self.outside.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Call the object's own method."""
        self.outside.load_state_dict(state_dict)


ORDER = (
    "Check the order of the arguments: Checkpointer(model, optimizer), but wrap(optimizer, model) "
    "and install(optimizer, model)."
)


def refuse_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer with other state on each rank, or with steps that cannot be delayed."""
    each = (optimizer, *(inner for _, inner in optimizers_inside(optimizer)))
    kinds = {kind.__name__ for one in each for kind in type(one).__mro__}
    if "PostLocalSGDOptimizer" in kinds:
        raise UnsupportedStateError(
            "PostLocalSGDOptimizer lets ranks diverge between its averages: weights and "
            "momentum differ from rank to rank, and this package is for replicated state. Train "
            "with the optimizer inside it (its attribute 'optim') and DDP's own allreduce, or save "
            "each rank's state by itself."
        )
    if "ZeroRedundancyOptimizer" in kinds:
        raise UnsupportedStateError(
            "ZeroRedundancyOptimizer keeps a different part of its state on every rank, and this "
            "package is for replicated state. Use the inner optimizer class directly, or "
            "torch.distributed.checkpoint."
        )
    if all(map(is_hollow, each)):
        _refuse_hollow(optimizer)


def _refuse_hollow(optimizer: Any) -> None:
    """Refuse an optimizer without torch's step hooks, and with no optimizer inside."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedStateError(
            f"{name} is not a torch.optim.Optimizer, and none is in its attributes; its step can "
            "not be delayed until all copies are complete. Give the checkpointer the "
            "torch.optim.Optimizer that it steps"
        )
    raise UnsupportedStateError(
        f"{name} was made without torch.optim.Optimizer's __init__, so its "
        "step cannot be delayed until all copies are complete. Let its __init__ call "
        "super().__init__(params, defaults), or give the checkpointer the optimizer that makes "
        "the steps."
    )


def stands_for_some(optimizer: Any) -> bool:
    """True for an object, no torch.optim.Optimizer, that steps those in its attributes."""
    if isinstance(optimizer, (torch.nn.Module, Mapping, list, tuple)):
        return False
    return bool(optimizers_inside(optimizer)) and all(
        callable(getattr(optimizer, n, None)) for n in METHODS
    )


def refuse_odd_keys(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state of a parameter other than a dict of names and values."""
    kept: dict[Any, Any] = optimizer.state
    for owner, values in kept.items():
        if isinstance(owner, torch.Tensor) and not isinstance(values, dict):
            raise UnsupportedStateError(
                f"{class_name(optimizer)} keeps a {type(values).__name__} as the state of a "
                "parameter; let it keep a dict there, {'name': value}"
            )


def unstorable(
    optimizer: torch.optim.Optimizer, where: str, error: UnsupportedStateError
) -> UnsupportedStateError:
    """An error about a value of an optimizer that cannot be stored, with advice."""
    why = str(error).split(". ")[0].split(" is ", 1)[-1]
    return UnsupportedStateError(
        f"{class_name(optimizer)}.{where} is {why}. Two hooks of the optimizer make it storable: "
        "register_state_dict_post_hook, which puts numbers, strings, tensors or containers of them "
        "in its place in a copy of the state_dict, and register_load_state_dict_pre_hook, which "
        "makes it again from these (docs/models.md shows both)"
    )


def refuse_same_names(names: Collection[str]) -> None:
    """Refuse two tensors with one name: only one of them would be restored."""
    if len({*names}) == len(names):
        return
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 1))
    if times > 1:
        raise UnsupportedStateError(
            f"{times} tensors of the state have the name {name}; give the modules or optimizers "
            "that hold them other names, or other keys"
        )


def refuse_model(model: torch.nn.Module) -> None:
    """Raise UnsupportedStateError, with the module's name, for a sharded model, or for anything but
    a model."""
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedStateError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module. {ORDER}"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedStateError(
                f"module {name or '(root)'!r} is a ScriptModule: its tensors are not visible to "
                "Python. Give the original module, which has the same parameters, train with the "
                "result of torch.jit.script(), and call step(). Change buffers only in place: a "
                "buffer that a script replaces is not the original module's."
            )
        kinds = {c.__name__ for c in type(module).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise UnsupportedStateError(
                f"module {name or '(root)'!r} is sharded by FSDP; this package is for replicated "
                "models (DDP, Horovod). Use torch.distributed.checkpoint for it."
            )


def refuse_several_gpus(named: Sequence[tuple[str, torch.device]]) -> None:
    """Raise UnsupportedStateError when tensors of the state, by name, are on two GPUs.

    The streams of one device order the copies of a snapshot after the training's work.
    """
    if len({*map(itemgetter(1), named)}) < 2:
        return
    first = next(((name, device) for name, device in named if device.type == "cuda"), None)
    for name, device in named:
        if first is not None and device.type == "cuda" and device != first[1]:
            raise UnsupportedStateError(
                f"{first[0]} is on {first[1]}, {name} on {device}; this package is for one GPU a "
                "process. Start one process per GPU (torchrun --nproc-per-node), each with the "
                "whole model on its own; for a model that one GPU cannot hold use "
                "torch.distributed.checkpoint."
            )
