"""The training state: its tensors, values and files, their names, and their placement.

Three kinds, kept apart because they change at different times and belong to different ranks:

- *striped* tensors: parameters and optimizer state. The same on every rank, changed only by the
  optimizer's step, so they can be copied any time before the next one.
- *own* tensors: BatchNorm statistics and other buffers. The forward pass changes them, and ranks
  differ until DDP broadcasts them, so every rank stores its own copy, taken at the boundary. Some
  parameters may also differ between ranks: embeddings with `max_norm` (the forward pass scales the
  rows that it looks up), and parameters without a reduction of their gradients.
- the *rank tree*: learning rates, RNG streams, `extra` objects. Small, copied at the boundary.

Placement, which ranks have which elements of a parameter and of its optimizer state, is decided in
one place. A layout, a replica check and a restore ask `Walk.placement`; an adapter says what it
reduces. A placement for a tensor of which each rank has a part (a shard) has its place here, and
in `format.layout`.

Files that a program keeps beside the state are each rank's own, in every version until replaced.
Each is a mapped file without a name, or a decoded tensor after a restore. A version refers to
these bytes, and the copier copies them: the training thread copies none.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from operator import is_, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import Struct

from tierckpt.errors import ConfigError, UnsupportedStateError
from tierckpt.format.layout import PER_RANK, REPLICATED, Placement
from tierckpt.state.module_states import MODULE_STATES, ModuleStates
from tierckpt.state.optimizer_state import GROUP_KEYS_NOT_STORED, STATE_DICT_HOOKS, OptimizerTree
from tierckpt.state.optimizers import class_name, expand
from tierckpt.storage.routed import SourceFile

from . import module_attributes, tree_codec
from .extras import EXTRA_STATES, ExtraStates, named_objects, pack_extra
from .module_attributes import Options
from .names import named_buffers, named_parameters, other_names, unwrap
from .optimizers import (
    ORDER,
    refuse_odd_keys,
    refuse_optimizer,
    refuse_same_names,
    refuse_several_gpus,
    stands_for_some,
)

__all__ = [
    "FILES",
    "NOT_THERE",
    "FileWindows",
    "KeptFile",
    "Placements",
    "Root",
    "RoutedState",
    "root_of",
]


class Placements:
    """The facts that decide where the elements of each parameter are."""

    def __init__(
        self, reduced: Sequence[torch.Tensor] | None, untrained: Sequence[torch.Tensor]
    ) -> None:
        """`reduced`, `untrained`: see the methods of `Adapter`."""
        self._reduced = None if reduced is None else {id(p): p for p in reduced}
        self.untrained = {id(p) for p in untrained}
        self._forward_changes: tuple[str, ...] = ()

    def forward_changes(self, patterns: str, names: Iterable[str]) -> None:
        """Set the parameters that the forward pass changes, see `Config.forward_changes`; `names`
        are all that there are. Raises ConfigError for a pattern that matches none."""
        known = list(names)
        self._forward_changes = tuple(filter(None, map(str.strip, patterns.split(","))))
        for pattern in self._forward_changes:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ConfigError(
                    f"forward_changes: no parameter has the name {pattern!r}; names are "
                    f"{', '.join(known[:5])}, ..."
                )

    def assumed_replicated(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `params` without training, hence without reduction: they count as replicated,
        until `keep_apart`."""
        return [p for p in params if id(p) in self.untrained]

    def keep_apart(self, params: Iterable[torch.Tensor]) -> None:
        """These are every rank's own from now on; for a new layout."""
        for param in params:
            if self._reduced is not None:
                self._reduced.pop(id(param), None)
            self.untrained.discard(id(param))

    def of(
        self,
        params: Collection[torch.Tensor],
        modules: Sequence[torch.nn.Module],
        name_of: Callable[[torch.Tensor], str],
    ) -> dict[int, Placement]:
        """By `id()`, the placement of each parameter not replicated."""
        own, reduced = self.changed_by_forward(params, modules, name_of), self._reduced
        if reduced is not None:
            own += [p for p in params if id(p) not in reduced]
        return dict.fromkeys(map(id, own), PER_RANK)

    def changed_by_forward(
        self,
        params: Collection[torch.Tensor],
        modules: Sequence[torch.nn.Module],
        name_of: Callable[[torch.Tensor], str],
    ) -> list[torch.Tensor]:
        """Parameters that the forward pass changes: some modules do, others are in the setting."""
        found, patterns = _renormed(modules), self._forward_changes
        if patterns:
            found += [p for p in params if any(fnmatchcase(name_of(p), each) for each in patterns)]
        return found


