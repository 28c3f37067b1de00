"""The neutral tree between the formats: a training state by its parts, with no tool's layout.

A file that scripts wrote by themselves has its parts under any names, so they are recognized by
their form: a dict with `state` and `param_groups` is an optimizer's, a dict of named tensors is a
model's, a dict of small values is an object's (a scheduler, a scaler).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field

from tierckpt._text import some
from tierckpt.errors import ConfigError
from tierckpt.state.extras import PLAIN_VALUES

MODEL_KEYS = (
    *("model", "model_state_dict", "state_dict", "net", "network", "module", "weights"),
    *("model_state", "params"),
)
"""Usual names of the model in a file, the most usual first."""
ITERATION_KEYS = (
    *("iteration", "global_step", "step", "steps", "iter", "iter_num", "global_steps", "it"),
    "n_iter",
)
"""Usual names of the number of iterations."""
WRAPPERS = ("module", "_orig_mod")
"""Name parts of DDP, DataParallel and torch.compile."""
EXTRA_STATE = "_extra_state"
"""Last part of a module's own entry in a `state_dict()`."""


class Unread:
    """Stands for an object of a class that a reader does not import; the object's code never
    runs."""

    name = ""
    """The class, with its module."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Drop an item."""

    def extend(self, values: Any) -> None:
        """Drop items."""


class ForeignState(Struct):
    """The state in another tool's checkpoint, or for one. Tensors may be views of mapped files."""

    kind: str
    """The format, as text."""
    model: dict[str, Any] = field(default_factory=dict)
    """As `state_dict()` has it, without wrappers' name parts."""
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each optimizer's `load_state_dict`; parameters by number or by name."""
    extra: dict[str, Any] = field(default_factory=dict)
    """States of other objects by name: schedulers, a scaler."""
    values: dict[str, Any] = field(default_factory=dict)
    """Plain values, such as the epoch."""
    iteration: int | None = None
    steps: int | None = None
    """Number of optimizer steps, if the format has it."""
    prefix: str = ""
    """Of names in the model, dropped by `strip`; optimizers' names still have it."""
    not_taken: list[str] = field(default_factory=list)
    """Parts that were not understood, and parts that no version has, as text."""

    def strip(self, prefix: str) -> None:
        """Drop the prefix of names in the model, and parts of the model without it. Raises
        ConfigError if no name has it."""
        if not any(name.startswith(prefix) for name in self.model):
            first = next(iter(self.model), "")
            raise ConfigError(f"no name in the model starts with {prefix!r}; the first is {first}")
        self.prefix = prefix
        other = [name for name in self.model if not name.startswith(prefix)]
        self.not_taken += [f"{name} (without the prefix)" for name in other]
        self.model = {
            name.removeprefix(prefix): value
            for name, value in self.model.items()
            if name.startswith(prefix)
        }

    def count_steps(self) -> int | None:
        """The number of optimizer steps: as given, or by the optimizers' own counters."""
        if self.steps is not None:
            return self.steps
        counts = [
            int(values["step"])
            for optimizer in self.optimizers.values()
            for values in optimizer["state"].values()
            if isinstance(values, Mapping) and _is_number(values.get("step"))
        ]
        return max(counts, default=None)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)


def sorted_out(kind: str, content: Any, model_key: str | None = None) -> ForeignState:
    """Recognize the parts of a script's own dict. Raises ConfigError if there is no model in it, or
    several, and `model_key` names none."""
    if not isinstance(content, Mapping):
        what = content.name if isinstance(content, Unread) else type(content).__name__
        raise ConfigError(
            f"it has a {what}, and no dict with a model. Save state_dict()s: torch.save("
            '{"model": model.state_dict(), "optimizer": optimizer.state_dict()}, FILE)'
        )
    found = ForeignState(kind)
    models: dict[str, Mapping[str, Any]] = {}
    if _is_own_export(content):
        content = _own_export(found, content)
    if model_key is None and is_model(content):
        models[""], content = content, {}
    for key, value in content.items():
        _sort(found, models, str(key), value)
    chosen = _choose_model(models, model_key, content)
    found.model = without_wrappers(models.pop(chosen))
    found.extra |= {key: dict(value) for key, value in models.items()}
    number = next((key for key in ITERATION_KEYS if _is_whole(found.values.get(key))), None)
    if found.iteration is None and number is not None:
        found.iteration = int(found.values[number])
    return found


def _is_own_export(content: Mapping[str, Any]) -> bool:
    counts = (content.get("version"), content.get("iteration"))
    return isinstance(content.get("extra"), Mapping) and all(map(_is_whole, counts))


