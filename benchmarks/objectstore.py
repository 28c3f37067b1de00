"""How fast are flushes to an S3 server and restores from it, compared with bare sockets?

    python benchmarks/objectstore.py --toy
    python benchmarks/objectstore.py --json objectstore.json
    python benchmarks/objectstore.py --endpoint http://localhost:9000 --bucket bench

A flush is the agent's work for two ranks' shards (eight at 1000 MB) in shared memory: verify,
hash, send, commit. A restore is that of a restart's readers: runs of 8 MiB by four threads, all
digests compared. A bare client follows each measurement: the same bytes as objects of 16 MiB over
eight connections, requests signed before, no checksum. `--endpoint` and `--bucket` name your
server (with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), `--clients tierckpt,fsspec` adds the
backend of other URLs.

GB/s                 state over wall time, median and range
of the bare          time of the bare client over Tierckpt's, median and range of the rounds
CPU-s/GB, bare       CPU time of the process, with Tierckpt and with the bare client
server CPU-s/GB      of the server (`--server-pid`); on loopback it usually is the limit
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lib import machine
from lib.figures import Spread, spread
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary, write_json
from lib.report import align
from lib.s3 import BUCKET, BareClient, Server, toy_server
from lib.shards import facts_of, make_sound, manifest, shared
from lib.terminal import parser_of
from tierckpt.agent import open_shard
from tierckpt.format.ids import PAGE_BYTES, PART_BYTES, ShardKey, VersionId
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import digest
from tierckpt.restore.shards import READERS, RUN_BYTES
from tierckpt.storage.local import LocalStore
from tierckpt.storage.persistent import PersistentStore, ShardSource
from tierckpt.storage.persistent.backend import RetryingBackend, RetryPolicy
from tierckpt.storage.persistent.object_stores import FsspecBackend

MAX_SHARD_MB = 125
MIN_SHARDS = 2
"""Ranks of the node: its agent flushes their shards as one version."""
CLIENTS = ("tierckpt", "fsspec")


@dataclass(frozen=True)
class Cost:
    """Wall time, CPU time of this process and of the server, in seconds."""

    wall_s: float
    cpu_s: float
    server_cpu_s: float | None


@dataclass
class Row:
    """One client and direction with one size; `bare` are the samples of the bare client."""

    client: str
    direction: str
    data_bytes: int
    seconds: Spread | None = None
    of_bare: Spread | None = None
    cpu_seconds: Spread | None = None
    bare_cpu_seconds: Spread | None = None
    server_cpu_seconds: Spread | None = None
    bare_server_cpu_seconds: Spread | None = None
    samples: list[tuple[Cost, Cost]] = field(default_factory=list, repr=False)

    def finish(self) -> None:
        """Compute medians and ranges of the samples."""
        self.seconds = spread(ours.wall_s for ours, _ in self.samples)
        self.of_bare = spread(bare.wall_s / ours.wall_s for ours, bare in self.samples)
        self.cpu_seconds = spread(ours.cpu_s for ours, _ in self.samples)
        self.bare_cpu_seconds = spread(bare.cpu_s for _, bare in self.samples)
        if self.samples[0][0].server_cpu_s is not None:
            self.server_cpu_seconds = spread(ours.server_cpu_s for ours, _ in self.samples)
            self.bare_server_cpu_seconds = spread(bare.server_cpu_s for _, bare in self.samples)
        self.samples = []


class Bench:
    """A node's shards of one size, a server, and the clients."""

    def __init__(self, server: Server, folder: Path, megabytes: int, clients: list[str]) -> None:
        self.server = server
        self.local = LocalStore(folder / f"local-{megabytes}")
        self.local.create()
        self.shards = max(MIN_SHARDS, -(-megabytes // MAX_SHARD_MB))
        shard_bytes = (megabytes * 10**6 // self.shards // PAGE_BYTES) * PAGE_BYTES
        self.images = [shared(shard_bytes) for _ in range(self.shards)]
        self.keys = [ShardKey(VersionId(1, 0), s, self.shards) for s in range(self.shards)]
        for key, image in zip(self.keys, self.images, strict=True):
            digests = make_sound(image)
            record = manifest(key.shard, self.shards, 0, len(image), digests)
            self.local.commit(key, image, record)
        self.data_bytes = shard_bytes * self.shards
        self.target = memoryview(mmap.mmap(-1, self.data_bytes))
        self.target[:] = bytes(1) * len(self.target)  # no page faults later
        self.stores = {client: self._store(client) for client in clients}
        low = range(0, shard_bytes, PART_BYTES)
        self.bare = BareClient(server, [f"bare/{i:05d}" for i in range(self.shards * len(low))])
        self.parts = [image[i : i + PART_BYTES] for image in self.images for i in low]
        self.rows = [
            Row(client, direction, self.data_bytes)
            for direction in ("flush", "restore")
            for client in clients
        ]
        self.version = 0

    def _store(self, client: str) -> PersistentStore:
        url = f"{self.server.url}-{client}"
        if client == "tierckpt":
            return PersistentStore(url, **self.server.options)
        keys, config = self.server.keys, {"response_checksum_validation": "when_required"}
        options = {"endpoint_url": self.server.endpoint, "config_kwargs": config}
        options |= {"key": keys["access_key_id"], "secret": keys["secret_access_key"]}
        store = PersistentStore("/nowhere")
        store.backend = RetryingBackend(FsspecBackend(url, **options), RetryPolicy(), time.sleep)
        return store

    def round(self) -> None:
        """Measure everything once, each client next to the bare one."""
        self.version += 1
        for row in self.rows:
            store = self.stores[row.client]
            if row.direction == "flush":
                ours = self._timed(lambda store=store: self.flush(store))
                bare = self._timed(lambda: self.bare.put(self.parts))
            else:
                ours = self._timed(lambda store=store: self.restore(store))
                self.check()
                bare = self._timed(self._bare_get)
                store.retire(facts_of(self.version, self.shards).name)
            row.samples.append((ours, bare))

    def flush(self, store: PersistentStore) -> None:
        """Do the agent's work: check the local files, and flush them as one version."""
        with ExitStack() as stack:
            opened = [stack.enter_context(open_shard(self.local, key)) for key in self.keys]
            sources = [ShardSource(s, image, record) for s, (image, record) in enumerate(opened)]
            facts = facts_of(self.version, self.shards)
            if not store.flush(facts, len(self.images[0]), sources).committed:
                raise RuntimeError("the version is not complete")

    def restore(self, store: PersistentStore) -> None:
        """Do the work of a restart's reader: read and verify all runs of blocks."""
        name = facts_of(self.version, self.shards).name
        readers = [store.open_shard(name, shard) for shard in range(self.shards)]
        size = len(self.images[0])

        def check(shard: int, low: int) -> None:
            begin, high = shard * size + low, min(low + RUN_BYTES, size)
            view = self.target[begin : shard * size + high]
            readers[shard].read_into(low, view)
            for at in range(0, len(view), BLOCK_BYTES):
                digest(view[at : at + BLOCK_BYTES])

        with ThreadPoolExecutor(READERS) as pool:
            runs = [(s, low) for s in range(self.shards) for low in range(0, size, RUN_BYTES)]
            for done in [pool.submit(check, *run) for run in runs]:
                done.result()

    def check(self) -> None:
        """Compare what was read with what was written."""
        size = len(self.images[0])
        for shard, image in enumerate(self.images):
            if self.target[shard * size : (shard + 1) * size] != image:
                raise RuntimeError("other bytes came back")

    def _bare_get(self) -> None:
        parts, low = [], 0
        for part in self.parts:
            parts.append(self.target[low : low + len(part)])
            low += len(part)
        self.bare.get(parts)

    def _timed(self, work: Callable[[], None]) -> Cost:
        server = self.server.cpu_seconds()
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        after = self.server.cpu_seconds()
        return Cost(wall, cpu, None if server is None or after is None else after - server)

    def close(self) -> None:
        """Close the stores, and remove the bare client's objects."""
        for store in self.stores.values():
            store.close()


HEADERS = (
    "client",
    "",
    "MB",
    "GB/s (min..max)",
    "of the bare (min..max)",
    "CPU-s/GB",
    "bare",
    "server CPU-s/GB",
    "bare",
)


def table(rows: list[Row]) -> str:
    """The table, one line per client, direction and size."""
    return align([HEADERS, *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    head = (row.client, row.direction, f"{row.data_bytes / 1e6:.0f}")
    if row.seconds is None or row.of_bare is None:
        return (*head, "not measured")
    s, of = row.seconds, row.of_bare
    speeds = (row.data_bytes / x / 1e9 for x in (s.median, s.high, s.low))
    costs = (row.cpu_seconds, row.bare_cpu_seconds)
    costs += (row.server_cpu_seconds, row.bare_server_cpu_seconds)
    return (
        *head,
        "{:.2f} ({:.2f}..{:.2f})".format(*speeds),
        f"{of.median:.2f} ({of.low:.2f}..{of.high:.2f})",
        *(_each_gigabyte(each, row.data_bytes) for each in costs),
    )


def _each_gigabyte(cost: Spread | None, nbytes: int) -> str:
    return "-" if cost is None else f"{cost.median / nbytes * 1e9:.2f}"


def measure(options: argparse.Namespace, server: Server, folder: Path) -> Iterator[Row]:
    """Measure one size after the other; clients take turns."""
    for megabytes in options.megabytes:
        with closing(Bench(server, folder, megabytes, options.clients)) as bench:
            for number in range(options.rounds + 1):
                bench.round()
                if number == 0:
                    for row in bench.rows:
                        row.samples.clear()  # connections, imports, page faults
            for row in bench.rows:
                row.finish()
                yield row


@contextmanager
def chosen_server(options: argparse.Namespace, folder: Path) -> Iterator[Server]:
    """The server of --endpoint, with the keys in the environment; else a started one."""
    if options.endpoint is None:
        with toy_server(folder) as server:
            yield server
        return
    keys = {
        "access_key_id": os.environ.get("AWS_ACCESS_KEY_ID", ""),
        "secret_access_key": os.environ.get("AWS_SECRET_ACCESS_KEY", ""),
        "region": os.environ.get("AWS_REGION", "us-east-1"),
    }
    yield Server(options.name, options.endpoint, options.bucket, keys, options.server_pid)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(
        __doc__, toy="40 MB, one round", place="the shards and the server; default /dev/shm"
    )
    parser.add_argument(
        "--megabytes",
        type=lambda text: [int(part) for part in text.split(",")],
        help="sizes of the state; default 200,1000, toy 40",
    )
    parser.add_argument("--rounds", type=int, help="turns of everything; default 5, toy 1")
    parser.add_argument(
        "--clients",
        type=lambda text: text.split(","),
        default=["tierckpt"],
        help=f"of {', '.join(CLIENTS)}; default tierckpt",
    )
    parser.add_argument("--endpoint", help="a running server; default: a slow one")
    parser.add_argument("--bucket", default=BUCKET, help="an existing bucket of it")
    parser.add_argument("--server-pid", type=int, help="its process, for its CPU time")
    parser.add_argument("--name", default="the server of --endpoint", help="its name")
    options = parser.parse_args()
    if unknown := set(options.clients) - set(CLIENTS):
        parser.error(f"clients are {', '.join(CLIENTS)}, not {', '.join(sorted(unknown))}")
    options.megabytes = options.megabytes or ([40] if options.toy else [200, 1000])
    options.rounds = options.rounds or (1 if options.toy else 5)
    options.dir = options.dir or SHARED_MEMORY
    return options


def main() -> None:
    options = arguments()
    about = machine.description(options.dir)
    clean_up_when_terminated()
    with temporary(options.dir) as folder, chosen_server(options, folder) as server:
        rows = list(measure(options, server, folder))
    print(f"{about['cpu']}, {about['cores']} cores, load {os.getloadavg()[0]:.1f}")
    place = f"its data on {about['filesystem']}"
    print(f"{server.name} over loopback, {place}; shards of up to {MAX_SHARD_MB} MB\n")
    print(table(rows))
    if options.json:
        write_json(
            options.json, {"machine": about, "server": server.name, "rows": list(map(asdict, rows))}
        )


if __name__ == "__main__":
    sys.exit(main())
