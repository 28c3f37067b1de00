"""Staging: the copies at the boundary itself, and the snapshot that copies the rest.

The next forward pass changes some state (buffers, generators, schedulers, the loader's position):
it is copied here, on the training thread. Parameters and optimizer state follow layer by layer.

A save on demand, and the save at the end, store the state of that moment. `is_unmoved` compares
the sealed version of the last boundary with the live state, bit for bit: if they are equal, no new
version is needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol, get_args

import torch

from tierckpt import _process
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import Manifest, digest, digest_at
from tierckpt.format.records import VersionFacts
from tierckpt.format.shard_file import rank_state_blocks
from tierckpt.group import Group
from tierckpt.state import tree_codec
from tierckpt.state.extras import DataPlace, Generator, LoaderPlace, PlainValues
from tierckpt.state.process_state import RNG_KINDS, Switches, pack_rng
from tierckpt.state.training_state import FILES, TrainingState
from tierckpt.state.tree_codec import EncodedTree
from tierckpt.storage.slot_pool import SlotPool
from tierckpt.storage.slots import Slot

from . import copy_engine
from .at_boundary import Copied, SmallVersions
from .copy_plan import CopyPlan, PlanWatch, copy_parts
from .engine import Engine, NativeEngine, SnapshotError, TorchEngine
from .snapshot import ChooseSlot, Snapshot

if TYPE_CHECKING:
    from .cuda import CudaLane

__all__ = ["Staging", "is_unmoved"]


def is_unmoved(
    plan: CopyPlan, encoded: EncodedTree, manifest: Manifest, image: memoryview | bytes
) -> bool:
    """True if the live state (`plan` and `encoded`) equals a shard (`manifest` and `image`).

    The state must not change or be copied during the call, and `plan.buffers` must be staged. Uses
    up `encoded`. Reads this rank's part of the state once, and needs memory for one block.
    """
    start, low = manifest.header_bytes, manifest.header_bytes + plan.layout.nbytes
    room_bytes = manifest.image_bytes - low
    if encoded.nbytes != manifest.rank_state_bytes or room_bytes < encoded.nbytes:
        return False
    scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    there = memoryview(image)
    # Small parts change most often, so they are compared first.
    return (
        _same_tree(encoded, there[low : low + room_bytes], scratch)
        and plan.encoded_header(room_bytes) == there[:start]
        and _same_blocks(plan, manifest, scratch)
    )


def _same_tree(encoded: EncodedTree, there: memoryview, scratch: torch.Tensor) -> bool:
    low = 0
    for nbytes in rank_state_blocks(len(there)):
        part = scratch[:nbytes]
        encoded.copy(low, part)
        if part.numpy().data != there[low : low + nbytes]:
            return False
        low += nbytes
    return True


def _same_blocks(plan: CopyPlan, manifest: Manifest, scratch: torch.Tensor) -> bool:
    for index, block in enumerate(plan.layout.blocks):
        part = scratch[: block.nbytes]
        copy_parts(part, *plan.source(index))
        # The first digest is the header's.
        if digest(part.numpy().data) != digest_at(manifest.digests, 1 + index):
            return False
    return True


WHOLE_BOUNDARIES = 2
"""Boundaries at which all ranks look at all tensors, after the votes said that a version was lost.
All ranks read these votes at the same boundary."""


LEAVES_WEIGHTS = (
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    DataPlace,
    PlainValues,
    *get_args(Generator),
)
"""Objects with a `state_dict()`, or a state, but no reason to look at the weights again."""


def normal_mode() -> contextlib.AbstractContextManager[object]:
    """Context for copies that are kept: an evaluation may have set inference mode."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


class Slots(Protocol):
    """Chooses slots for the versions of a job."""

    def at_boundary(
        self, facts: VersionFacts, blocks: int, image_bytes: int, usual: Slot | None
    ) -> Slot:
        """An unsealed slot of at least that size, for this boundary's version; `usual`: one that
        has it, and is preferred. Does not wait for votes. Raises NoSlotError, OSError."""
        ...

    def chooser(self, facts: VersionFacts) -> ChooseSlot:
        """The function that chooses a slot for this boundary's version."""
        ...


