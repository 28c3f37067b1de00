"""Digest: proof that repeated steps are the same, of all parameters and all optimizer state.

It is computed beside the training, between a boundary and the next change of the state, as a
version is copied.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from tierckpt.format.layout import REPLICATED
from tierckpt.snapshot.copy_plan import CopyPlan
from tierckpt.state import tree_codec

from .images import UnjournaledError

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
            begin = source.data_ptr() + piece.start * piece.spec.itemsize_bytes
            self.parts.append((ctypes.c_char * piece.nbytes).from_address(begin))
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
    """As of a snapshot that claimed none, see `memory_moves`."""

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


__all__ = ["INLINE_BYTES", "DigestPlan", "DigestWork", "digest_of"]
