"""Small shards, of which a part never changes and another part a little; and a node's work with
them, killed at any point.

As a program, `python -m tests.support.encoded_shards <level> <folder>` kills a child at every file
operation of that work. For the k-th child, `<folder>/<k>` is the level's place, `<k>.log` has the
versions that it finished, and `<k>.marks` has a file if the kill fired; the last was not killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.support.facts import facts_named, manifest_of
from tierckpt import _faults
from tierckpt.agent import (
    Activity,
    Bases,
    EncodedSource,
    Retire,
    SessionSettings,
    ShardGuard,
    TrainerSession,
    open_base,
)
from tierckpt.codecs import Decoder, Pipeline, Read, cut
from tierckpt.format import (
    PAGE_BYTES,
    REPLICATED,
    Manifest,
    Piece,
    ShardKey,
    TensorSpec,
    VersionId,
    digest,
    encode_table,
)
from tierckpt.storage import LocalStore, open_encoded
from tierckpt.storage.persistent import (
    PersistentStore,
    RetentionPolicy,
    RetryPolicy,
    VersionName,
)

LIFE = "5eed"
BLOCK_BYTES = 2 * PAGE_BYTES
BLOCKS = 4
ROW = "incremental full_every=2, zstd"
DELTA = "delta full_every=2, zstd"
SLOW = 2
"""The block of numbers with changes in their lowest bytes alone."""
VERSIONS = 3


def key_of(version: int) -> ShardKey:
    return ShardKey(VersionId(1, version), 0, 1)


def name_of(version: int) -> VersionName:
    return VersionName(VersionId(1, version), 1, LIFE)


def content_of(version: int) -> bytes:
    """A header, blocks that never change, and blocks that always do, one of them in a quarter of
    its bytes. One item has 4 bytes."""
    metadata = {
        "format": "tierckpt-shard",
        "format_version": "1.0",
        "pieces": encode_table(
            [Piece(TensorSpec("x", "float32", (1,), None, 4), 0, 1, 0, REPLICATED)]
        ),
        "blocks": json.dumps([[BLOCKS, BLOCK_BYTES]]),
        "structure": "{}",
    }
    text = json.dumps({"__metadata__": metadata}).encode().ljust(PAGE_BYTES - 8)
    header = len(text).to_bytes(8, "little") + text
    seeds = [0 if number % 2 else version for number in range(BLOCKS)]
    blocks = [hashlib.shake_128(f"{n} {s}".encode()) for n, s in enumerate(seeds)]
    found = [bytearray(block.digest(BLOCK_BYTES)) for block in blocks]
    found[SLOW][:] = hashlib.shake_128(b"slow").digest(BLOCK_BYTES)
    found[SLOW][::4] = hashlib.shake_128(f"{version}".encode()).digest(BLOCK_BYTES // 4)
    return header + b"".join(found)


def sealed_of(version: int, content: bytes) -> Manifest:
    image = memoryview(content)
    digests = b"".join(digest(block) for block in cut(image, PAGE_BYTES))
    name = name_of(version)
    key = ShardKey(name.id, 0, name.shards)
    return manifest_of(key, len(image), PAGE_BYTES, digests, float(version), run_id=LIFE)


@contextlib.contextmanager
def shard(version: int) -> Iterator[tuple[memoryview, bytes]]:
    """The image, aligned for direct I/O, and its manifest."""
    content = content_of(version)
    memory = mmap.mmap(-1, len(content))
    image = memoryview(memory)
    image[:] = content
    try:
        yield image, sealed_of(version, content).encode()
    finally:
        with contextlib.suppress(BufferError):  # a traceback has a view, and frees it later
            image.release()
            memory.close()


# --- the local level -----------------------------------------------------------------------------


class NoServices:
    shutting_down = False

    def __init__(self) -> None:
        self.held = ShardGuard()
        self.activity = Activity()

    def flusher(self, session: SessionSettings) -> None:
        return None

    def protector(self) -> None:
        return None


@contextlib.contextmanager
def session(directory: Path, row: str = ROW, keep_last: int = 1) -> Iterator[TrainerSession]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)
        settings = SessionSettings(str(directory), 0, 1, str(keep_last), codecs=row)
        made = TrainerSession(settings, ours, NoServices())  # type: ignore[arg-type]
        made.store.create()
        yield made


def commit(at: TrainerSession, version: int) -> None:
    with shard(version) as (image, manifest):
        at._store(key_of(version), image, manifest, lambda: True)


def retire(at: TrainerSession, safe: int) -> None:
    at._retire(Retire(VersionId(1, safe), ((1, 0),)))


def local(directory: Path, finished: Callable[[int], None]) -> None:
    with session(directory) as at:
        for version in range(1, VERSIONS + 1):
            commit(at, version)
            finished(version)
            retire(at, version)


def local_contents(directory: Path) -> dict[int, bytes]:
    """All versions, decoded; the level is cleaned first, as by a restarted trainer."""
    store = LocalStore(directory)
    store.create()
    store.clean(0)
    return {
        key.id.version: b"".join(
            open_encoded(store, Manifest.decode(store.read_manifest(key))).blocks()
        )
        for key in store.keys()  # noqa: SIM118
    }


# --- the persistent level ------------------------------------------------------------------------


class Writer:
    """The part of one node's agent that serves the persistent level."""

    def __init__(self, directory: Path, row: str = ROW, **options: bool) -> None:
        self.store = PersistentStore(str(directory), retry=RetryPolicy(tries=1), **options)
        self.store.create()
        self.pipeline = Pipeline.of_setting(row, "row")
        self.bases = Bases(self.store.exists)

    def flush(self, version: int) -> EncodedSource:
        with shard(version) as (image, sealed):
            base = self.bases.base_of(0, self.pipeline.full_every)
            source = EncodedSource(
                sealed,
                lambda: cut(image, PAGE_BYTES),
                lambda: True,
                self.pipeline,
                base,
                partial(open_base, self.store),
            )
            largest = self.pipeline.most_bytes(len(image))
            self.store.flush(facts_named(name_of(version)), largest, [source])
            self.bases.wrote(source)
            return source

    def retain(self, version: int) -> list[VersionName]:
        return self.store.retain(RetentionPolicy(keep_last=1), name_of(version))