class Staging:
    """Makes the snapshots of one checkpointer. Training thread."""

    def __init__(
        self, state: TrainingState, group: Group, pool: SlotPool, desk: copy_engine.Desk | None
    ) -> None:
        self.plan: CopyPlan | None = None
        """Plan of the last snapshot; None before the first one and after a restore."""
        self.lane: CudaLane | None = None
        self._state, self._group, self._pool, self._desk = state, group, pool, desk
        self._switches = Switches()
        self._whole_boundaries = 0
        """Boundaries that look at all tensors."""
        self._apart = False
        """True while only this rank has a new plan: it takes no version until all ranks have read
        that one is lost, and look at all tensors."""
        self._adapter = self._tree = _NOTHING
        """The last adapter's node and tree. No plain dict or list in them is used again, so the
        same object has the same contents."""
        self._parts: tuple[Any, ...] = ()
        """The parts of that tree, see `_repeats`; empty if it has more, or may be unfinished."""
        self._rng: dict[str, Any] = {}
        """States of the generators, see `PlanWatch.rng_stands`."""
        self._groups: Any = {}
        """The last node of the groups' options, see `PlanWatch.groups_stand`."""
        self._judged: tuple[PlanWatch | None, bool] = None, False
        """See `_harmless`."""
        library = copy_engine.find() if desk is not None else None
        self._small = None if library is None else SmallVersions(library, pool)
        self._streams: tuple[dict[str, Any], tree_codec.Arena] | None = None
        self._failed: Exception | None = None
        """Error of the state's own objects within a step, where raising would end the training."""

    def keep_streams(self) -> None:
        """Copy the generators and the loader's position now, for the next snapshots.

        For a loop with its boundary at the forward pass: it draws the next batch before that.
        """
        self.drop_streams()
        try:
            objects = self._state.extra_per_rank.items()
            early = {n: o for n, o in objects if not isinstance(o, LoaderPlace)}
            self._streams = self._pack_own(early)  # a loader's position: see `_pack_loaders`
        except Exception as error:
            self._failed = error

    def drop_streams(self) -> None:
        """Make the next snapshot copy them at its own boundary."""
        self._streams = self._failed = None

    def forget(self) -> None:
        """Forget the plan and all copies, because the state was replaced."""
        self.plan = self._streams = self._failed = None
        self._apart, self._parts, self._judged = False, (), (None, False)
        if self._small is not None:
            self._small.forget()

    def take(
        self,
        facts: VersionFacts,
        levels: tuple[str, ...],
        adapter: Any,
        slots: Slots,
        on_done: Callable[[Snapshot | Copied], None],
        at_once: bool = False,
    ) -> Snapshot | Copied:
        """A snapshot of the current state, with nothing released yet; or, with `at_once`, a small
        version that is complete.

        Args:
            facts: those of its version.
            levels: where it goes.
            adapter: the result of `Adapter.pack`.
            slots: chooses one.
            on_done: called by the thread that ends the copy, not for a version that is complete.
            at_once: a version may be complete.

        Raises the errors of the state's own objects, and SnapshotError.
        """
        try:
            plan, node, arena = self.stage(adapter)
        finally:
            self._whole_boundaries = max(self._whole_boundaries - 1, 0)
        if at_once and self._small is not None:
            tree = node, arena.tensors
            copied = self._small.copy(facts, levels, plan, tree, slots.at_boundary)
            if copied is not None:
                return copied
        choose_slot, engine = slots.chooser(facts), self._engine(plan)
        return Snapshot(facts, plan, levels, node, arena, choose_slot, on_done, engine)

    def _engine(self, plan: CopyPlan) -> Engine:
        """The engine for a version that is taken now."""
        if plan.on_gpu:
            from . import cuda

            if self.lane is None:
                self.lane = cuda.CudaLane(plan.device)
                locks = cuda.PageLocks(plan.device, self._pool.on_notice)
                self._pool.on_map, self._pool.on_unmap = locks.lock, locks.unlock
            return cuda.CudaEngine(plan, self.lane)
        library = copy_engine.find() if self._desk is not None else None
        table = plan.table() if library is not None else None
        if library is None or table is None or self._desk is None:
            return TorchEngine(plan)
        return NativeEngine(library, plan, table, self._desk)

    def is_unmoved(self, manifest: Manifest, image: memoryview, adapter: Any) -> bool:
        """True if a snapshot taken now would equal this sealed one; nothing may be copied during
        the call. Raises the errors of the state's own objects."""
        plan, node, arena = self.stage(adapter, whole=True)
        return is_unmoved(plan, tree_codec.EncodedTree(node, arena), manifest, image)

    def stage(
        self, adapter: Any, whole: bool = False
    ) -> tuple[CopyPlan, tree_codec.Packed, tree_codec.Arena]:
        """Copy the rank's tree and the buffers, before the next forward pass changes them. `whole`:
        as in `_fitting_plan`. Nothing may be copied during the call. Raises the errors of the
        state's own objects, and SnapshotError."""
        if self._failed is not None:
            raise self._failed
        plan, state = self._fitting_plan(whole), self._state
        own, arena = self._own_now(plan.watch)
        options, switches = state.options.packed(), self._switches.packed(plan.on_gpu)
        parts = plan.watch, own["rng"], adapter, options, switches
        if self._repeats(plan.watch, parts):
            plan.buffers.stage()
            return plan, self._tree, arena
        self._parts = ()
        watch, modules = plan.watch, dict[str, Any]()
        quiet = watch is not None and watch.asks_none and self._harmless(watch)
        if not quiet:
            state.look_again()
            modules = state.pack_module_states(arena)
        if modules:  # a hook may have changed buffers
            plan = self._fitting_plan(whole)
        plan.buffers.stage()
        node = {
            **own,
            "odd": state.optimizer_tree.group_odd(plan.odd) if plan.odd else {},
            "groups": self._groups_now(watch if quiet else None, arena),
            "remainders": {} if quiet else state.optimizer_tree.pack_remainders(arena),
            "shared": plan.shared,
            "extra": {**state.pack_extra(state.extra, arena), **modules},
            "adapter": self._adapter_node(adapter),
        }
        node["switches"] = switches
        if options.node:
            node["options"] = options
        if state.routed.kept:
            node[FILES] = state.routed.pack(arena)
        if plan.first_kinds:
            node["began"] = plan.first_kinds
        if not quiet and (node["remainders"] or not self._leave_weights()):
            plan.read_counters()  # a state_dict() may swap weights and swap them back
        tree = self._packed(node)
        self._parts = () if FILES in node else parts
        return plan, tree, arena

    def _repeats(self, watch: PlanWatch | None, parts: tuple[Any, ...]) -> bool:
        """True if the tree is that of the last version: it has nothing but these parts, and options
        of groups, which have not changed."""
        state = self._state
        return (
            watch is not None
            and watch.groups_stand
            and watch.asks_none
            and not (state.extra or state.extra_per_rank or state.routed.kept)
            and bool(self._parts)
            and all(map(is_, parts, self._parts))
        )

    def _leave_weights(self) -> bool:
        objects = chain(self._state.extra.values(), self._state.extra_per_rank.values())
        return all(isinstance(each, LEAVES_WEIGHTS) for each in objects)

    def _harmless(self, watch: PlanWatch) -> bool:
        """As `_leave_weights`: the watch sees other objects."""
        if watch is not self._judged[0]:
            self._judged = watch, self._leave_weights()
        return self._judged[1]

    def _groups_now(self, watch: PlanWatch | None, arena: tree_codec.Arena) -> Any:
        """The node of the groups' options: the last one if they have not changed."""
        if watch is None or not watch.groups_stand:
            self._groups = self._state.optimizer_tree.pack_groups(arena.keep)
            if watch is not None:  # else a value may change inside
                watch.groups_stand = isinstance(self._groups, tree_codec.Packed)
        return self._groups

    def _adapter_node(self, value: Any) -> tree_codec.Packed:
        if value is not self._adapter.node:
            self._adapter = tree_codec.Packed(value)
        return self._adapter

    def _packed(self, node: dict[str, Any]) -> tree_codec.Packed:
        """Return the tree; the one of the last version if no part is another object."""
        parts = {key: _NOTHING if part == {} else part for key, part in node.items()}
        last = self._tree.node
        if parts.keys() != last.keys() or not all(map(is_, parts.values(), last.values())):
            self._tree = tree_codec.Packed(parts)
        return self._tree

    def _fitting_plan(self, whole: bool = False) -> CopyPlan:
        """The plan, a new one if the last does not fit. `whole`: look at all tensors.

        Raises SnapshotError if other ranks may not have a new plan as well: see `PlanCheck`. They
        learn from the votes that versions are lost, and then look at all tensors, too.
        """
        before, state = self.plan, self._state
        whole = whole or self._whole_boundaries > 0
        if before is None or not before.fits(state, whole):
            with _process.collector_paused():
                state.refresh_names(whole=False)
                plan = CopyPlan(state, state.walk(), self._group.rank, self._group.size)
            alone = before is not None and not whole and before.differs_alone(plan)
            self._apart = self._apart or (alone and self._group.size > 1)
            self.plan = before = plan
        if self._apart:
            raise SnapshotError(
                "a tensor got another length in its place, which other ranks may not have seen; "
                "the next versions will have it"
            )
        return before

    def look_at_all(self) -> None:
        """The votes said that a version was lost: the next boundaries look at all tensors."""
        self._whole_boundaries, self._apart = WHOLE_BOUNDARIES, False

    def _own_now(self, watch: PlanWatch | None) -> tuple[dict[str, Any], tree_codec.Arena]:
        """Generators and each rank's own objects: as kept by `keep_streams`, else as of now. Kept
        ones stay until the next step, because the same state may be requested twice."""
        if self._streams is None:
            return self._pack_own(self._state.extra_per_rank, watch)
        kept, tensors = self._streams[0], self._streams[1].tensors
        own = {**kept, "extra_per_rank": {**kept["extra_per_rank"]}}
        arena = tree_codec.Arena(*tensors)
        self._pack_loaders(own, arena)
        return own, arena

    def _pack_own(
        self, objects: Mapping[str, Any], watch: PlanWatch | None = None
    ) -> tuple[dict[str, Any], tree_codec.Arena]:
        rng = self._rng_now(watch)
        arena = tree_codec.Arena(rng["python"], rng["numpy"], rng["torch"], *rng["cuda"])
        places = _places_of_streams(len(arena.tensors))
        extra = self._state.pack_extra(objects, arena) if objects else {}
        return {"rng": places, "extra_per_rank": extra}, arena

    def _rng_now(self, watch: PlanWatch | None) -> dict[str, Any]:
        """States of the generators; those that are known to be the last ones are not read."""
        if watch is None:
            return pack_rng(self._state.cuda_device())
        if len(watch.rng_stands) < len(RNG_KINDS):
            known = {kind: self._rng[kind] for kind in watch.rng_stands}
            device = None if "cuda" in known else self._state.cuda_device()
            self._rng, watch.rng_stands = pack_rng(device, known), {*watch.known_rng}
        return self._rng

    def _pack_loaders(self, own: dict[str, Any], arena: tree_codec.Arena) -> None:
        """Pack the loaders of a loop without `step()`: the batches drawn since the step count, and
        a scheduler may have been stepped since."""
        for name, obj in self._state.extra_per_rank.items():
            if isinstance(obj, LoaderPlace):
                packed = tree_codec.pack(obj.state_dict(in_forward=True), name, arena.keep)
                own["extra_per_rank"][name] = packed

    def close(self) -> None:
        """Release the device's resources; only when no copier works any more."""
        if self.lane is not None:
            self.lane.close()
        self.plan = None
        if self._small is not None:
            self._small.forget()


_NOTHING = tree_codec.Packed({})


@functools.cache
def _places_of_streams(count: int) -> tree_codec.Packed:
    """The node of the generators' states, which are the first tensors of a tree."""
    python, numpy, cpu, *cuda = ({tree_codec.TAG: "raw", "v": n} for n in range(count))
    return tree_codec.Packed({"python": python, "numpy": numpy, "torch": cpu, "cuda": cuda})