def _renormed(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Weights that the forward pass changes in place: rows longer than `max_norm` are scaled.

    Each rank looks up its own rows, so these weights differ between ranks; with a weight decay, so
    does their optimizer state.
    """
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    found = [m for m in modules if isinstance(m, kinds) and m.max_norm is not None]
    return [w for m in found if (w := m._parameters.get("weight")) is not None]


FILES = "files"
"""Name of the files in a rank's tree."""


class KeptFile(Struct, frozen=True):
    """A file's bytes, which never change, and its permissions."""

    content: torch.Tensor
    mode: int

    @staticmethod
    def of(source: SourceFile) -> KeptFile:
        """Take over a complete file: it is mapped, and its name is removed. Raises OSError."""
        content = torch.empty(0, dtype=torch.uint8)
        if source.nbytes:
            fd = os.open(source.path, os.O_RDONLY)
            try:
                # Private and writable: torch has no tensors that cannot be written.
                access = mmap.PROT_READ | mmap.PROT_WRITE
                mapped = mmap.mmap(fd, source.nbytes, mmap.MAP_PRIVATE, access)
            finally:
                os.close(fd)
            content = torch.frombuffer(mapped, dtype=torch.uint8)
        os.unlink(source.path)
        return KeptFile(content, source.mode)


class FileWindows:
    """Fills restored files from the windows of their shard, so that none is in memory twice."""

    def __init__(
        self, ranges: Mapping[str, tuple[int, int]], contents: Mapping[str, torch.Tensor]
    ) -> None:
        """`ranges`: of each file in the shard; those without a tensor are left out."""
        self._parts = [
            (low, high, contents[name].numpy())
            for name, (low, high) in ranges.items()
            if name in contents
        ]

    def wants(self, low: int, high: int) -> bool:
        """True if these bytes of the shard belong to a file."""
        return any(start < high and low < end for start, end, _ in self._parts)

    def take(self, offset: int, window: memoryview) -> None:
        """Copy the parts of files that this window has."""
        data = np.frombuffer(window, np.uint8)
        for start, end, content in self._parts:
            low, high = max(start, offset), min(end, offset + len(window))
            if low < high:
                content[low - start : high - start] = data[low - offset : high - offset]


class RoutedState:
    """One rank's files. Training thread."""

    def __init__(self) -> None:
        self.kept: dict[str, KeptFile] = {}
        """By name."""

    def replace(self, sources: Iterable[SourceFile]) -> None:
        """Take these files in place of all earlier ones. Raises OSError, with nothing replaced."""
        self.kept = {source.name: KeptFile.of(source) for source in sources}

    def pack(self, arena: tree_codec.Arena) -> dict[str, Any]:
        """A node for a rank's tree, with the bytes in `arena`; they are not copied."""
        contents = {}
        for name, file in self.kept.items():
            arena.tensors.append(file.content)
            contents[name] = {tree_codec.TAG: "tensor", "v": len(arena.tensors) - 1}
        return {"contents": contents, "modes": {n: f.mode for n, f in self.kept.items()}}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Take the files of a decoded tree; none if it has none."""
        contents = (saved or {}).get("contents", {})
        modes = (saved or {}).get("modes", {})
        self.kept = {name: KeptFile(c, int(modes[name])) for name, c in contents.items()}

    def write(self, folder: Path) -> dict[str, str]:
        """Write all files into a folder; returns their paths by name. Raises OSError."""
        paths = {}
        for name, file in self.kept.items():
            path = folder / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("wb") as out:
                out.write(file.content.numpy().data)
            path.chmod(file.mode)
            paths[name] = str(path)
        return paths


NAMELESS = "~keys"
"""Key for all of a parameter's state with keys of other types than text, or with a slash."""


class Walk(Struct):
    """All tensors of the state, as they are now, in an order that depends only on structure."""

    params: list[torch.Tensor]
    state: list[tuple[torch.Tensor, torch.Tensor, int, str]]
    """Optimizer state: (tensor, its parameter, optimizer index, key)."""
    odd: list[tuple[torch.Tensor, int, str, Any]]
    """Optimizer state other than tensors: (parameter, optimizer index, key, packed value)."""
    buffers: list[torch.Tensor]
    placements: dict[int, Placement]
    """By `id()` of a parameter, its placement and that of its optimizer state; the others are
    replicated."""

    def placement(self, param: torch.Tensor) -> Placement:
        """Where the elements of a parameter are, and those of its optimizer state."""
        return self.placements.get(id(param), REPLICATED)

    @property
    def replicated_params(self) -> list[torch.Tensor]:
        """Parameters that all ranks have alike."""
        return [p for p in self.params if self.placement(p) is REPLICATED]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Parameters, then optimizer state."""
        return [*self.params, *(s[0] for s in self.state)]

    def nbytes(self) -> tuple[int, int]:
        """Bytes of parameters and optimizer state: striped ones, and every rank's own."""
        of_param = [(p, p) for p in self.params] + [(t, p) for t, p, _, _ in self.state]
        own = sum(t.nbytes for t, p in of_param if self.placement(p) is PER_RANK)
        return sum(t.nbytes for t, _ in of_param) - own, own


class Root(NamedTuple):
    """A dict that refers to parts of the state, besides much else."""

    held: dict[str, Any]
    parts: list[tuple[str, Any]]
    """Keys, and the objects there; `NOT_THERE` for a key that the dict lacks."""


NOT_THERE = object()


class Structure(NamedTuple):
    """The objects that decide which tensors the state has, and which objects a version queries."""

    typed: list[object]
    """Objects whose classes matter."""
    tagged: list[dict[Any, Any]]
    """Dicts whose contents matter."""
    empty: list[dict[Any, Any]]
    """Dicts that matter once they have contents."""
    lists: list[list[Any]]
    sets: list[set[str]]
    modules: list[Root]
    optimizers: list[Root]
    groups: list[Root]
    asks_none: bool
    """True if no module and no optimizer has more than its tensors and its groups."""


def root_of(held: dict[str, Any], keys: Iterable[str]) -> Root:
    """A root with the parts that are there now."""
    return Root(held, [(key, held.get(key, NOT_THERE)) for key in keys])


def _root_of_module(module: torch.nn.Module) -> Root:
    held, keys = vars(module), ["_parameters", "_modules", "_buffers"]
    keys += ["_non_persistent_buffers_set"] if module._buffers else []
    keys += ["state_dict"] if "state_dict" not in held else []
    return root_of(held, keys)


_OF_OPTIMIZER = ("state", "param_groups", "state_dict", *STATE_DICT_HOOKS)


def _is_plain(optimizer: Any) -> bool:
    """True if state and groups are attributes of the object itself."""
    kind = type(optimizer)
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and {"state", "param_groups"} <= vars(optimizer).keys()
        and not hasattr(kind, "state")
        and not hasattr(kind, "param_groups")
    )


