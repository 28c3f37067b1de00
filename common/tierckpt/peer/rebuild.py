"""Rebuild lost shards from the surviving members of a group. Knows no transport and no files.

The restart path decides how ranges of surviving shards and parities are read: from a slot, from a
mapped file, through another node's agent, or from a broadcast.
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
    """Compute the lost shards of a group in `into`, and verify them.

    Members are numbered on the ring, as `record.group` lists them. `record` is the manifest of any
    surviving parity. `shards` and `parities` read the survivors, which their holders have checked
    before (`check_parity` for parity): a damaged one counts as lost. `into` has writable memory of
    exactly the lost shard's length for members that are not in `shards`. Lost shards that are not
    in `into` are computed by other processes, which read the same ranges in the same order as this
    one. Buffers k windows.

    Raises RestoreError, with the arithmetic, when too much is lost, before anything is read. Raises
    CorruptShardError when a result is not the lost shard, because some source was damaged: no
    memory in `into` may be used then. Errors of a reader pass through.
    """
    Rebuilding(record, shards.keys(), parities.keys(), into).run(shards, parities)


class Rebuilding:
    """A rebuild in two steps, see `rebuild`: allocation, which may lack memory, and reading."""

    def __init__(
        self,
        record: ParityManifest,
        shards: Collection[int],
        parities: Collection[int],
        into: Mapping[int, memoryview],
    ) -> None:
        """Plan, and allocate memory; `shards` and `parities` are the members that `run` will have
        readers for."""
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
        """For each task: the outputs that are computed here."""
        library = isal.find()
        self._products = [
            Product(tuple(task.matrix[row] for row in rows), library) if rows else None
            for task, rows in zip(self._tasks, self._rows, strict=True)
        ]

    def run(self, shards: Mapping[int, Read], parities: Mapping[int, Read]) -> None:
        """Read, compute and verify.

        Reads all ranges even after a failure here: where several processes read ranges together,
        the others wait for this one.
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
        """Memory for the products of the rows."""
        outputs = [task.outputs[row] for row in rows]
        ranges = [(out.member, self._record.stripes.range_of(out, window)) for out in outputs]
        return [self._into[member][low:high] for member, (low, high) in ranges]

    def _prove(self) -> None:
        """Raise CorruptShardError unless every computed shard is the lost one."""
        for member, view in sorted(self._into.items()):
            manifest = self._record.manifests[member]
            try:
                verify_shard(manifest, view, f"{manifest.key}, as it was rebuilt,")
            except (CorruptShardError, FormatError) as error:
                advice = "some source was damaged; use another level, or an older version"
                raise CorruptShardError(f"{error}; {advice}") from error
