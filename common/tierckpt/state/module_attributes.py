"""What changes in the attributes of modules while a job trains: options, and the kinds of buffers.

Options are plain values, which a loop may change: `Dropout.p`, the momentum of a BatchNorm, a
submodule that stays in eval. They are in no `state_dict()`. A version has those that differ from
the values at attach. All others are as the script has made them, also if the script is edited for
a restart. A restore sets the options that torch declares, and names the others: a class of the
user's own may keep a value together with things that are not stored, as the length of a cache with
the cache.

Buffers change their kind: empty ones get a size, None becomes a tensor. A restart builds the model
as it was at the start, so a version's buffers may differ from the live ones. Such a buffer is
accepted where it is known to be the same one. First, if the live buffer has, or had at attach, the
kind that the buffer had when the job that wrote the version started. Second, if the module's own
`_load_from_state_dict` accepts it. Any other difference means another model.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import torch

from tierckpt._text import some
from tierckpt.format.layout import TensorSpec
from tierckpt.state import tree_codec
from tierckpt.state.names import inside, named_modules, wrapped

__all__ = [
    "ChangedBuffers",
    "Options",
    "adopt_buffers",
    "buffer_kinds",
    "changed_kinds",
    "is_restored",
    "replace_buffers",
]


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


BufferKind = Any
"""Kind of a buffer, as JSON: [dtype, shape]; None for None, False if there is no such buffer."""


def buffer_kinds(model: torch.nn.Module) -> dict[str, BufferKind]:
    """Kinds of all persistent buffers, by name; a buffer with several names has its first."""
    found: dict[str, BufferKind] = {}
    seen = {id(None)}
    for prefix, module in named_modules(model):
        for name, buffer in module._buffers.items():
            if name not in module._non_persistent_buffers_set:
                if buffer is None or id(buffer) not in seen:
                    found[inside(prefix, name)] = _kind(buffer)
                seen.add(id(buffer))
    return found


def changed_kinds(first: Mapping[str, BufferKind], model: torch.nn.Module) -> dict[str, BufferKind]:
    """The kinds at `first` of all buffers that have another kind now."""
    now = buffer_kinds(model)
    return {name: first.get(name, False) for name in now if now[name] != first.get(name, False)}


class ChangedBuffers:
    """Buffers of a version, accepted although they differ from the live ones."""

    def __init__(
        self,
        model: torch.nn.Module,
        first: Mapping[str, BufferKind],
        saved: Mapping[str, TensorSpec],
        saved_first: Mapping[str, BufferKind],
    ) -> None:
        """`saved`: the version's buffers. `first`: kinds of all buffers when this job was attached.
        `saved_first`: first kinds of the changed buffers, in the job that wrote the version."""
        self._model = model
        self._modules = dict(named_modules(model))  # for a wrapper, the module inside it
        now = buffer_kinds(model)
        then = {name: [spec.dtype, list(spec.shape)] for name, spec in saved.items()}
        differ = [n for n in {**now, **then} if now.get(n, False) != then.get(n)]
        self.taken = {
            name
            for name in differ
            if name.rpartition(".")[0] in self._modules
            and saved_first.get(name, then.get(name))
            in (first.get(name, False), now.get(name, False))
        }
        self._loaded: dict[str, list[str]] = {}
        """By module, names of the buffers that its own way of loading accepts."""
        rest: dict[str, list[str]] = {}
        for name in (n for n in differ if n in then and n not in self.taken):
            rest.setdefault(name.rpartition(".")[0], []).append(name)
        for prefix, names in rest.items():
            if self._takes(prefix, {n: _zeros(saved[n]) for n in names}):
                self._loaded[prefix] = names
                self.taken.update(names)

    def _takes(self, prefix: str, given: Mapping[str, torch.Tensor]) -> bool:
        """Try to load `given` into the module, which stays unchanged; True if it accepts all."""
        module = self._modules.get(prefix)
        if module is None:
            return False
        before = dict(vars(module))
        try:
            buffers = {
                k: None if held is None else held.clone() for k, held in module._buffers.items()
            }
            vars(module).update(
                _buffers=buffers,
                _parameters=dict(module._parameters),
                _modules=dict(module._modules),
            )
            self._load(prefix, given)
            return all(_kind(self._held(name)) == _kind(value) for name, value in given.items())
        except Exception:
            return False
        finally:
            vars(module).clear()
            vars(module).update(before)

    def _load(self, prefix: str, given: Mapping[str, torch.Tensor]) -> None:
        module = self._modules[prefix]
        params = dict(module._parameters)
        own = {**params, **module._buffers}
        state = {inside(prefix, key): held for key, held in own.items() if held is not None}
        metadata = {"version": module._version}
        dot = f"{prefix}." if prefix else ""
        module._load_from_state_dict({**state, **given}, dot, metadata, True, [], [], [])
        module._parameters.update(params)  # undo a replacement: optimizers hold these objects

    def _held(self, name: str) -> torch.Tensor | None:
        prefix, _, key = name.rpartition(".")
        return self._modules[prefix]._buffers.get(key)

    def make(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """A new tensor to load the buffer into, on its module's device."""
        module = self._modules[name.rpartition(".")[0]]
        near = [*module.buffers(recurse=False), *module.parameters()]
        near += self._modules[""].parameters()
        device = next((t.device for t in near if t.device.type == spec.device), "cpu")
        return tree_codec.empty(spec, device)

    def finish(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Put the tensors into the modules; those of `taken` without a tensor become None."""
        for prefix, names in self._loaded.items():
            self._load(prefix, {name: loaded[name] for name in names})
        replace_buffers(self._model, {name: loaded.get(name) for name in self.taken})


def replace_buffers(model: torch.nn.Module, values: Mapping[str, torch.Tensor | None]) -> None:
    """Make these the model's persistent buffers of these names. Where a buffer is shared, its other
    places get the new one, too."""
    modules = dict(named_modules(model))
    for name in values:
        prefix, _, key = name.rpartition(".")
        live = modules[prefix]._buffers.get(key)
        shared = [
            (m, k) for m in modules.values() for k, held in m._buffers.items() if held is live
        ]
        for module, other in shared if live is not None else ():
            module._buffers[other] = values[name]
    for name, value in values.items():  # last: names that shared a buffer may have two now
        prefix, _, key = name.rpartition(".")
        vars(modules[prefix]).pop(key, None)
        modules[prefix]._buffers[key] = value


def adopt_buffers(model: torch.nn.Module, kinds: Mapping[str, BufferKind]) -> None:
    """Make buffers of these kinds where they differ; their contents are filled in later."""
    now = buffer_kinds(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    replace_buffers(
        model,
        {
            name: kind and torch.empty(kind[1], dtype=tree_codec.dtype_of(kind[0]), device=device)
            for name, kind in kinds.items()
            if now.get(name, False) != kind
        },
    )


def _kind(buffer: torch.Tensor | None) -> BufferKind:
    if buffer is None:
        return None
    shape = None if torch.nn.parameter.is_lazy(buffer) else list(buffer.shape)
    return [str(buffer.dtype).removeprefix("torch."), shape]


def _zeros(spec: TensorSpec) -> torch.Tensor:
    return tree_codec.empty(spec, "cpu").zero_()
