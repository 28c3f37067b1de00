"""The steps that a journal repeats: which ones, their gradients as bytes, and proof of equality.

A step is repeated with the same gradients, options, state and parameters. So it must be a function
of these alone: no random numbers, no closure called several times, no clock. All other
state is refused by name.

A frame of the journal holds a shard file in the format of every version: striped tensors are the
gradients, per-rank tensors the buffers. So readers, checksums and tools are those of versions.

The digest proves that repeated steps are the same, of all parameters and all optimizer state. It
is computed beside the training, between a boundary and the next change of the state, as a version
is copied.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import xxhash
from msgspec import Struct

from tierckpt._text import some
from tierckpt.config import Config
from tierckpt.errors import ConfigError, UnsupportedStateError
from tierckpt.format.ids import PAGE_BYTES, round_up
from tierckpt.format.layout import REPLICATED, Layout, plan_layout
from tierckpt.format.shard_file import encode_header, rank_state_blocks
from tierckpt.snapshot.copy_plan import CopyPlan
from tierckpt.state import tree_codec
from tierckpt.state.training_state import TrainingState, optimizer_class

__all__ = [
    "GRADIENT",
    "INLINE_BYTES",
    "REPEATABLE",
    "SETTING",
    "CopiedTree",
    "DigestPlan",
    "DigestWork",
    "GradientImages",
    "Image",
    "ImageMaker",
    "SmallStateImages",
    "Tree",
    "UnjournaledError",
    "check_support",
    "digest_of",
    "gradients_of",
]


GRADIENT = "gradient/"
"""Start of the names of gradients; the rest is the parameter's name."""
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


class Image(Struct, frozen=True):
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
        base = data.data_ptr()
        for piece, address in zip(self.layout.pieces, addresses, strict=True):
            ctypes.memmove(base + piece.offset, address, piece.nbytes)
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
        bases = {GRADIENT + name: gradient.data_ptr() for name, gradient in named}
        addresses = [
            bases[piece.spec.name] + piece.start * piece.spec.itemsize_bytes
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


REPEATABLE = frozenset(
    (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"),
        *("RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""Optimizers of torch with such functions as steps; a test repeats a step of each."""
SETTING = "local_journal_steps"
StepClass = Callable[[torch.optim.Optimizer], type[torch.optim.Optimizer]]
"""Returns the class with the `step` that changes an optimizer's parameters (see `Adapter`)."""


def check_support(
    config: Config, state: TrainingState, repeats_steps: bool, step_class: StepClass
) -> None:
    """Raise ConfigError or UnsupportedStateError, on all ranks alike, if the journal cannot repeat
    this training. `repeats_steps` and `step_class`: see `Adapter`."""
    if not repeats_steps:
        raise ConfigError(
            f"{SETTING} is {config.local.journal_steps}, and elastic jobs have no journal. Leave "
            "the setting out; memory_every_steps=1, the default, takes a version at every step"
        )
    for label, optimizer in state.optimizers.items():
        if state.given.get(label) is optimizer and _is_known(step_class(optimizer)):
            _refuse_unsteady(state, optimizer)
            continue
        kind = f"{type(optimizer).__module__}.{optimizer_class(optimizer)}"
        raise UnsupportedStateError(
            f"{SETTING}: optimizer {label!r} is a {kind}, and it is not known that its step can be "
            f"repeated bit for bit. Those of torch.optim whose step can: "
            f"{', '.join(sorted(REPEATABLE))}. Use one of these, or leave the setting out"
        )
    walk = state.walk()
    devices = [str(param.device) for param in walk.params if not param.is_cpu]
    if devices:
        raise UnsupportedStateError(
            f"{SETTING}: the model is on {devices[0]}, and the journal is for models on the CPU so "
            "far. Leave the setting out"
        )
    apart = [p for p in walk.params if walk.placement(p) is not REPLICATED]
    if apart:
        raise UnsupportedStateError(
            f"{SETTING}: each rank has its own {some([state.name_of(p) for p in apart])}, whose "
            "values do not follow from the gradients of all ranks. Leave the setting out"
        )


def _refuse_unsteady(state: TrainingState, optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters with steps that are no function of the state (seen in torch 2.13)."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    momentous = [g for g in optimizer.param_groups if g["fused"] and g["momentum"]]
    params = [param for group in momentous for param in group["params"]]
    if reduced := [p for p in params if p.dtype in (torch.bfloat16, torch.float16)]:
        raise UnsupportedStateError(
            f"{SETTING}: the fused SGD of torch gives the momentum of "
            f"{some([state.name_of(p) for p in reduced])} ({reduced[0].dtype}) other bits each "
            "time, as it reads memory that was never set. Make the optimizer with fused=False, or "
            "leave the setting out"
        )


def _is_known(kind: type[torch.optim.Optimizer]) -> bool:
    return kind.__name__ in REPEATABLE and getattr(torch.optim, kind.__name__, None) is kind


INLINE_BYTES = 1024 * 1024
"""Less than this is hashed at the boundary: waking a thread takes as long."""


class DigestPlan:
    """The memory of this rank's stripes. Valid while its `CopyPlan` fits, which keeps it alive."""

    def __init__(self, plan: CopyPlan) -> None:
        """Raises UnjournaledError for memory that cannot be read as it is."""
        self.plan = plan
        self.parts: list[Any] = []
        for piece, source in zip(plan.layout.pieces, plan.sources, strict=True):
            if piece.placement is not REPLICATED or not piece.nbytes:
                continue
            if not source.is_cpu or not tree_codec.is_dense(source):
                raise UnjournaledError(f"{piece.spec.name} is not dense, or not on the CPU")
            base = source.data_ptr() + piece.start * piece.spec.itemsize_bytes
            self.parts.append((ctypes.c_char * piece.nbytes).from_address(base))
        self.nbytes = sum(map(ctypes.sizeof, self.parts))

    def compute(self) -> int:
        """The digest of the present state."""
        return digest_of(self.parts)


def digest_of(parts: Sequence[Any]) -> int:
    """xxh3_64 of these parts, one after the other. Lets other threads run."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return found.intdigest()


class DigestWork:
    """One digest, computed by the copier. Methods name their threads."""

    slot = None
    """As of a snapshot that claimed none, see `guard_memory_moves`."""

    def __init__(self, digest: DigestPlan, then: Callable[[int], None]) -> None:
        """`then` receives the result, on the thread that computes it."""
        self.plan = digest.plan
        self.error: BaseException | None = None
        """The reason why there is no digest, once it is over."""
        self._digest, self._then = digest, then
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """True when the state is not read any more. Any thread."""
        return self._over.is_set()

    def run(self) -> None:
        """Compute it; the copier."""
        self._then(self._digest.compute())
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """Record that there is none; the copier."""
        self.error = error
        self._over.set()

    def barrier(self) -> None:
        """Wait until the state may change. Any thread."""
        self._over.wait()

    def wait_done(self) -> bool:
        """As `barrier`."""
        return self._over.wait()
