"""Faults at file operations: injected in this process, or kills of a store at work in children.

`injected` is for this process; for another one, set `TIERCKPT_FAULTS` in its environment.

    python -m tierckpt.testing.fault_injection <module:factory> <folder>

forks a child for every file operation of the work, and kills it at that operation. For the k-th
child `<folder>/<k>` is the store's directory, `<k>.log` lists its operations, `<k>.status` has its
exit status, and the folder `<k>.marks` has a file if the kill fired. The last child is not killed.
See `conformance.StoreConformance`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierckpt import _faults
from tierckpt.format.ids import PAGE_BYTES, ShardKey, VersionId


@contextlib.contextmanager
def injected(rules: str) -> Iterator[list[_faults.Rule]]:
    """Apply the `rules` (see `tierckpt._faults`) inside `with`; yields them, for their hits."""
    before, _faults._rules = _faults._rules, _faults.parse(rules)
    try:
        yield _faults._rules
    finally:
        _faults._rules = before


def key_of(version: int, shard: int = 0, shards: int = 1, generation: int = 1) -> ShardKey:
    """A key; all but the version seldom matter."""
    return ShardKey(VersionId(generation, version), shard, shards)


def content_of(key: ShardKey, pages: int = 3, edition: int = 0) -> bytes:
    """Known content for `key`'s shard, different for every key."""
    return hashlib.shake_128(f"{key.stem} {edition}".encode()).digest(pages * PAGE_BYTES)


def manifest_of(key: ShardKey, pages: int = 3, edition: int = 0) -> bytes:
    """Known bytes for `key`'s manifest: stores do not interpret them."""
    found = hashlib.sha256(content_of(key, pages, edition)).hexdigest()
    return f"{key.stem} {pages} {edition} {found}\n".encode()


def is_sound(store: Any, key: ShardKey) -> bool:
    """True when `store` returns exactly the bytes that a `commit_one` put there."""
    record: bytes = store.read_manifest(key)
    stem, pages, edition, _ = record.decode().split()
    with contextlib.closing(store.open_image(key)) as image:
        same = bytes(image[:]) == content_of(key, int(pages), int(edition))
    return stem == key.stem and same and record == manifest_of(key, int(pages), int(edition))


@contextlib.contextmanager
def page_aligned(content: bytes) -> Iterator[memoryview]:
    """`content` in memory aligned for direct I/O: in a mapping, as a slot's image is."""
    with mmap.mmap(-1, len(content)) as memory:
        memory[:] = content
        with memoryview(memory) as view:
            yield view


def commit_one(store: Any, key: ShardKey, pages: int = 3, edition: int = 0) -> None:
    """Commit `key` with its known content."""
    with page_aligned(content_of(key, pages, edition)) as image:
        store.commit(key, image, manifest_of(key, pages, edition))


WORK: tuple[tuple[str, int, int, int], ...] = (
    # (operation, version, pages, edition)
    ("commit", 1, 3, 0),
    ("commit", 2, 3, 0),
    ("retire", 1, 0, 0),
    ("commit", 3, 2, 0),  # the recycled file of v1 is longer
    ("commit", 3, 4, 1),  # once more under the same name
)
"""Operations that the sweeps interrupt, each at every file operation."""


def work(store: Any, log: Path) -> Iterator[tuple[str, int]]:
    """Do WORK, and log the start and end of each operation; yields finished operations."""
    store.create()
    for operation, version, pages, edition in WORK:
        _note(log, f"begin {operation} {version}")
        if operation == "commit":
            commit_one(store, key_of(version), pages, edition)
        else:
            store.retire(key_of(version))
        _note(log, f"end {operation} {version}")
        yield operation, version


def _note(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text + "\n")


def make(factory: str, directory: Path) -> Any:
    """The store that `factory` ("module:callable") makes in `directory`."""
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)(directory)


def sweep(factory: str, folder: Path, most: int) -> None:
    """Kill a child at operation k, for every k until one completes."""
    importlib.import_module(factory.partition(":")[0])  # once, not in every child
    for hit in range(1, most):
        marks = folder / f"{hit}.marks"
        marks.mkdir()
        child = os.fork()
        if child == 0:
            os.environ[_faults.FIRED_VARIABLE] = str(marks)
            _faults._rules = _faults.parse(f"kill@file:hit={hit}")
            for _ in work(make(factory, folder / str(hit)), folder / f"{hit}.log"):
                pass
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        (folder / f"{hit}.status").write_text(str(code))
        if not any(marks.iterdir()):
            return


if __name__ == "__main__":
    sweep(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