def _names_of(kind: type) -> Any:
    """The dict of a class, of which Python shows only a view; None if it is not found."""
    return next(iter(gc.get_referents(vars(kind))), None)


class TrainingState:
    """Names and finds everything that a checkpoint holds. Holds references, copies nothing."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        extra: Mapping[str, Any] | None = None,
        extra_per_rank: Mapping[str, Any] | None = None,
        reduced: Sequence[torch.Tensor] | None = None,
        untrained: Sequence[torch.Tensor] = (),
    ) -> None:
        """`reduced`, `untrained`: see the methods of `Adapter`."""
        self.model = unwrap(model)
        for given in optimizers.values():
            refuse_optimizer(given)
        self.given = dict(optimizers)
        """The user's optimizers."""
        found = expand(optimizers)
        self.optimizers = found.optimizers
        """Optimizers with stored state, also those inside of others, see `optimizers.expand`."""
        self.steppers, self.hollow, self.outer = found.steppers, found.hollow, found.outer
        """See `optimizers.Expanded`."""
        self.optimizer_tree = OptimizerTree(self.optimizers, self.name_of)
        self.extra = named_objects("extra", extra)
        self.extra_per_rank = named_objects("extra_per_rank", extra_per_rank)
        self.routed = RoutedState()
        """Files that the program keeps beside the state."""
        self.notes: list[str] = []
        """Warnings for the user, found when the state was checked."""
        self.torn = False
        """True when a restore started to change the state and did not complete."""
        self.looks = 0
        """Number of times that the structure was looked up."""
        self.placements = Placements(reduced, untrained)
        self._modules: list[torch.nn.Module] = []
        self._attributes: list[dict[str, Any]] = []
        """Those of the modules; read faster from there."""
        self._buffer_slots: list[tuple[dict[str, Any], str]] = []
        self._buffer_dicts: list[dict[str, Any]] = []
        self._buffer_sizes: list[int] = []
        self._with_buffers: list[torch.nn.Module] = []
        self._buffer_names: list[Any] = []
        """Names of the buffers of each of these modules, and those left out."""
        self._names: dict[int, str] = {}
        self._of_model: dict[int, str] = {}
        self._looked_up: tuple[list[Any], list[Any]] = [], []
        """The result of `_contents` when the modules were looked up."""
        self._orphans: list[str] = []
        self._renamed: list[str] = []
        self.first_options = {
            label: {*GROUP_KEYS_NOT_STORED}.union(*optimizer.param_groups)
            for label, optimizer in self.optimizers.items()
        }
        """Keys that param groups had at the start. Others belong to the version that has them."""
        self.first_buffers = module_attributes.buffer_kinds(self.model)
        """See `module_attributes`."""
        self.trained_first = {
            f"model/{n}": p.requires_grad for n, p in named_parameters(self.model)
        }
        """Whether each parameter required a gradient at the start."""
        self.options = Options(self.model)
        self.refresh_names()

    def refresh_names(self, whole: bool = True) -> None:
        """Look up the modules and parameter names again, after a structural change. Not `whole`:
        the modules only if one of them, or a parameter, was replaced since the last time."""
        self.looks += 1
        self.optimizer_tree.look_again()
        before = self._of_model
        if whole or not self._modules_stand():
            self._modules = list(self.model.modules())
            self._attributes = list(map(vars, self._modules))
            self._buffer_sizes = []
            self._find_extra_states()
            self.options.look_up()
            self._of_model = {id(p): n for n, p in named_parameters(self.model)}
            self._looked_up = self._contents()
        self._names = dict(self._of_model)
        for label, optimizer in self.optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                for i, param in enumerate(group["params"]):
                    self._names.setdefault(id(param), f"{label}.group{g}.param{i}")
        here, held = self._of_model, self._names
        self._orphans += [n for i, n in before.items() if i in held and i not in here]
        self._renamed += [f"{n} (now {here[i]})" for i, n in before.items() if here.get(i, n) != n]

    def _contents(self) -> tuple[list[Any], list[Any]]:
        """The modules' dicts of parameters and children, with their values; their sizes and
        keys."""
        held = self.module_containers()
        values = chain.from_iterable(map(dict.values, held))
        return [*held, *values], [*map(len, held), *chain.from_iterable(held)]

    def _modules_stand(self) -> bool:
        objects, names = self._contents()
        then, its_names = self._looked_up
        return (
            names == its_names
            and len(objects) == len(then)
            and all(map(is_, objects, then))
            and self.module_states.stand()
        )

    def new_orphans(self) -> list[str]:
        """Former names of parameters that left the model while an optimizer still steps them; each
        is returned once."""
        found, self._orphans = self._orphans, []
        return found

    def new_renamed(self) -> list[str]:
        """Parameters that the model has under another name now; each is returned once."""
        found, self._renamed = self._renamed, []
        return found

    def _find_extra_states(self) -> None:
        self.module_states = ModuleStates(self.model)
        if MODULE_STATES in self.extra and self.module_states:
            raise ConfigError(
                f"extra[{MODULE_STATES!r}]: this name is reserved, choose another one"
            )
        found = ExtraStates(self.model)
        if isinstance(self.extra.get(EXTRA_STATES, found), ExtraStates):  # else: the user's own
            self.extra[EXTRA_STATES] = found
            if not found:
                del self.extra[EXTRA_STATES]

    def look_again(self) -> None:
        """At a boundary: look up modules again if their way of saving has changed."""
        if not self.module_states.stand():
            self._find_extra_states()

    # --- walking -------------------------------------------------------------------------------

    def walk(self) -> Walk:
        """Collect the tensors. For a new layout only: see `containers` for the quick check."""
        params = {id(p): p for m in self._modules for p in m._parameters.values() if p is not None}
        state: list[tuple[torch.Tensor, torch.Tensor, int, str]] = []
        odd: list[tuple[torch.Tensor, int, str, Any]] = []
        for index, optimizer in enumerate(self.optimizers.values()):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    params.setdefault(id(param), param)
                    for key, value in _named_values(optimizer.state.get(param, _NOTHING)):
                        if isinstance(value, torch.Tensor) and tree_codec.is_plain(value):
                            state.append((value, param, index, key))
                            continue
                        # LBFGS keeps lists of tensors: these are striped, the list itself is odd.
                        entries = tree_codec.Entries()
                        try:
                            node = tree_codec.pack(value, key, entries)
                            for path, tensor in entries.found:
                                tree_codec.refuse_tensor(tensor, path)
                        except UnsupportedStateError as error:
                            self.optimizer_tree.leave(index, param, key, error)
                            continue
                        state += [(tensor, param, index, path) for path, tensor in entries.found]
                        odd.append((param, index, key, node))
        places = self.placements.of(params.values(), self._modules, self.name_of)
        held = {id(b): b for b in self.live_buffers() if b is not None}
        return Walk(list(params.values()), state, odd, list(held.values()), places)

    def drop_gradients(self) -> None:
        """Set all gradients to None, as in a new process: the next backward pass would add to the
        gradients of an iteration that a restore has undone."""
        modules = (p for m in self._modules for p in m._parameters.values() if p is not None)
        groups = (
            group for optimizer in self.optimizers.values() for group in optimizer.param_groups
        )
        for param in (*modules, *(p for group in groups for p in group["params"])):
            param.grad = None

    def changed_by_forward(self) -> set[int]:
        """`id()` of the parameters that the forward pass changes."""
        params = [*self.model.parameters()]
        changed = self.placements.changed_by_forward(params, self._modules, self.name_of)
        return {*map(id, changed)}

    def forward_changes(self, patterns: str) -> None:
        """See `Placements.forward_changes`."""
        self.placements.forward_changes(patterns, self._names.values())

    def cuda_device(self) -> torch.device | None:
        """The CUDA device of the model, if there is one."""
        if not torch.cuda.is_initialized():
            return None
        found = (p.device for module in self._modules for p in module.parameters() if p.is_cuda)
        return next(found, None)

    def containers(self) -> list[dict[Any, Any]]:
        """The dicts that hold all `Walk.tensors`, in an order that depends only on structure.

        A plan stays valid while these dicts and their values are the same objects. That check costs
        some 30 nanoseconds a tensor, a walk twenty times as much.
        """
        found = self.module_containers()
        for label, optimizer in self.optimizers.items():
            if label in self.optimizer_tree.with_others:
                kept: dict[Any, Any] = optimizer.state
                found += [v for k, v in kept.items() if isinstance(k, torch.Tensor)]
            else:
                found += optimizer.state.values()
        return found

    def objects(self) -> Structure | None:
        """What decides `containers`, groups, `buffer_slots`, and which objects a version queries;
        None if these depend on more."""
        modules, without_hooks = self.module_states.looked_at()
        optimizers = [*self.optimizers.values()]
        same = len(modules) == len(self._modules) and all(map(is_, modules, self._modules))
        if not (same and self.module_states.stand() and all(map(_is_plain, optimizers))):
            return None
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        classes = [kind for optimizer in optimizers for kind in type(optimizer).__mro__]
        extra = [*self.extra.values(), *self.extra_per_rank.values()]
        hooks = [vars(each).get(key) for each in optimizers for key in STATE_DICT_HOOKS]
        return Structure(
            typed=[*modules, *optimizers, *extra],
            tagged=[
                *self.containers(),
                *map(_own_buffers, self._attributes),
                self.optimizers,
                self.extra,
                self.extra_per_rank,
                *(optimizer.state for optimizer in optimizers),
                *map(_names_of, classes),
            ],
            empty=[*without_hooks, *(each for each in hooks if each is not None and not each)],
            lists=[o.param_groups for o in optimizers] + [group["params"] for group in groups],
            sets=[m._non_persistent_buffers_set for m in modules if m._buffers],
            modules=[*map(_root_of_module, modules)],
            optimizers=[root_of(vars(each), _OF_OPTIMIZER) for each in optimizers],
            groups=[root_of(group, ("params",)) for group in groups],
            asks_none=not self.module_states.asks() and self.optimizer_tree.has_no_more(),
        )

    def module_containers(self) -> list[dict[Any, Any]]:
        """The modules' part of `containers`, which comes first in it."""
        return [*map(_own_parameters, self._attributes), *map(_own_modules, self._attributes)]

    def has_buffers(self) -> bool:
        """True if a module has a buffer, or a place for one."""
        return any(map(_own_buffers, self._attributes))

    def live_buffers(self) -> list[torch.Tensor | None]:
        """Tensors in the `buffer_slots`; a shared tensor occurs several times."""
        return [held.get(name) for held, name in self.buffer_slots()]

    def buffer_slots(self) -> list[tuple[dict[str, Any], str]]:
        """Places of all persistent buffers; the same list object while the places are the same."""
        dicts = [*map(_own_buffers, self._attributes)]
        sizes = [*map(len, dicts)]
        if sizes != self._buffer_sizes or not all(map(is_, dicts, self._buffer_dicts)):
            # A module without buffers leaves out no name.
            self._buffer_dicts, self._buffer_sizes = dicts, sizes
            self._with_buffers = [m for m in self._modules if m._buffers]
            self._buffer_names = []
        names = [
            part
            for module in self._with_buffers
            for part in (list(module._buffers), module._non_persistent_buffers_set)
        ]
        if names != self._buffer_names:
            self._buffer_names = [type(part)(part) for part in names]
            self._buffer_slots = [
                (m._buffers, name)
                for m in self._with_buffers
                for name in m._buffers
                if name not in m._non_persistent_buffers_set
            ]
        elif not names and self._buffer_slots:
            self._buffer_slots = []
        return self._buffer_slots

    # --- naming (at layout time only) ----------------------------------------------------------

    def name_of(self, param: torch.Tensor) -> str:
        """Fully qualified name of a parameter, without wrappers' prefixes."""
        name = self._names.get(id(param))
        if name is None:
            self.refresh_names()
            name = self._names[id(param)]
        return name

    def params_by_name(self) -> dict[str, torch.Tensor]:
        """The inverse of `name_of`, for all parameters."""
        groups = (g for o in self.optimizers.values() for g in o.param_groups)
        params: tuple[torch.Tensor, ...] = (
            *self.model.parameters(),
            *(p for g in groups for p in g["params"]),
        )
        return {self.name_of(param): param for param in params}

    def held_by(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of the state's parameters that an optimizer, any one, holds."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        mine = {id(p) for p in self.model.parameters()}
        mine.update(
            id(p) for o in self.optimizers.values() for g in o.param_groups for p in g["params"]
        )
        return [self.name_of(p) for p in held if id(p) in mine]

    def keeps_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """True for an optimizer of the state, and for a wrapper that shares the state of one."""
        state = getattr(optimizer, "state", None)
        return any(o is optimizer or o.state is state for o in self.optimizers.values())

    def entries(self, walk: Walk) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, tensor, its parameter) of all `walk.tensors`; checks them."""
        names = {id(p): self.name_of(p) for p in walk.params}
        labels = list(self.optimizers)
        named = [(f"model/{names[id(p)]}", p, p) for p in walk.params]
        named += [(f"{labels[i]}/{names[id(p)]}/{k}", t, p) for t, p, i, k in walk.state]
        refuse_same_names([name for name, *_ in named])
        pairs = [(name, tensor) for name, tensor, _ in named]
        tree_codec.refuse_any_in_place(pairs)
        if self.buffer_slots():
            pairs += [(f"buffer/{n}", b) for n, b in named_buffers(self.model)]
        refuse_several_gpus([(name, tensor.device) for name, tensor in pairs])
        return named

    def buffer_entries(self, walk: Walk) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of all persistent buffers; checks them."""
        if not walk.buffers:
            return []
        names = {id(b): n for n, b in named_buffers(self.model)}
        named = [(f"buffer/{names[id(b)]}", b) for b in walk.buffers]
        for name, tensor in named:
            tree_codec.refuse_in_place(tensor, name)
        return named

    def structure(self) -> dict[str, Any]:
        """The parts that change only with the layout: optimizer classes and groups' members."""
        return {
            label: {
                "class": class_name(optimizer),
                "groups": [[self.name_of(p) for p in g["params"]] for g in optimizer.param_groups],
            }
            for label, optimizer in self.optimizers.items()
        }

    def tied(self) -> dict[str, str]:
        """Further names of tensors, see `names.other_names`."""
        held = [*chain.from_iterable(map(dict.values, self.module_containers())), self.model]
        held += chain.from_iterable(map(dict.values, map(_own_buffers, self._attributes)))
        there = [id(each) for each in held if each is not None]
        # Where each is in one place only, it has one name only.
        return other_names(self.model) if len({*there}) < len(there) else {}

    def group_sizes(self) -> list[int]:
        """Number of parameters in each group, of all optimizers."""
        return [len(g["params"]) for o in self.optimizers.values() for g in o.param_groups]

    def group_members(self) -> list[torch.Tensor]:
        """Parameters of all groups, one group after the other."""
        return [p for o in self.optimizers.values() for g in o.param_groups for p in g["params"]]

    def refuse_odd_keys(self) -> None:
        """Raise UnsupportedStateError for optimizer state that `walk` leaves out."""
        for optimizer in self.optimizers.values():
            refuse_odd_keys(optimizer)

    # --- the users' and the modules' part of the rank tree -------------------------------------

    def pack_extra(self, which: Mapping[str, Any], arena: tree_codec.Arena) -> dict[str, Any]:
        """The `state_dict()`s of the user's objects."""
        return {name: pack_extra(name, obj, arena) for name, obj in which.items()}

    def pack_module_states(self, arena: tree_codec.Arena) -> dict[str, Any]:
        """The modules' own states, stored with the user's objects; empty when there are none."""
        found = self.module_states.pack(arena.keep)
        return {MODULE_STATES: found} if found else {}


