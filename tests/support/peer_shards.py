"""Members of redundancy groups: their shards, and their exchanges in threads of one process."""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.support.facts import manifest_of
from tierckpt.erasure import Code, ParityManifest, RedundancyGroup
from tierckpt.format import (
    BLOCK_BYTES,
    PAGE_BYTES,
    ParityKey,
    ShardKey,
    VersionId,
    digest,
    encode_table,
)
from tierckpt.net import Address
from tierckpt.peer import Exchange, Limits, Party, Report, Shard, Transport, check_parity, rebuild
from tierckpt.storage import LocalStore

SECRET = b"one run"
PATIENCE_SECONDS = 60.0
"""Longer than a busy machine keeps a thread waiting."""
QUICK = Limits(PATIENCE_SECONDS, PATIENCE_SECONDS, ask_seconds=PATIENCE_SECONDS)
"""No test waits until one of these is over."""


def shard_of(
    member: int, nbytes: int, members: int, version: int = 1, run_id: str = "5eed"
) -> tuple[memoryview, bytes]:
    """The shard of a member, in memory like a slot's image, and its manifest.

    It has no tensor but a valid header: `nbytes` is 0, or at least a page.
    """
    image = memoryview(bytearray())
    digests, header_bytes = b"", 0
    if nbytes:
        image = memoryview(mmap.mmap(-1, nbytes))
        data_bytes = nbytes - PAGE_BYTES
        blocks = [BLOCK_BYTES] * (data_bytes // BLOCK_BYTES)
        blocks += [data_bytes % BLOCK_BYTES] if data_bytes % BLOCK_BYTES else []
        metadata = {
            "format": "tierckpt-shard",
            "format_version": "1.0",
            "pieces": encode_table(()),
            "blocks": json.dumps([[1, b] for b in blocks]),
            "structure": "{}",
        }
        text = json.dumps({"__metadata__": metadata}).encode().ljust(PAGE_BYTES - 8)
        header_bytes = PAGE_BYTES
        image[:PAGE_BYTES] = (PAGE_BYTES - 8).to_bytes(8, "little") + text
        rng = np.random.default_rng([member, version, nbytes])
        image[PAGE_BYTES:] = rng.bytes(data_bytes)
        digests, low = digest(image[:PAGE_BYTES]), PAGE_BYTES
        for block in blocks:
            digests += digest(image[low : low + block])
            low += block
    key = ShardKey(VersionId(1, version), rank_of(member), rank_of(members))
    manifest = manifest_of(key, nbytes, header_bytes, digests, run_id=run_id)
    return image, manifest.encode()


def rank_of(member: int) -> int:
    """Rank of a member: groups have every other rank, so that member and rank numbers differ."""
    return 2 * member + 1


def group_of(code: Code) -> RedundancyGroup:
    return RedundancyGroup(tuple(rank_of(i) for i in range(code.n)), code)


def key_of(member: int, code: Code, version: int = 1) -> ShardKey:
    return ShardKey(VersionId(1, version), rank_of(member), rank_of(code.n))


def parity_key_of(member: int, code: Code, version: int = 1) -> ParityKey:
    return ParityKey(VersionId(1, version), rank_of(member), rank_of(code.n))


@dataclass
class Members:
    """A group in one process: each member has a transport and a store, like a node's agent."""

    folder: Path
    code: Code
    lengths: Sequence[int]
    limits: Limits = QUICK
    transports: list[Transport] = field(default_factory=list)
    addresses: tuple[Address, ...] = ()
    errors: dict[int, Exception] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)

    def __enter__(self) -> Members:
        for _ in range(self.code.n):
            self.transports.append(Transport(SECRET, "127.0.0.1", limits=self.limits))
        self.addresses = tuple(t.address for t in self.transports)
        for member in range(self.code.n):
            self.store(member).create()
            self.transports[member].read_server.add(self.store(member))
        return self

    def __exit__(self, *_: object) -> None:
        for transport in self.transports:
            transport.close()

    def store(self, member: int) -> LocalStore:
        return LocalStore(self.folder / f"node{member}")

    def image(self, member: int, version: int = 1) -> bytes:
        return bytes(shard_of(member, self.lengths[member], self.code.n, version)[0])

    def exchange(
        self,
        member: int,
        version: int = 1,
        make: Iterable[int] | None = None,
        still_sealed: Callable[[], bool] = lambda: True,
        run_id: str = "5eed",
        addresses: tuple[Address, ...] | None = None,
    ) -> Exchange:
        image, manifest = shard_of(member, self.lengths[member], self.code.n, version, run_id)
        party = Party(group_of(self.code), addresses or self.addresses, member)
        shard = Shard(image, manifest, still_sealed)
        return Exchange(self.transports[member], party, shard, self.store(member), make)

    def start(self, exchange: Exchange) -> threading.Thread:
        """Run the exchange in a thread; its report or error is kept under the member's number."""

        def run() -> None:
            try:
                self.reports[exchange.member] = exchange.run()
            except Exception as error:
                self.errors[exchange.member] = error

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def run(self, exchanges: Iterable[Exchange]) -> None:
        """Run all exchanges at once, to their ends."""
        self.errors.clear()
        self.reports.clear()
        for thread in [self.start(exchange) for exchange in exchanges]:
            thread.join()

    def protect(self, version: int = 1) -> None:
        """Protect a version on all members; any error fails the test."""
        self.run([self.exchange(member, version) for member in range(self.code.n)])
        for error in self.errors.values():
            raise error

    def parities(self, version: int = 1) -> dict[int, bytes]:
        """Committed parity, by member: checked, and equal to the files on disk."""
        found = {}
        for member in range(self.code.n):
            store, key = self.store(member), parity_key_of(member, self.code, version)
            if key in store.parities():
                record = ParityManifest.decode(store.read_manifest(key))
                check_parity(record, reader(store, key))
                found[member] = store.read(key, 0, record.image_bytes + 1)
        return found

    def rebuilt(self, lost: set[int], version: int = 1) -> dict[int, bytes]:
        """Shards of lost nodes, rebuilt from the files of the others alone."""
        left = [m for m in range(self.code.n) if m not in lost]
        keys = {m: parity_key_of(m, self.code, version) for m in left}
        record = ParityManifest.decode(self.store(left[0]).read_manifest(keys[left[0]]))
        into = {m: memoryview(bytearray(self.lengths[m])) for m in lost}
        rebuild(
            record,
            {m: memory_reader(self.image(m, version)) for m in left},
            {m: reader(self.store(m), keys[m]) for m in left},
            into,
        )
        return {m: bytes(view) for m, view in into.items()}


def reader(store: LocalStore, key: ShardKey) -> Callable[[int, memoryview], None]:
    """Reads a file of the store."""

    def read(offset: int, into: memoryview) -> None:
        data = store.read(key, offset, len(into))
        if len(data) < len(into):
            raise EOFError(f"{len(data)} of {len(into)} bytes at {offset}")
        into[:] = data

    return read


def memory_reader(image: bytes) -> Callable[[int, memoryview], None]:
    def read(offset: int, into: memoryview) -> None:
        into[:] = image[offset : offset + len(into)]

    return read


def nothing_of(folder: Path, version: int) -> bool:
    """True when no file below belongs to the version's parity, not even an unfinished one."""
    names = (name for _, _, files in os.walk(folder) for name in files)
    return not any(f"v{version:010d}" in name and ".p0" in name for name in names)


def wait_until(true: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for other threads or processes to bring about a condition; a timeout fails the test."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.002)
