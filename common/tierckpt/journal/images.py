"""Images: the gradients of a step, and the small state of a boundary, as the bytes of a shard.

A frame of the journal holds a shard file in the format of every version: striped tensors are the
gradients, per-rank tensors the buffers. So readers, checksums and tools are those of versions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tierckpt.format.ids import PAGE_BYTES, round_up
from tierckpt.format.layout import Layout, plan_layout
from tierckpt.format.shard_file import encode_header, rank_state_blocks
from tierckpt.snapshot.copy_plan import CopyPlan
from tierckpt.state import tree_codec
from tierckpt.state.training_state import TrainingState

GRADIENT = "gradient/"
"""Begin of the names of gradients; the rest is the parameter's name."""
SCALED = (
    "a fused optimizer unscales the gradients inside its step, where they cannot be read. Make the "
    "optimizer with fused=False"
)


class UnjournaledError(Exception):
    """The reason why a step cannot be journaled; reported by an event, never raised in the loop."""


class MakeRoom(Protocol):
    """Returns bytes for an image's data, of that length."""

    def __call__(self, nbytes: int, /) -> torch.Tensor:
        """Allocate."""
        ...


class Tree(Protocol):
    """A `tree_codec.EncodedTree`, or a `CopiedTree`."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        ...

    def copy(self, low: int, target: torch.Tensor) -> None:
        """Fill `target` with the bytes from `low` on, and with zeros after the last one."""
        ...


class CopiedTree:
    """The bytes of a tree that an image has; an `EncodedTree` gives them only once."""

    def __init__(self, source: torch.Tensor) -> None:
        """`source`: the bytes, in the image."""
        self.source = source

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.source.numel()

    def copy(self, low: int, target: torch.Tensor) -> None:
        """As `Tree` says."""
        part = self.source[low : low + target.numel()]
        target[: part.numel()].copy_(part)
        target[part.numel() :].zero_()


@dataclass(frozen=True)
class Image:
    """A shard's bytes, in two parts."""

    header: bytes
    data: torch.Tensor
    """Bytes after the header."""
    block_bytes: tuple[int, ...]
    """Lengths of the blocks of `data`."""
    tree: CopiedTree
    """The tree in `data`."""


class ImageMaker:
    """Makes images of one layout; the header is kept while its lengths are the same. Training
    thread."""

    def __init__(self, layout: Layout, structure: Mapping[str, Any]) -> None:
        self.layout = layout
        self._structure = structure
        self._header = (-1, b"", tuple[int, ...]())

    def make(self, addresses: Sequence[int], tree: Tree, room: MakeRoom) -> Image:
        """Copy the pieces, from the memory at `addresses` on, and the tree."""
        low = self.layout.nbytes
        data_bytes = round_up(low + tree.nbytes, PAGE_BYTES)
        if self._header[0] != data_bytes:
            header, _ = encode_header(self.layout, data_bytes - low, self._structure)
            blocks = [block.nbytes for block in self.layout.blocks]
            blocks += rank_state_blocks(data_bytes - low)
            self._header = data_bytes, header, tuple(blocks)
        data = room(data_bytes)
        begin = data.data_ptr()
        for piece, address in zip(self.layout.pieces, addresses, strict=True):
            ctypes.memmove(begin + piece.offset, address, piece.nbytes)
        tree.copy(0, data[low:])
        copied = CopiedTree(data[low : low + tree.nbytes])
        return Image(self._header[1], data, self._header[2], copied)


class GradientImages:
    """Images of one optimizer's gradients. Training thread."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._kinds: list[Any] = []
        self._maker: ImageMaker | None = None

    def make(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        tree: Tree,
        room: MakeRoom,
    ) -> Image:
        """This rank's stripes of these gradients. Raises UnjournaledError if one cannot be
        journaled."""
        kinds = [(n, g.dtype, g.shape, g.stride(), g.layout, g.device) for n, g in named]
        if self._maker is None or kinds != self._kinds:
            for name, gradient in named:
                _refuse_gradient(name, gradient)
            specs = [tree_codec.spec_of(g, GRADIENT + n) for n, g in named]
            self._maker = ImageMaker(plan_layout(specs, [], self._rank, self._ranks), {})
            self._kinds = kinds
        begins = {GRADIENT + name: gradient.data_ptr() for name, gradient in named}
        addresses = [
            begins[piece.spec.name] + piece.start * piece.spec.itemsize_bytes
            for piece in self._maker.layout.pieces
        ]
        return self._maker.make(addresses, tree, room)


def gradients_of(
    state: TrainingState, label: str
) -> tuple[list[tuple[str, torch.Tensor]], tree_codec.EncodedTree]:
    """The gradients of the optimizer of that label, by name, and its options. Raises
    UnjournaledError if they are not what its step reads."""
    optimizer = state.optimizers[label]
    if getattr(optimizer, "grad_scale", None) is not None or (
        getattr(optimizer, "found_inf", None) is not None
    ):
        raise UnjournaledError(SCALED)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    named = [(state.name_of(p), p.grad) for p in params if p.grad is not None]
    arena = tree_codec.Arena()
    groups = state.optimizer_tree.pack_groups(arena.keep)
    if isinstance(groups, tree_codec.Packed):
        groups = groups.node
    node = {"label": label, "groups": groups[label], "params": len(params)}
    return named, tree_codec.EncodedTree(node, arena)


def _refuse_gradient(name: str, gradient: torch.Tensor) -> None:
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
        raise UnjournaledError(f"the gradient of {name} is no dense tensor ({gradient.layout})")
    if not gradient.is_cpu:
        raise UnjournaledError(f"the gradient of {name} is on {gradient.device}")
    if not tree_codec.is_dense(gradient):
        raise UnjournaledError(
            f"the gradient of {name} has gaps in its memory, or elements that share it. Set a "
            "copy before the step: param.grad = param.grad.contiguous()"
        )


class SmallStateImages:
    """Images of buffers and the rank tree. Training thread."""

    def __init__(self) -> None:
        self._plan: CopyPlan | None = None
        self._maker: ImageMaker | None = None

    def make(self, plan: CopyPlan, tree: Tree, room: MakeRoom) -> Image:
        """The buffers that `plan` has staged, and the tree. Raises UnjournaledError if the plan has
        parameters that cannot be repeated."""
        self._follow(plan)
        assert self._maker is not None
        staged = plan.buffers.staged
        addresses = [staged[p.spec.name].data_ptr() for p in self._maker.layout.pieces]
        return self._maker.make(addresses, tree, room)

    def _follow(self, plan: CopyPlan) -> None:
        if plan is self._plan:
            return
        if plan.own:
            raise UnjournaledError(f"each rank has its own {plan.own[0][0]}")
        layout = plan_layout([], plan.buffers.specs, plan.layout.rank, plan.layout.ranks)
        self._maker = ImageMaker(layout, plan.structure)
        self._plan = plan


__all__ = [
    "GRADIENT",
    "CopiedTree",
    "GradientImages",
    "Image",
    "ImageMaker",
    "SmallStateImages",
    "Tree",
    "UnjournaledError",
    "gradients_of",
]