_own_parameters = itemgetter("_parameters")
_own_modules, _own_buffers = itemgetter("_modules"), itemgetter("_buffers")
_NOTHING: dict[str, Any] = {}
_orders: dict[tuple[Any, ...], list[str]] = {}
"""By keys in their own order, the same keys sorted; all are names. Optimizers have few."""
_MAX_ORDERS = 100


def _named_values(values: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """A parameter's state by name, in order. Keys that cannot be part of a name go together."""
    keys = tuple(values)
    order = _orders.get(keys)
    if order is not None:
        return [(key, values[key]) for key in order]
    named = {key: value for key, value in values.items() if isinstance(key, str) and "/" not in key}
    found = sorted(named.items())
    if len(named) == len(values) and len(_orders) < _MAX_ORDERS:
        _orders[keys] = [key for key, _ in found]
    if len(named) < len(values):
        found.append((NAMELESS, {k: v for k, v in values.items() if k not in named}))
    return found


def value_of(values: Mapping[Any, Any], key: str) -> Any:
    """The value that `Walk` names `key`, from a parameter's state; None if there is none."""
    return dict(_named_values(values)).get(key) if key == NAMELESS else values.get(key)


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    """Class name; a dynamic subclass of an adapter has the name of the class that it wraps."""
    return class_name(optimizer)


def label_optimizers(
    optimizers: torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer],
) -> dict[str, torch.optim.Optimizer]:
    """Names for one optimizer, several, or a dict of them; the names go into the checkpoint.

    Raises ConfigError for invalid names, and UnsupportedStateError for anything but an optimizer or
    for an empty collection: the steps of optimizers number the versions, so there would never be
    one.
    """
    if isinstance(optimizers, torch.optim.Optimizer) or stands_for_some(optimizers):
        return {"optimizer": optimizers}  # type: ignore[dict-item]
    if isinstance(optimizers, Mapping):
        for label in optimizers:
            if not label or "/" in str(label):
                raise ConfigError(f"optimizer name {label!r}: it must be text without '/'")
            if label in ("model", "buffer"):
                raise ConfigError(f"optimizer name {label!r} is taken; choose another one")
        labelled = dict(optimizers)
    elif isinstance(optimizers, torch.nn.Module) or not isinstance(optimizers, Iterable):
        raise UnsupportedStateError(
            f"the optimizer is a {type(optimizers).__name__}; give a torch.optim.Optimizer, a list "
            f"of them, or a dict of names and optimizers. {ORDER}"
        )
    else:
        labelled = {f"optimizer{i}": o for i, o in enumerate(optimizers)}
    if not labelled:
        raise UnsupportedStateError(
            f"the {type(optimizers).__name__} of optimizers is empty: checkpoints are taken "
            "between the steps of optimizers. Give all optimizers that train the model"
        )
    return labelled
