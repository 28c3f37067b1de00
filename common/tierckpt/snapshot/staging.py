"""Capture: what the boundary copies at once, and the snapshot that copies the rest.

State that the next forward pass changes (buffers, generators, schedulers, the loader's position) is
copied here, on the training thread; parameters and optimizer state follow layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tierckpt.format.facts import VersionFacts
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.resumable_loader import ResumableLoader
from tierckpt.state import tree_codec
from tierckpt.state.rng import pack_rng
from tierckpt.state.training_state import TrainingState
from tierckpt.storage.memory.slot_pool import SlotPool
from tierckpt.storage.memory.slots import Slot

from .comparison import is_unmoved
from .copy_plan import CopyPlan
from .snapshot import Snapshot

if TYPE_CHECKING:
    from .cuda import CudaLane


class Staging:
    """Makes the snapshots of one checkpointer. Training thread."""

    def __init__(self, state: TrainingState, group: Group, pool: SlotPool) -> None:
        self.plan: CopyPlan | None = None
        """Of the state as it was last; None before the first snapshot and after a restore."""
        self.lane: CudaLane | None = None
        self._state, self._group, self._pool = state, group, pool
        self._streams: tuple[dict[str, Any], tree_codec.Arena] | None = None
        self._failed: Exception | None = None
        """Raised by the state's own objects within a step, where it would end the training."""

    def keep_streams(self) -> None:
        """Take the generators and the loader's position as of now for the next snapshots.

        For a loop whose boundary is a forward pass: it draws the next batch before that.
        """
        self.drop_streams()
        try:
            objects = self._state.extra_per_rank.items()
            early = {n: o for n, o in objects if not isinstance(o, ResumableLoader)}
            self._streams = self._pack_own(early)  # a loader's place: see `_pack_loaders`
        except Exception as error:
            self._failed = error

    def drop_streams(self) -> None:
        """The next snapshot takes them as they are then."""
        self._streams = self._failed = None

    def forget(self) -> None:
        """The state is another one now."""
        self.plan = self._streams = self._failed = None

    def take(
        self,
        facts: VersionFacts,
        levels: tuple[str, ...],
        adapter: Any,
        choose_slot: Callable[[int, int], Slot],
        on_done: Callable[[Snapshot], None],
    ) -> Snapshot:
        """A snapshot of the present state, of which nothing is released yet.

        Args:
            facts: those of its version.
            levels: where it goes.
            adapter: the result of `Adapter.pack`.
            choose_slot: see `Snapshot`; called by the thread that copies, as is `on_done`.

        Raises what the state's own objects raise, and SnapshotError.
        """
        plan, node, arena = self._stage(adapter)
        parts = (facts, plan, levels, node, arena, choose_slot, on_done)
        if plan.device.type == "cuda":
            from . import cuda

            if self.lane is None:
                self.lane = cuda.CudaLane(plan.device)
                locks = cuda.PageLocks(plan.device, self._pool.on_notice)
                self._pool.on_map, self._pool.on_unmap = locks.lock, locks.unlock
            return cuda.CudaSnapshot(*parts, lane=self.lane)
        return Snapshot(*parts)

    def is_unmoved(self, manifest: Manifest, image: memoryview, adapter: Any) -> bool:
        """Whether a snapshot taken now would be the one that was sealed so, with nothing being
        copied. Raises what the state's own objects raise."""
        plan, node, arena = self._stage(adapter)
        return is_unmoved(plan, tree_codec.EncodedTree(node, arena), manifest, image)

    def _stage(self, adapter: Any) -> tuple[CopyPlan, dict[str, Any], tree_codec.Arena]:
        """Copy aside what the next forward pass changes: the rank's tree and the buffers."""
        if self._failed is not None:
            raise self._failed
        plan, state = self._fitting_plan(), self._state
        own, arena = self._own_now()
        state.look_again()
        modules = state.pack_module_states(arena)
        if modules:  # where a hook of theirs has changed buffers
            plan = self._fitting_plan()
        plan.buffers.stage()
        node = {
            **own,
            "odd": state.group_odd(plan.odd),
            "groups": state.pack_groups(arena.keep),
            "remainders": state.pack_remainders(arena),
            "shared": plan.shared,
            "extra": {**state.pack_extra(state.extra, arena), **modules},
            "adapter": adapter,
        }
        if plan.began:
            node["began"] = plan.began
        return plan, node, arena

    def _fitting_plan(self) -> CopyPlan:
        if self.plan is None or not self.plan.fits(self._state):
            self._state.refresh_names()
            self.plan = CopyPlan(
                self._state, self._state.walk(), self._group.rank, self._group.size
            )
        return self.plan

    def _own_now(self) -> tuple[dict[str, Any], tree_codec.Arena]:
        """Generators and what is each rank's own; where they were kept, as they were then, until
        the next step: the same state may be asked for twice."""
        if self._streams is None:
            return self._pack_own(self._state.extra_per_rank)
        kept, tensors = self._streams[0], self._streams[1].tensors
        own = {**kept, "extra_per_rank": {**kept["extra_per_rank"]}}
        arena = tree_codec.Arena()
        arena.tensors = [*tensors]
        self._pack_loaders(own, arena)
        return own, arena

    def _pack_own(self, objects: Mapping[str, Any]) -> tuple[dict[str, Any], tree_codec.Arena]:
        arena = tree_codec.Arena()
        packed = {
            "rng": pack_rng(self._state.cuda_device()),
            "extra_per_rank": self._state.pack_extra(objects, arena),
        }
        return packed, arena

    def _pack_loaders(self, own: dict[str, Any], arena: tree_codec.Arena) -> None:
        """Of a loop without `step()`: what was drawn since the step counts, and a scheduler may
        have been stepped since."""
        for name, obj in self._state.extra_per_rank.items():
            if isinstance(obj, ResumableLoader):
                packed = tree_codec.pack(obj.state_dict(in_forward=True), name, arena.keep)
                own["extra_per_rank"][name] = packed

    def close(self) -> None:
        """Give the device's things back; when no copier is at work any more."""
        if self.lane is not None:
            self.lane.close()
        self.plan = None


__all__ = ["Staging"]