def persistent(directory: Path, finished: Callable[[int], None], row: str = ROW) -> None:
    writer = Writer(directory, row)
    for version in range(1, VERSIONS + 1):
        writer.flush(version)
        finished(version)
        writer.retain(version)


def persistent_contents(directory: Path, wanted: set[int] | None = None) -> dict[int, bytes]:
    """All versions, or the wanted ones, decoded."""
    store = PersistentStore(str(directory))
    store.create()

    def other(key: ShardKey) -> tuple[Manifest, Read]:
        found = store.open_shard(VersionName(key.id, key.shards, LIFE), key.shard)
        return Manifest.decode(found.manifest), found.read

    found = {}
    for name in store.versions():
        if wanted is not None and name.id.version not in wanted:
            continue
        reader = store.open_shard(name, 0)
        decoder = Decoder(Manifest.decode(reader.manifest), reader.read, other)
        found[name.id.version] = b"".join(decoder.blocks())
    return found


LEVELS = {
    "local": (local, local_contents),
    "persistent": (persistent, persistent_contents),
    "persistent, delta": (partial(persistent, row=DELTA), persistent_contents),
}


# --- the sweep -----------------------------------------------------------------------------------


def sweep(level: str, folder: Path) -> None:
    work, _ = LEVELS[level]
    Pipeline.of_setting(ROW, "row")  # all imports happen once, not in every child
    for hit in range(1, 1000):
        marks = folder / f"{hit}.marks"
        marks.mkdir()
        child = os.fork()
        if child == 0:
            os.environ[_faults.FIRED_VARIABLE] = str(marks)
            _faults._rules = _faults.parse(f"kill@file:hit={hit}")
            with (folder / f"{hit}.log").open("w", buffering=1) as log:
                work(folder / str(hit), lambda version: print(version, file=log))
            os._exit(0)
        os.waitpid(child, 0)
        if not any(marks.iterdir()):
            return


if __name__ == "__main__":
    sweep(sys.argv[1], Path(sys.argv[2]))
