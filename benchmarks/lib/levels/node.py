"""One node of levels.py: it does the agent's work for a level, or moves the same bytes bare.

`nodes.Nodes` starts it, in a network namespace if there is one, with its Setup as JSON. Each order
and each answer is a line of JSON. Times are those of CLOCK_MONOTONIC, which all processes of a
machine share. There is no trainer in it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.limits import Limits, direct_file
from lib.shards import facts_of, make_sound, manifest, shared
from tierckpt.agent import open_shard
from tierckpt.agent.processor import lower_priority
from tierckpt.erasure.codes import Code
from tierckpt.erasure.groups import RedundancyGroup
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.net import Address
from tierckpt.peer.exchange import Exchange, Party, Shard
from tierckpt.peer.transport import Transport
from tierckpt.storage.local import LocalStore
from tierckpt.storage.persistent import PersistentStore, ShardSource

CHUNK_BYTES = 8 << 20
PIECE_BYTES = 1 << 20  # bytes that a bare connection sends at once: a window of the exchange


@dataclass(frozen=True)
class Setup:
    """The parameters of a node. All directories but `persistent` are its own."""

    number: int
    host: str
    nbytes: int
    """Size of its shard."""
    local: str
    """A directory on the measured disk."""
    memory: str
    """A directory on tmpfs, for parity: real nodes do not share a disk, as these nodes do."""
    persistent: str


@dataclass
class Work:
    """The answer to an order. Seconds of CLOCK_MONOTONIC; cpu_s is that of the whole process."""

    begin: float
    end: float
    cpu_s: float
    seconds: list[float]
    """Each repetition, without its preparation."""
    sent_bytes: int = 0


class Node:
    """Every order is a method, repeated `repeat` times."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.image = shared(setup.nbytes)
        self.local_store = LocalStore(setup.local)
        self.parity_store = LocalStore(setup.memory)
        self.local_store.create()
        self.parity_store.create()
        self.transport = Transport(b"levels", setup.host)
        self.listener = socket.create_server((setup.host, 0))
        self.seconds: list[float] = []
        self.versions: Counter[int] = Counter()
        self.sent_bytes = 0

    @cached_property
    def limits(self) -> Limits:
        """Buffers and a file for bare work, made on first use."""
        return Limits(self.setup.nbytes, Path(self.setup.local))

    @cached_property
    def staged(self) -> tuple[LocalStore, ShardKey]:
        """The version on the local level that `flush` reads."""
        store = LocalStore(Path(self.setup.local, "staged"))
        store.create()
        key = ShardKey(VersionId(1, 0), 0, 1)
        digests = make_sound(self.image)  # a flush verifies the shards that it reads
        store.commit(key, self.image, manifest(0, 1, 0, len(self.image), digests))
        return store, key

    def addresses(self) -> dict[str, Any]:
        """The addresses of this node, for exchanges and for bare connections."""
        agent, bare = self.transport.address, self.listener.getsockname()
        return {"agent": [agent.host, agent.port], "bare": list(bare[:2])}

    # --- levels --------------------------------------------------------------------------------

    def commit_local(self, repeat: int) -> None:
        """Commit to the local level, over the file of the previous version."""
        for _ in range(repeat):
            self._retire(self.local_store, self.local_store.keys())
            key, record = self._next(0, 1)
            with self._timed():
                self.local_store.commit(key, self.image, record)

    def flush(self, repeat: int) -> None:
        """Flush from the file of the local level, which is not in the page cache."""
        local, key = self.staged
        path = local.directory / f"{key.stem}{key.SUFFIX}"
        with closing(PersistentStore(self.setup.persistent)) as store:
            store.create()
            for version in range(repeat):
                facts = facts_of(version, 1)
                forget(path)
                with self._timed(), open_shard(local, key) as (image, record):
                    store.flush(facts, len(self.image), [ShardSource(0, image, record)])
                store.retire(facts.name)

    def protect(self, repeat: int, code: list[int], addresses: list[Any]) -> None:
        """Do the part of this node in a group of the first `code[0]` nodes."""
        group = RedundancyGroup(tuple(range(code[0])), Code(*code))
        everybody = tuple(Address(*address) for address in addresses)
        party = Party(group, everybody, self.setup.number)
        for _ in range(repeat):
            self._retire(self.parity_store, self.parity_store.parities())
            _, record = self._next(self.setup.number, code[0])
            shard = Shard(self.image, record)
            exchange = Exchange(self.transport, party, shard, self.parity_store)
            with self._timed():
                self.sent_bytes += exchange.run().sent_bytes

    def _retire(self, store: LocalStore, keys: Sequence[ShardKey]) -> None:
        for key in keys:
            store.retire(key)

    def _next(self, shard: int, shards: int) -> tuple[ShardKey, bytes]:
        """Name the next version. Each group counts by itself, so that its members agree."""
        self.versions[shards] += 1
        key = ShardKey(VersionId(1, self.versions[shards]), shard, shards)
        return key, manifest(shard, shards, key.id.version, len(self.image))

    # --- the same bytes, bare ------------------------------------------------------------------

    def bare_write(self, repeat: int) -> None:
        """Write with O_DIRECT and fsync over an existing file."""
        for _ in range(repeat):
            self.seconds.append(self.limits.write_recycled().wall_s)

    def bare_copy(self, repeat: int) -> None:
        """Read a file and write a new one, both without the page cache, and fsync."""
        source, target = self.limits.path, self.limits.path.with_name("copy")
        for _ in range(repeat):
            with self._timed():
                copy_file(source, target)
            target.unlink()

    def bare_send(self, repeat: int, to: list[Any], nbytes: int) -> None:
        """Send `nbytes` to one node, and receive as many from another at the same time."""
        for _ in range(repeat):
            with socket.create_connection(tuple(to)) as out, self.listener.accept()[0] as into:
                sender = threading.Thread(target=send, args=(out, self.image, nbytes))
                with self._timed():
                    sender.start()
                    receive(into, nbytes)
                    sender.join()

    # --- orders --------------------------------------------------------------------------------

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - begin)

    def serve(self, name: str, **arguments: Any) -> Work:
        """Execute one order; `name` is the method."""
        order: Callable[..., None] = getattr(self, name)
        self.seconds, self.sent_bytes = [], 0
        begin, cpu = time.perf_counter(), time.process_time()
        order(**arguments)
        cpu_s = time.process_time() - cpu
        return Work(begin, time.perf_counter(), cpu_s, self.seconds, self.sent_bytes)

    def close(self) -> None:
        """Release ports and memory."""
        self.transport.close()
        self.listener.close()


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def copy_file(source: Path, target: Path) -> None:
    """Copy whole pages in large pieces, with one buffer."""
    buffer = shared(CHUNK_BYTES)
    with direct_file(source, os.O_RDONLY) as reading, direct_file(target) as writing:
        offset = 0
        while count := os.preadv(reading, [buffer], offset):
            offset += os.pwrite(writing, buffer[:count], offset)
        os.fsync(writing)


def send(sock: socket.socket, image: memoryview, nbytes: int) -> None:
    """Send `nbytes` of the image, and repeat it if it is shorter."""
    for low in range(0, nbytes, PIECE_BYTES):
        at = low % max(len(image) - PIECE_BYTES + 1, 1)
        sock.sendall(image[at : at + min(PIECE_BYTES, nbytes - low)])


def receive(sock: socket.socket, nbytes: int) -> None:
    """Receive `nbytes` and drop them."""
    window = memoryview(bytearray(PIECE_BYTES))
    while nbytes > 0:
        count = sock.recv_into(window[: min(PIECE_BYTES, nbytes)])
        if not count:
            raise EOFError(f"{nbytes} bytes before the end of a bare connection")
        nbytes -= count


def main() -> None:
    lower_priority()
    with closing(Node(Setup(**json.loads(sys.argv[1])))) as node:
        print(json.dumps(node.addresses()), flush=True)
        for line in sys.stdin:
            try:
                answer = asdict(node.serve(**json.loads(line)))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
