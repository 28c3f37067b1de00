"""The plan of a snapshot: live source tensors and target offsets, block by block, and its check.

One `CopyPlan` serves many snapshots. At every boundary only a few C loops run, over lists that
were made once.

A plan has the addresses of its sources, so it must be given up when a tensor is replaced, moves,
or changes its shape, strides or type in place. `PlanCheck` compares at every boundary, on all
ranks, the dicts that hold the tensors. A rank looks into the tensors themselves only if it copies
them: that takes a few misses of the cache for each. It does so once, and reads autograd's version
counters on the way.

So a rank that copies no part of a tensor does not see that it changed in its place. That matters
only if its length changed, as the layout depends on it: see `Staging`.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, islice
from operator import attrgetter, eq, is_
from typing import Any

import numpy as np
import torch

from tierckpt._text import some
from tierckpt.format.layout import (
    BLOCK_BYTES,
    PER_RANK,
    REPLICATED,
    Layout,
    plan_layout,
)
from tierckpt.format.shard_file import MODEL, encode_header
from tierckpt.state import module_attributes, tree_codec
from tierckpt.state.names import named_buffers
from tierckpt.state.process_state import rng_memory
from tierckpt.state.training_state import NOT_THERE, Root, TrainingState, Walk, root_of
from tierckpt.storage.slots import Slot

from .copy_engine import Table
from .tensor_memory import (
    Guard,
    Memory,
    TensorRecords,
    records_of,
    requires_grad,
    tags_of,
)

__all__ = ["PlanCheck", "PlanWatch", "addresses", "is_small", "same_objects"]


FEW = 128
"""In a state of at most this many tensors every rank looks into all, see `is_small`."""
CHUNK = 512
"""Tensors that are looked into together, while a core's caches have them."""


def is_small(tensors: Sequence[torch.Tensor]) -> bool:
    """True if every rank looks into all of these tensors, not only into those that it copies."""
    return len(tensors) <= FEW


class PlanCheck:
    """The state as it was when a plan was made. Training thread, except `counters` and `moved`."""

    def __init__(self, state: TrainingState, walk: Walk, copied: Sequence[torch.Tensor]) -> None:
        """`copied`: the striped tensors of which this rank copies a part; all striped tensors of a
        small state."""
        self._containers = state.containers()
        self._has_odd = bool(walk.odd)
        # With odd state, the optimizers' values need another check.
        settled = len(state.module_containers()) if self._has_odd else len(self._containers)
        self._dicts = _Dicts(self._containers, settled, state.options.attributes)
        self._groups, self._members = state.group_sizes(), state.group_members()
        self._tensors = walk.tensors
        self._state_keys = [key for *_, key in walk.state]
        self.odd = walk.odd
        """Odd state, as of the last call of `holds`."""
        self.aliases = list(map(torch.Tensor.detach, copied))
        """Aliases of `copied`. They keep the storages that the plan copies from, whatever becomes
        of the tensors."""
        self.copied = _view_of([*copied], self.aliases)
        """The look into these tensors."""
        self._others: _ByMemory | _ByMethods | None = None
        if is_small(self._tensors):
            known = set(map(id, copied))
            if others := [t for t in self._tensors if id(t) not in known]:
                self._others = _view_of(others)
        self.baseline = self.copied.counters()
        """Autograd's version counters at the last boundary, see `counters`."""
        self.lengths = [*map(torch.Tensor.numel, self._tensors)]
        """Numbers of elements of all tensors when the plan was made."""
        self.only_here = False
        """True if `holds` found a change that other ranks may not see."""

    def holds(self, state: TrainingState, whole: bool = False) -> bool:
        """At a boundary: True if the state is the same. Reads the counters. `whole`: look at the
        lengths of all tensors."""
        self.only_here = False
        for_all = (
            same_objects(state.containers(), self._containers)
            and self._dicts.stand()
            and state.group_sizes() == self._groups
            and same_objects(state.group_members(), self._members)
            and not (whole and self.has_other_lengths())
            and (not self._has_odd or self._odd_holds(state))
        )
        if not for_all:
            return False
        found = self.copied.stand()
        self.only_here = found is None and not is_small(self._tensors)
        if found is None or (self._others is not None and self._others.stand() is None):
            return False
        self.baseline = found
        return True

    def has_other_lengths(self) -> bool:
        """True if a tensor, of all, has another length now."""
        return [*map(torch.Tensor.numel, self._tensors)] != self.lengths

    @property
    def touched(self) -> Iterable[int]:
        """Numbers of the modules with attributes that may have changed between the last two calls
        of `holds`."""
        return self._dicts.touched

    @property
    def trained(self) -> bytes:
        """1 for each copied tensor that requires a gradient, else 0; as of the last call of
        `holds`. The same object while nothing has changed."""
        return self.copied.trained

    def views(self) -> list[_ByMemory | _ByMethods]:
        """Of all tensors that are looked into, the copied ones first. Raises ValueError if more is
        looked at."""
        if self._has_odd:
            raise ValueError("odd state is walked")
        return [self.copied, *([] if self._others is None else [self._others])]

    def _odd_holds(self, state: TrainingState) -> bool:
        """Compare odd state: numbers are new objects at every step, and lists hold tensors."""
        walk = state.walk()
        self.odd = walk.odd
        return (
            same_objects(walk.tensors, self._tensors)
            and [key for *_, key in walk.state] == self._state_keys
        )

    def counters(self) -> bytes:
        """Autograd's version counters of the tensors that are copied, 32 bits each, 0 for inference
        tensors; empty if the memory of one was moved or freed since the plan was made. Any
        thread."""
        return self.copied.counters()

    def moved(self) -> list[int]:
        """Numbers of the tensors, of those that are copied, with other memory than when the plan
        was made. Any thread."""
        return self.copied.moved()


