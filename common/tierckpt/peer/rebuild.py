"""Lost shards from what survived of their group. Knows no transport and no files.

The restart path says how ranges of surviving shards and parities are read: from a slot, a mapped
file, from another node's agent, or out of a broadcast.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tierckpt.erasure import isal
from tierckpt.erasure.exchange_plan import Task, plan_rebuild
from tierckpt.erasure.kernels import Product
from tierckpt.erasure.parity_manifest import ParityManifest
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.verify import verify_shard

from .parity_file import Read
from .window_loop import window_bytes_of


def rebuild(
    record: ParityManifest,
    shards: Mapping[int, Read],
    parities: Mapping[int, Read],
    into: Mapping[int, memoryview],
) -> None:
    """Make lost shards of a group, in `into`, and prove that they are right.

    Members are numbered on the ring, as `record.group` lists them. `record` is the manifest of any
    surviving parity. `shards` and `parities` read what survived, checked before by whoever holds it
    (`check_parity` for parity): damaged is lost. `into` has writable memory of exactly the lost
    shard's length for members that are not in `shards`; those that it lacks are made elsewhere, by
    somebody who reads the same ranges in the same order as this. Buffers k windows.

    Raises RestoreError, with the arithmetic, when too much is lost, before anything is read.
    Raises CorruptShardError when what was rebuilt is not what was lost, for some source was
    damaged: nothing in `into` may be used then. What a reader raises goes through.
    """
    Rebuilding(record, shards.keys(), parities.keys(), into).run(shards, parities)


class Rebuilding:
    """A rebuild in two steps, see `rebuild`: what may fail for want of memory, and the reading."""

    def __init__(
        self,
        record: ParityManifest,
        shards: Collection[int],
        parities: Collection[int],
        into: Mapping[int, memoryview],
    ) -> None:
        """Plans and takes memory; `shards` and `parities` are the members of which there will be
        readers."""
        code = record.stripes.code
        lost = set(range(code.n)) - set(shards)
        lengths = {member: len(view) for member, view in into.items()}
        if lengths != {m: record.manifests[m].image_bytes for m in lost & lengths.keys()}:
            raise ValueError(f"room for {lengths}, where members {sorted(lost)} are lost")
        gone = set(range(code.n)) - set(parities)
        self._record, self._into = record, into
        self._tasks = plan_rebuild(code, lost, gone, restore_parities=False)
        self._window_bytes = window_bytes_of(code)
        self._buffers = [memoryview(bytearray(self._window_bytes)) for _ in range(code.k)]
        self._rows = [
            [row for row, out in enumerate(task.outputs) if out.member in into]
            for task in self._tasks
        ]
        """Of each task: the outputs that are made here."""
        library = isal.find()
        self._products = [
            Product(tuple(task.matrix[row] for row in rows), library) if rows else None
            for task, rows in zip(self._tasks, self._rows, strict=True)
        ]

    def run(self, shards: Mapping[int, Read], parities: Mapping[int, Read]) -> None:
        """Read, make and prove.

        All is read, whatever fails here: where ranges are read together, others wait for this one.
        """
        trouble: Exception | None = None
        for window in self._record.stripes.windows(self._window_bytes):
            for task, rows, product in zip(self._tasks, self._rows, self._products, strict=True):
                sources = []
                for segment, buffer in zip(task.sources, self._buffers, strict=True):
                    low, high = self._record.stripes.range_of(segment, window)
                    part = buffer[: high - low]
                    if part:
                        (parities if segment.parity else shards)[segment.member](low, part)
                    sources.append(part)
                if product is not None and trouble is None:
                    try:
                        product.run(sources, self._outputs(task, rows, window))
                    except Exception as error:
                        trouble = error
        if trouble is not None:
            raise trouble
        self._prove()

    def _outputs(self, task: Task, rows: list[int], window: tuple[int, int]) -> list[memoryview]:
        """Where the rows' products belong."""
        outputs = [task.outputs[row] for row in rows]
        ranges = [(out.member, self._record.stripes.range_of(out, window)) for out in outputs]
        return [self._into[member][low:high] for member, (low, high) in ranges]

    def _prove(self) -> None:
        """CorruptShardError unless what was made is what was lost."""
        for member, view in sorted(self._into.items()):
            manifest = self._record.manifests[member]
            try:
                verify_shard(manifest, view, f"{manifest.key}, as it was rebuilt,")
            except (CorruptShardError, FormatError) as error:
                advice = "some source was damaged; use another level, or an older version"
                raise CorruptShardError(f"{error}; {advice}") from error
