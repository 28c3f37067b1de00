"""Lost shards from what survived of their group. Knows no transport and no files.

The restart path says how ranges of surviving shards and parities are read: from a slot, a mapped
file, by `Transport.fetch`, or out of a broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CorruptShardError, FormatError
from ..redundancy import isal
from ..redundancy.codes import Segment
from ..redundancy.kernels import Product
from ..redundancy.schedule import Task, plan_rebuild
from ..soundness import verify_shard
from .course import window_bytes_of
from .parity import ParityManifest, Read


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
    code = record.stripes.code
    lost = set(range(code.n)) - shards.keys()
    lengths = {member: len(view) for member, view in into.items()}
    if lengths != {m: record.manifests[m].image_bytes for m in lost & lengths.keys()}:
        raise ValueError(f"room for {lengths}, where members {sorted(lost)} are lost")
    gone = set(range(code.n)) - parities.keys()
    tasks = plan_rebuild(code, lost, gone, restore_parities=False)
    _run(record, tasks, shards, parities, into)
    for member in sorted(into):
        manifest = record.manifests[member]
        try:
            verify_shard(manifest, into[member], f"{manifest.key}, as it was rebuilt,")
        except (CorruptShardError, FormatError) as error:
            advice = "some source was damaged; use another level, or an older version"
            raise CorruptShardError(f"{error}; {advice}") from error


def _run(
    record: ParityManifest,
    tasks: tuple[Task, ...],
    shards: Mapping[int, Read],
    parities: Mapping[int, Read],
    into: Mapping[int, memoryview],
) -> None:
    stripes = record.stripes
    window_bytes = window_bytes_of(stripes.code)
    library = isal.find()
    wanted = [[i for i, out in enumerate(t.outputs) if out.member in into] for t in tasks]
    products = [
        Product(tuple(task.matrix[i] for i in rows), library) if rows else None
        for task, rows in zip(tasks, wanted, strict=True)
    ]
    buffers = [memoryview(bytearray(window_bytes)) for _ in range(stripes.code.k)]
    for window in stripes.windows(window_bytes):

        def read(segment: Segment, buffer: memoryview) -> memoryview:
            low, high = stripes.range_of(segment, window)  # noqa: B023
            if high > low:
                (parities if segment.parity else shards)[segment.member](low, buffer[: high - low])
            return buffer[: high - low]

        for task, rows, product in zip(tasks, wanted, products, strict=True):
            sources = [read(s, b) for s, b in zip(task.sources, buffers, strict=True)]
            outputs = [task.outputs[i] for i in rows]
            ranges = [(s.member, stripes.range_of(s, window)) for s in outputs]
            if product is not None:
                product.run(sources, [into[member][low:high] for member, (low, high) in ranges])