class _Dicts:
    """The dicts that hold the tensors. Only those with another tag are compared, if this Python has
    tags."""

    touched: Iterable[int]
    """Numbers of the `watched` dicts that may have changed, as of the last call of `stand`."""

    def __init__(
        self,
        held: list[dict[Any, Any]],
        settled: int,
        watched: Sequence[dict[str, Any]] = (),
    ) -> None:
        """The values of the dicts from number `settled` on may change; those of `watched` are only
        looked for."""
        self._contents = [
            _Contents(held[low : low + CHUNK], settled - low) for low in range(0, len(held), CHUNK)
        ]
        self._count, self.touched = len(held), range(len(watched))
        self._tags = tags_of([*held, *watched])

    def stand(self) -> bool:
        if self._tags is None:
            return all(contents.stand() for contents in self._contents)
        changed = self._tags.changed()
        self.touched = [number - self._count for number in changed if number >= self._count]
        numbers = {number // CHUNK for number in changed if number < self._count}
        if not all(self._contents[number].stand() for number in numbers):
            return False
        self._tags.accept()
        return True


class _Contents:
    """Some dicts, with their keys and values."""

    def __init__(self, held: list[dict[Any, Any]], settled: int) -> None:
        """The values of the dicts from number `settled` on may change."""
        self._held, self._sizes = held, [*map(len, held)]
        self._keys, self._values = _keys(held), [*_values(held[: max(settled, 0)])]

    def stand(self) -> bool:
        values = islice(_values(self._held), len(self._values))
        return (
            [*map(len, self._held)] == self._sizes
            and _keys(self._held) == self._keys
            and all(map(is_, values, self._values))
        )


def _view_of(
    tensors: list[torch.Tensor], aliases: list[torch.Tensor] | None = None
) -> _ByMemory | _ByMethods:
    """The faster way to look into tensors that works here."""
    aliases = list(map(torch.Tensor.detach, tensors)) if aliases is None else aliases
    records = records_of(tensors)
    if records is None:
        return _ByMethods(tensors, aliases)
    return _ByMemory(tensors, aliases, records)


class _ByMemory:
    """Looks into tensors by their memory, see `tensor_memory`."""

    def __init__(
        self, tensors: list[torch.Tensor], aliases: list[torch.Tensor], records: TensorRecords
    ) -> None:
        self._tensors, self._aliases, self.records = tensors, aliases, records

    @property
    def trained(self) -> bytes:
        return self.records.trained

    def stand(self) -> bytes | None:
        """The version counters, if all tensors are as they were."""
        if self.records.look() is not None and not self._stand_by_methods():
            return None
        return self.records.counted()

    def _stand_by_methods(self) -> bool:
        """A second opinion: torch may keep more in that memory than what matters here."""
        if self.records.counters() is None or not _same_tensors(self._tensors, self._aliases):
            return False
        again = records_of(self._tensors)
        if again is None or again.look() is not None:
            return False
        self.records = again
        return True

    def counters(self) -> bytes:
        return self.records.counters() or b""

    def moved(self) -> list[int]:
        return self.records.moved()


class _ByMethods:
    """Looks into tensors by torch's methods, some at a time."""

    records = None

    def __init__(self, tensors: list[torch.Tensor], aliases: list[torch.Tensor]) -> None:
        self._tensors, self._aliases = tensors, aliases
        self._addresses, self._kinds = addresses(aliases), known_kinds(tensors)
        self._uncounted = any(map(torch.Tensor.is_inference, tensors))
        self._chunks = [slice(low, low + CHUNK) for low in range(0, len(tensors), CHUNK)]
        self.trained = bytes(map(requires_grad, tensors))

    def stand(self) -> bytes | None:
        """The version counters, if all tensors are as they were."""
        if (trained := bytes(map(requires_grad, self._tensors))) != self.trained:
            self.trained = trained
        return self._counted(self._tensors, self._same_kinds)

    def counters(self) -> bytes:
        return self._counted(self._aliases) or b""

    def moved(self) -> list[int]:
        both = zip(addresses(self._aliases), self._addresses, strict=True)
        return [number for number, (now, then) in enumerate(both) if now != then]

    def _counted(
        self,
        tensors: list[torch.Tensor],
        stand: Callable[[list[torch.Tensor], slice], bool] = lambda *_: True,
    ) -> bytes | None:
        """The version counters, if all have the known addresses, and those of a chunk `stand`."""
        found = []
        for chunk in self._chunks:
            these = tensors[chunk]
            if addresses(these) != self._addresses[chunk] or not stand(these, chunk):
                return None
            found.append(self._counters_of(these))
        return b"".join(found)

    def _counters_of(self, tensors: list[torch.Tensor]) -> bytes:
        if not self._uncounted:
            return array("I", map(_version_counter, tensors)).tobytes()
        counted = (0 if t.is_inference() else t._version for t in tensors)
        return array("I", counted).tobytes()

    def _same_kinds(self, tensors: list[torch.Tensor], chunk: slice) -> bool:
        return all(map(eq, kinds(tensors), self._kinds[chunk]))


def _same_tensors(tensors: list[torch.Tensor], aliases: list[torch.Tensor]) -> bool:
    """True if all have the storages, shapes, strides and types of their aliases."""
    return addresses(tensors) == addresses(aliases) and all(
        t.untyped_storage()._cdata == a.untyped_storage()._cdata and kind == known
        for t, a, kind, known in zip(tensors, aliases, kinds(tensors), kinds(aliases), strict=True)
    )


_version_counter = attrgetter("_version")


_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def kinds(tensors: Sequence[torch.Tensor]) -> Iterable[tuple[Any, ...]]:
    """Shape, strides and type of each tensor."""
    return zip(
        map(_shape, tensors),
        map(torch.Tensor.stride, tensors),
        map(_dtype, tensors),
        strict=True,
    )


def known_kinds(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Kinds, equal ones as one object: one for each tensor would not fit into a core's cache."""
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    return [known.setdefault(kind, kind) for kind in kinds(tensors)]


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Addresses of the tensors' memory."""
    return list(map(torch.Tensor.data_ptr, tensors))


def _keys(containers: list[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(containers))


def _values(containers: list[dict[Any, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, containers))


def same_objects(now: list[Any], then: list[Any]) -> bool:
    """True if both lists have the same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now, then))


class PlanWatch:
    """All that `CopyPlan.fits` looks at, in one call of the C library: what a boundary costs is the
    number of objects that it touches, as the training's own step came between.

    Attributes of modules and options of groups may change at every step. Then only the objects in
    these few dicts are looked at again.
    """

    def __init__(self, state: TrainingState, views: Sequence[_ByMemory | _ByMethods]) -> None:
        """`views`: of the tensors, with the copied ones first. Everything must be as it was when
        the plan was made. Raises ValueError where memory alone does not decide."""
        objects = state.objects()
        if objects is None:
            raise ValueError("the state depends on more than these objects")
        if any(view.records is None and view._tensors for view in views):
            raise ValueError("tensors are looked into by their methods")
        records = [view.records for view in views]
        self._counted, self._looks, self._found = records[0], state.looks, state.module_states
        self._optimizers = [(each, vars(each)) for each in state.optimizers.values()]
        self.asks_none = objects.asks_none
        """True if no module and no optimizer is queried for a version."""
        fixed, followed = Memory(), Memory()
        fixed.types(objects.typed)
        fixed.tags(objects.tagged)
        fixed.lengths(objects.empty)
        for each in objects.lists:
            fixed.members(each)
        for names in objects.sets:
            fixed.names(names)
        options = {id(held): number for number, held in enumerate(state.options.attributes)}
        self._of: list[tuple[Root, Any]] = [
            *((root, options.get(id(root.held))) for root in objects.modules),
            *((root, None) for root in objects.optimizers),
            *((root, GROUP) for root in objects.groups),
        ]
        """Of each followed part, the dict to look at. Then, for a module, its number in `Options`;
        for a group, `GROUP`; for the state of a generator, its kind."""
        memory = rng_memory()
        for kind, its in memory.items():
            self._of += [(root_of(held, (name,)), None) for held, name in its.names]
            self._of += [(root_of(held, ()), kind) for held in its.tagged]
            fixed.blocks(its.fixed, its.kept)
        followed.tags([root.held for root, _ in self._of])
        for kind, its in memory.items():
            followed.blocks(its.spans, its.kept)
            self._of += [(root_of({}, ()), kind) for _ in its.spans]
        self.known_rng = frozenset(memory)
        """Kinds of generators that may be in `rng_stands`."""
        self.rng_stands: set[str] = set()
        """Kinds of generators that have not changed since the user of the plan added them here."""
        self.groups_stand = False
        """True while the options of all groups have not changed since the user set it to True."""
        self._guard = Guard([each for each in records if each is not None], fixed, followed)

    def stand(self, state: TrainingState) -> bytes | None:
        """The version counters, if all is as it was; takes in changed options of modules."""
        if state.looks != self._looks or state.module_states is not self._found:
            return None
        for optimizer, held in self._optimizers:
            if vars(optimizer) is not held:
                return None
        changed = self._guard.look()
        if changed is None or (changed and not self._may_change(changed, state)):
            return None
        return b"" if self._counted is None else self._counted.counted()

    def _may_change(self, changed: list[int], state: TrainingState) -> bool:
        touched = []
        for number in changed:
            (held, parts), of = self._of[number]
            for key, part in parts:
                if held.get(key, NOT_THERE) is not part:
                    return False
            if of is GROUP:
                self.groups_stand = False
            elif type(of) is str:
                self.rng_stands.discard(of)
            elif of is not None:
                touched.append(of)
        if touched:
            state.options.look(touched)
        return True


GROUP = object()
MAX_PAUSE = 64
"""Limit of boundaries without a `PlanWatch`, after one did not fit."""


Part = Callable[[int, int], torch.Tensor]
"""Bytes of elements `[low, high)` of a piece."""


HEADERS = 4
"""Limit of cached headers, one for each length of the rank's tree, and for each set of trained
parameters."""


def _growth_bytes(rank_state_bytes: int) -> int:
    """Room for the tree to grow. Small trees vary by digits from step to step, and lists of metrics
    grow; a header of another length takes time to make, and its slot may not fit."""
    return min(rank_state_bytes // 4, 64 * 1024) + rank_state_bytes // 64


class CopyPlan:
    """A layout with its live tensors: the sources of all copies.

    Valid until the state's structure changes, or a tensor moves or is replaced in its memory: see
    `fits`. All work at a boundary runs in C loops over lists made here, so thousands of small
    tensors do not stall the training.
    """

    def __init__(self, state: TrainingState, walk: Walk, rank: int, ranks: int) -> None:
        state.refuse_odd_keys()
        entries = state.entries(walk)
        specs = tree_codec.specs_of([(name, tensor) for name, tensor, _ in entries])
        elsewhere = [t for t in walk.tensors if not t.is_cpu]
        self._dense = not elsewhere and all(map(tree_codec.is_dense, walk.tensors))
        """All striped tensors are on the CPU and dense."""
        own: list[tuple[str, torch.Tensor]] = []
        if walk.placements:
            own = [(n, t) for n, t, p in entries if walk.placement(p) is PER_RANK]
            entries = [entry for entry in entries if walk.placement(entry[2]) is REPLICATED]
            striped = {name for name, *_ in entries}
            specs = [spec for spec in specs if spec.name in striped]
        self.buffers = _Buffers([*state.buffer_entries(walk), *own])
        self.layout: Layout = plan_layout(specs, self.buffers.specs, rank, ranks)
        self.structure, self._tied = state.structure(), state.tied()
        self.first_kinds: dict[str, Any] = {}
        if state.has_buffers():
            self.first_kinds = module_attributes.changed_kinds(state.first_buffers, state.model)
        self.shared = tree_codec.Packed(state.optimizer_tree.shared(walk.state))
        self.device = next((t.device for t in elsewhere if t.is_cuda), torch.device("cpu"))
        self.own = own
        """Name and tensor of parameters, and their optimizer state, that each rank has alone."""
        self.watch: PlanWatch | None = None
        """Set if the last call of `fits` found all by it, or made it."""
        self._pause = self._longest_pause = 1
        """Boundaries until a `PlanWatch` is made: more, each time that one did not fit."""
        self._buffer_slots, self._held = state.buffer_slots(), state.live_buffers()
        pieces = {p.spec.name for p in self.layout.pieces if p.placement is REPLICATED}
        everything = is_small(walk.tensors)
        copied = [(n, t) for n, t, _ in entries if everything or n in pieces]
        self._copied = [n for n, _ in copied]
        self._check = PlanCheck(state, walk, [t for _, t in copied])
        state.options.look(self._check.touched)
        self._own_params = [(n, t) for n, t in own if n.startswith(MODEL)]
        self._trained_first = state.trained_first
        self.trained = self._trained_now()
        """1 for each copied tensor that requires a gradient, else 0; as of the last call of
        `fits`."""
        self._headers: dict[tuple[int, bytes], tuple[bytes, int]] = {}
        self.own_blocks = [i for i, b in enumerate(self.layout.blocks) if b.placement is PER_RANK]
        self.striped_blocks = {*range(len(self.layout.blocks))}.difference(self.own_blocks)
        self._params = [(n, id(p)) for n, _, p in entries]
        aliases = dict(zip(self._copied, self._check.aliases, strict=True))
        self.sources = [
            self.buffers.staged[piece.spec.name]
            if piece.placement is PER_RANK
            else aliases[piece.spec.name]
            for piece in self.layout.pieces
        ]
        """The tensor of each piece: an alias, which keeps the memory alive if the live tensor gets
        another one."""
        self._block_sources: dict[int, tuple[list[torch.Tensor], list[int]]] = {}
        self._table: Table | None = None
        self._storages: set[int] | None = None
        """See `reads`."""

    @functools.cached_property
    def on_gpu(self) -> bool:
        """True if tensors are on a CUDA device."""
        return self.device.type == "cuda"

    @functools.cached_property
    def blocks_of(self) -> dict[int, list[int]]:
        """Striped blocks by the `id()` of the parameter to which their data belongs. Made with the
        first release of a single layer: a small state has none."""
        found: dict[int, list[int]] = {}
        param_of, pieces = dict(self._params), self.layout.pieces
        for index, block in enumerate(self.layout.blocks):
            if block.placement is PER_RANK:
                continue
            for number, _, _ in block.parts:
                blocks = found.setdefault(param_of[pieces[number].spec.name], [])
                if not blocks or blocks[-1] != index:
                    blocks.append(index)
        return found

    def _bytes_of(self, index: int) -> torch.Tensor | Part:
        """A piece's bytes: a view, or a function that copies if no view is possible."""
        piece, tensor = self.layout.pieces[index], self.sources[index]
        if tree_codec.is_dense(tensor):
            return tree_codec.as_bytes(tree_codec.flat(tensor)[piece.start : piece.stop])
        return _row_major(tensor, piece.start)  # strided with gaps: made row-major by the copy

    @property
    def odd(self) -> list[Any]:
        """Odd state, as of the last call of `fits`."""
        return self._check.odd

    def differs_alone(self, new: CopyPlan) -> bool:
        """True if other ranks may still have this plan's layout, which `new` has not: `fits` found
        another length of a tensor in its place."""
        return self._check.only_here and self._check.lengths != new._check.lengths

    def fits(self, state: TrainingState, whole: bool = False) -> bool:
        """True while all tensors are the same objects, and those that this rank copies are at the
        same addresses, with the same kinds, as when the plan was made. `whole`: also compare the
        lengths of those that it does not copy."""
        # Without it until it has succeeded: it would not see a change again that an interrupt kept
        # from being taken in.
        watch, self.watch = self.watch, None
        if watch is not None:
            counters = watch.stand(state)
            if counters is not None and not (whole and self._check.has_other_lengths()):
                self._check.baseline, self.watch = counters, watch
                return True
            self._pause = self._longest_pause = min(2 * self._longest_pause, MAX_PAUSE)
        if not (self._check.holds(state, whole) and self._buffers_fit(state)):
            return False
        self.trained = self._trained_now()
        if touched := self._check.touched:
            state.options.look(touched)
        self._pause -= 1
        if self._pause <= 0:
            self._make_watch(state)
        return True

    def _make_watch(self, state: TrainingState) -> None:
        try:
            self.watch = PlanWatch(state, [*self._check.views(), self.buffers.view])
        except ValueError:
            self._pause = MAX_PAUSE

    def _trained_now(self) -> bytes:
        if not self._own_params:
            return self._check.trained
        return self._check.trained + bytes(requires_grad(t) for _, t in self._own_params)

    def trained_parameters(self) -> dict[str, int]:
        """Of each parameter that this rank stores a part of, `ShardHeader.trained`; as of the last
        call of `fits`."""
        names = [*self._copied, *(name for name, _ in self._own_params)]
        flags = zip(names, self.trained, strict=True)
        first = self._trained_first
        return {
            name: flag + 2 * first.get(name, flag) for name, flag in flags if name.startswith(MODEL)
        }

    def _buffers_fit(self, state: TrainingState) -> bool:
        """Accept buffers that were replaced by others of the same names and kinds."""
        slots = state.buffer_slots()
        held = [holder.get(name) for holder, name in slots]
        if slots is self._buffer_slots and same_objects(held, self._held) and self.buffers.stand():
            return True
        now = [(f"buffer/{name}", tensor) for name, tensor in named_buffers(state.model)]
        if not self.buffers.follow([*now, *self.own]):
            return False
        self._buffer_slots, self._held = slots, held
        return True

    @property
    def baseline(self) -> bytes:
        """The result of `counters` at the last call of `fits`."""
        return self._check.baseline

    def read_counters(self) -> None:
        """Read the baseline again, if other code has run since. Raises RuntimeError if that moved
        the memory of a tensor."""
        self._check.baseline = self._check.counters()
        if not self._check.baseline and (names := self.moved()):
            raise RuntimeError(f"{some(names)}: a state_dict() moved their memory")

    def reads(self, storage: torch.UntypedStorage) -> bool:
        """True if this plan copies from the memory of a storage. Any thread."""
        if self._storages is None:
            self._storages = {each.untyped_storage()._cdata for each in self.sources}
        return storage._cdata in self._storages

    def counters(self) -> bytes:
        """Autograd's version counters of the striped tensors that this rank copies: a cheap check
        for torn copies. Empty if the memory of one was moved or freed since the plan was made."""
        return self._check.counters()

    @property
    def records(self) -> TensorRecords | None:
        """Has the memory that `counters` looks into; None if that takes torch's methods."""
        return self._check.copied.records

    def changed_since(self, counters: bytes) -> list[str]:
        """Names of the tensors with changed counters."""
        both = zip(self._copied, _numbers(counters), _numbers(self.counters()), strict=True)
        return [name for name, then, now in both if then != now]

    def moved(self) -> list[str]:
        """Names of the tensors that have other memory than when the plan was made, which has
        freed the memory that this plan copies from. Any thread."""
        return [self._copied[number] for number in self._check.moved()]

    def header(self, rank_state_bytes: int) -> tuple[bytes, int]:
        """The shard's header and the length of its data, with some room for the tree to grow."""
        growth_bytes = _growth_bytes(rank_state_bytes)
        trained = self.trained
        for room, flags in self._headers:
            fits = rank_state_bytes <= room <= rank_state_bytes + 4 * growth_bytes
            if fits and flags == trained:
                return self._headers[room, flags]
        if len(self._headers) == HEADERS:
            del self._headers[next(iter(self._headers))]
        room = rank_state_bytes + growth_bytes
        self._headers[room, trained] = self._encode_header(room)
        return self._headers[room, trained]

    def encoded_header(self, room_bytes: int) -> bytes:
        """A new header, not cached, for a shard with `room_bytes` for the tree."""
        return self._encode_header(room_bytes)[0]

    def _encode_header(self, room_bytes: int) -> tuple[bytes, int]:
        trained = self.trained_parameters()
        return encode_header(self.layout, room_bytes, self.structure, self._tied, trained)

    def source(self, block: int) -> tuple[list[torch.Tensor], list[int]]:
        """The bytes of a block, in order, and their lengths."""
        known = self._block_sources.get(block)
        if known is not None:
            return known
        parts, views = [], True
        for index, low, high in self.layout.blocks[block].parts:
            piece, source = self.layout.pieces[index], self._bytes_of(index)
            if not isinstance(source, torch.Tensor):
                views = False
                parts.append(source(low, high))
                continue
            size = piece.spec.itemsize_bytes
            whole = high - low == piece.stop - piece.start
            parts.append(source if whole else source[low * size : high * size])
        found = (parts, [p.numel() for p in parts])
        if views:
            self._block_sources[block] = found
        return found

    def table(self) -> Table | None:
        """Addresses of all sources, for the copy engine; None if some are on another device, or
        have gaps. Right for as long as the plan fits, which keeps the memory alive as well."""
        staged = self.buffers.staged.values()
        if self._table is None and self._dense and all(each.is_cpu for each in staged):
            self._table = Table(*self.addresses())
        return self._table

    def addresses(self) -> tuple[np.ndarray, np.ndarray]:
        """Segments and blocks of a `Table`. Only dense sources have a right address."""
        pieces = self.layout.pieces
        sizes = np.array([p.spec.itemsize_bytes for p in pieces], np.uint64)
        starts = np.array([p.start for p in pieces], np.uint64)
        bases = np.array(addresses(self.sources), np.uint64) + starts * sizes
        blocks = self.layout.blocks
        parts = np.array([p for b in blocks for p in b.parts], np.uint64).reshape(-1, 3)
        piece, low, high = parts.T
        lengths = (high - low) * sizes[piece]
        segments = np.stack([bases[piece] + low * sizes[piece], lengths], axis=1)
        counts = [len(b.parts) for b in blocks]
        firsts = accumulate(counts, initial=0)
        rows = [
            (first, count, block.offset, block.nbytes)
            for first, count, block in zip(firsts, counts, blocks, strict=False)
        ]
        return segments, np.array(rows, np.uint64).reshape(-1, 4)


class _Buffers:
    """Staging memory of buffers, and of other tensors that differ between ranks: one tensor per
    dtype and device, filled by one call each."""

    def __init__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.specs = [tree_codec.spec_of(t, n) for n, t in named]
        self._live = [t for _, t in named]
        self.staged: dict[str, torch.Tensor] = {}
        """By name, flat in memory order."""
        self._batches: list[tuple[torch.Tensor, list[int]]] = []
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(self._live):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        for (dtype, device), members in kinds.items():
            sizes = [self._live[i].numel() for i in members]
            staging = torch.empty(sum(sizes), dtype=dtype, device=device)
            self._batches.append((staging, members))
            for i, part in zip(members, staging.split(sizes), strict=True):
                self.staged[named[i][0]] = part
        self._look()

    def _look(self) -> None:
        self.view = _view_of(self._live)
        self._flat = [tree_codec.flat(t) for t in self._live]
        self._views = addresses(self._flat) == addresses(self._live)

    def stand(self) -> bool:
        """True while the known buffers have the same addresses and kinds."""
        return not self._live or self.view.stand() is not None

    def follow(self, named: list[tuple[str, torch.Tensor]]) -> bool:
        """Use these buffers instead, if they have the same kinds; else return False. Raises
        UnsupportedStateError for one that cannot be stored."""
        for name, tensor in named:
            tree_codec.refuse_in_place(tensor, name)
        if [tree_codec.spec_of(t, n) for n, t in named] != self.specs:
            return False
        self._live = [t for _, t in named]
        self._look()
        return True

    def stage(self) -> None:
        """Copy the buffers aside, on their own devices."""
        if not self._views:  # the flat form of a buffer with gaps is a copy
            self._flat = [tree_codec.flat(t) for t in self._live]
        for staging, members in self._batches:
            torch.cat([self._flat[i] for i in members], out=staging)


def _numbers(counters: bytes) -> list[int]:
    return array("I", counters).tolist()


def _row_major(tensor: torch.Tensor, start: int) -> Part:
    """Function that copies a range of the piece from element `start` on."""
    return lambda low, high: tree_codec.as_bytes(
        tree_codec.row_major(tensor, start + low, start + high)
    )


def copy_parts(target: torch.Tensor, parts: list[torch.Tensor], sizes: list[int]) -> None:
    """Copy the result of `CopyPlan.source` to `target`, which has the same length."""
    if len(parts) == 1:
        target.copy_(parts[0])
    else:
        torch._foreach_copy_(list(target.split(sizes)), parts)


class Binding:
    """A view of a slot's image, which keeps it mapped."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.view = slot.image()
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    @functools.cached_property
    def tensor(self) -> torch.Tensor:
        """The image as bytes."""
        return torch.frombuffer(self.view, dtype=torch.uint8)

    def copy_block(self, plan: CopyPlan, block: int, start: int) -> memoryview:
        """Copy one block to `start` bytes past its offset (the header's length); returns it."""
        layout_block = plan.layout.blocks[block]
        low = start + layout_block.offset
        target = self.tensor.narrow(0, low, layout_block.nbytes)
        copy_parts(target, *plan.source(block))
        return self.view[low : low + layout_block.nbytes]

    def copy_tree(
        self, encoded: tree_codec.EncodedTree, start: int, end: int, block: int
    ) -> memoryview:
        """Copy one block of the rank's tree and of the zeros after it, which fill the bytes from
        `start` to `end`; returns it."""
        low = start + block * BLOCK_BYTES
        high = min(low + BLOCK_BYTES, end)
        encoded.copy(low - start, self.tensor[low:high])
        return self.view[low:high]
