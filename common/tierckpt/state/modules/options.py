"""Options: plain values in the attributes of modules, which a loop may change while it trains.

`Dropout.p`, the momentum of a BatchNorm, a submodule that stays in eval: they are in no
`state_dict()`. A version has those that differ from the values at attach. All others are as the
script has made them, also if the script is edited for a restart.

A restore sets the options that torch declares, and names the others: a class of the user's own may
keep a value together with things that are not stored, as the length of a cache with the cache.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import torch

from tierckpt._text import some
from tierckpt.state import tree_codec
from tierckpt.state.names import named_modules, wrapped

PLAIN = (bool, int, float, str, type(None))
MODE = "training"
LONGEST = 1000
"""Longer texts are data."""
NOT_SET = (
    "{names}: plain attributes of modules, which the training had changed, and a restore does not "
    "set. If the loop does not set them again, the resumed run differs: make them buffers, or "
    "return them from get_extra_state()"
)
Values = dict[str, Any]


class Options:
    """The options of all modules of a model, at attach and now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._first: dict[str, Values] = {}
        """By module, the values when it was seen first: at attach, for most."""
        self._eval_first: set[str] | None = None
        self._eval: set[str] = set()
        """Modules in eval while the whole model was in training mode."""
        self._changed: dict[str, Values] = {}
        self._packed = tree_codec.Packed({})
        self.look_up()

    def look_up(self) -> None:
        """Find the modules again, after a change of structure."""
        found = [(n, m) for n, m in named_modules(self._model) if wrapped(m) is None]
        self._modules = [(name, module) for name, module in found if MODE in vars(module)]
        self.attributes = [vars(module) for _, module in self._modules]
        """The dicts that hold the options."""
        for (name, _), held in zip(self._modules, self.attributes, strict=True):
            self._first.setdefault(name, {k: v for k, v in held.items() if _is_option(k, v)})
        keys = ((MODE, MODE, *self._first[name]) for name, _ in self._modules)
        self._read = [itemgetter(*each) for each in keys]
        self._then: list[Any] = [None] * len(self._modules)
        self.look(range(len(self._modules)))

    def look(self, numbers: Iterable[int]) -> None:
        """At a boundary: take in the values of the modules with these numbers."""
        before, taken = (dict(self._changed), self._eval), False
        for number in numbers:
            try:
                values = self._read[number](self.attributes[number])
            except KeyError:  # an attribute was deleted
                values = None
            if values is None or values != self._then[number]:
                taken, self._then[number] = True, values
                self._take(number)
        if not taken:
            return
        if self._model.training:  # else it is evaluated now, and all are in eval
            pairs = zip(self._modules, self.attributes, strict=True)
            self._eval = {name for (name, _), held in pairs if not held[MODE]}
            self._eval_first = self._eval if self._eval_first is None else self._eval_first
        if (self._changed, self._eval) != before:
            self._pack()

    def _take(self, number: int) -> None:
        name, held = self._modules[number][0], self.attributes[number]
        changed = {
            key: held[key]
            for key, value in self._first[name].items()
            if _is_option(key, held.get(key, held)) and not _is_same(held[key], value)
        }
        self._changed.pop(name, None)
        if changed:
            self._changed[name] = changed

    def _pack(self) -> None:
        found = {name: dict(values) for name, values in self._changed.items()}
        for name in self._eval ^ (self._eval_first or set()):
            found.setdefault(name, {})[MODE] = name not in self._eval
        self._packed = tree_codec.Packed(tree_codec.pack(found, "options", tree_codec.Arena().keep))

    def packed(self) -> tree_codec.Packed:
        """What `load` takes: by module, the values that differ from those at attach. The same
        object while nothing changes."""
        return self._packed

    def load(self, saved: Mapping[str, Values]) -> list[str]:
        """Set the options as in a version. Returns a warning if there are some that only the loop
        can set."""
        names = []
        for (name, module), held in zip(self._modules, self.attributes, strict=True):
            wanted, first = saved.get(name, {}), self._first[name]
            for key in {**wanted, **self._changed.get(name, {})}:
                value = wanted.get(key, first.get(key))
                if key == MODE or key not in held or _is_same(held[key], value):
                    continue
                if is_restored(type(module), key):
                    held[key] = value
                elif key in wanted:
                    it = f"{name}.{key}" if name else key
                    names.append(f"{it} was {value!r} and is {held[key]!r}")
            if self._model.training and (MODE in wanted or name in self._eval):
                held[MODE] = wanted.get(MODE, name not in (self._eval_first or ()))
        return [NOT_SET.format(names=some(names))] if names else []


def _is_option(key: str, value: Any) -> bool:
    kind = type(value)
    short = kind is not str or len(value) <= LONGEST
    return kind in PLAIN and key[:1] != "_" and key != MODE and short


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def is_restored(kind: Any, key: str) -> bool:
    """Whether a restore sets this option: all of torch's own classes, and those that a class
    declares as constants."""
    return kind.__module__.partition(".")[0] == "torch" or key in _declared(kind)


@functools.lru_cache(4096)
def _declared(kind: Any) -> frozenset[str]:
    found = [getattr(each, "__constants__", ()) for each in kind.__mro__]
    return frozenset(name for names in found for name in names)


__all__ = ["Options", "is_restored"]