def _own_export(found: ForeignState, content: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of a file that `tierckpt export` wrote."""
    found.steps, found.iteration = content["version"], content["iteration"]
    found.extra |= dict(content["extra"])
    values = found.extra.pop(PLAIN_VALUES, None)
    found.values |= dict(values or {})
    if per_rank := content.get("extra_per_rank"):
        found.not_taken.append(f"extra_per_rank of rank 0 ({', '.join(per_rank)})")
    own = {
        "version",
        "iteration",
        "extra",
        "extra_per_rank",
        "metric",
    }  # but not the model, nor the optimizers
    return {key: value for key, value in content.items() if key not in own}


def _sort(found: ForeignState, models: dict[str, Mapping[str, Any]], key: str, value: Any) -> None:
    if is_optimizer(value):
        found.optimizers[key] = dict(value)
    elif members := _optimizers_in(value):
        found.optimizers |= members
    elif is_model(value):
        models[key] = value
    elif what := _unread_in(value):
        found.not_taken.append(f"{key} ({what})")
    elif isinstance(value, Mapping) and value:
        found.extra[key] = dict(value)
    elif _are_objects(value):
        found.extra |= {f"{key}{number}": dict(each) for number, each in enumerate(value)}
    else:
        found.values[key] = value


def _optimizers_in(value: Any) -> dict[str, dict[str, Any]]:
    """Several optimizers in a list or a dict, with names as in a Checkpointer."""
    if isinstance(value, Mapping) and value and all(map(is_optimizer, value.values())):
        return {str(name): dict(each) for name, each in value.items()}
    if isinstance(value, list | tuple) and value and all(map(is_optimizer, value)):
        return named_optimizers(value)
    return {}


def named_optimizers(states: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Names as a Checkpointer gives them to one optimizer, or to a list of them."""
    if len(states) == 1:
        return {"optimizer": dict(states[0])}
    return {f"optimizer{number}": dict(each) for number, each in enumerate(states)}


def _are_objects(value: Any) -> bool:
    some = isinstance(value, list | tuple) and bool(value)
    return some and all(isinstance(each, Mapping) and each for each in value)


def is_optimizer(value: Any) -> bool:
    """True for the result of an optimizer's `state_dict()`."""
    return (
        isinstance(value, Mapping)
        and {"state", "param_groups"} <= value.keys()
        and isinstance(value["state"], Mapping)
        and isinstance(value["param_groups"], list | tuple | Mapping)
    )


def is_model(value: Any) -> bool:
    """True for the result of a module's `state_dict()`: named tensors, and modules' own states."""
    if not isinstance(value, Mapping):
        return False
    tensors = [name for name, each in value.items() if isinstance(each, torch.Tensor)]
    own = [name for name in value if str(name).rpartition(".")[2] == EXTRA_STATE]
    return bool(tensors) and len({*tensors, *own}) == len(value) and all(map(_is_name, value))


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and "/" not in key


def _choose_model(models: Mapping[str, Any], key: str | None, content: Mapping[str, Any]) -> str:
    names = ", ".join(map(repr, models)) or "nothing"
    if key is not None:
        if key not in models:
            text = f"{key!r} in it is no model's state_dict(){_why_no_model(content.get(key))}"
            raise ConfigError(f"{text}; such are: {names}")
        return key
    if len(models) == 1:
        return next(iter(models))
    usual = next((each for each in MODEL_KEYS if each in models), None)
    if usual is None and models:
        text = "which part is the model? --model KEY chooses one"
        raise ConfigError(f"{text}; state_dict()s in it: {names}")
    if usual is None:
        likely = next((each for each in MODEL_KEYS if each in content), None)
        if likely is not None:
            why = _why_no_model(content[likely])
            raise ConfigError(f"{likely!r} in it is no model's state_dict(){why}")
        keys = some([repr(each) for each in content])
        raise ConfigError(f"no part of it is a model's state_dict(), with tensors alone: {keys}")
    return usual


def _why_no_model(value: Any) -> str:
    """The reason in parentheses; empty if there is nothing to say about it."""
    if isinstance(value, Unread):
        return f", but a {value.name}; save model.state_dict()"
    if not isinstance(value, Mapping):
        return ""
    if not value:
        return ": it is empty"
    other = next((name for name, each in value.items() if not isinstance(each, torch.Tensor)), None)
    return "" if other is None else f": {other!r} in it is no tensor. Save it beside the model"


def schedulers_in(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The states of learning rate schedulers among those of objects, by name."""
    return {
        name: state
        for name, state in extra.items()
        if isinstance(state, Mapping) and "last_epoch" in state
    }


def without_wrappers(model: Mapping[str, Any]) -> dict[str, Any]:
    """Names without the name parts of wrappers. `module` counts as one only if all names start with
    it: it may be a module of the user's own elsewhere."""
    names = {name: name for name in model}
    while names and all(_head(name) in WRAPPERS for name in names.values()):
        names = {given: name.partition(".")[2] for given, name in names.items()}
    return {
        ".".join(part for part in name.split(".") if part != "_orig_mod"): model[given]
        for given, name in names.items()
    }


def _head(name: str) -> str:
    head, dot, _ = name.partition(".")
    return head if dot else ""


def _is_whole(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= 0


def _unread_in(value: Any) -> str:
    """The class of the first object in it that was not read; empty if all was."""
    return next((type(each).name for each in _all_in(value) if isinstance(each, Unread)), "")


def _all_in(value: Any) -> Iterator[Any]:
    yield value
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    for each in inner:
        yield from _all_in(each)


__all__ = [
    "EXTRA_STATE",
    "ForeignState",
    "Unread",
    "is_model",
    "is_optimizer",
    "named_optimizers",
    "schedulers_in",
    "sorted_out",
    "without_wrappers",
]
