"""How fast are flushes to an S3 server and restores from it, compared with bare sockets?

    python benchmarks/objectstore.py --toy
    python benchmarks/objectstore.py --json objectstore.json
    python benchmarks/objectstore.py --endpoint http://localhost:9000 --bucket bench

A flush is the agent's work for two ranks' shards in shared memory: verify,
hash, send, commit. A restore is that of a restart's readers: runs of 8 MiB by four threads, all
digests compared. A bare client follows each measurement: the same bytes as objects of 16 MiB over
eight connections, requests signed before, no checksum. `--endpoint` and `--bucket` name your
server (with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), `--clients tierckpt,fsspec` adds the
backend of other URLs.

seconds   of the work        of_bare   time of the bare client over that, of each round
"""

from __future__ import annotations

import argparse
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib import machine
from lib.figures import spread
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary
from lib.report import publish
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

SHARDS = 2
"""Ranks of the node: its agent flushes their shards as one version."""
CLIENTS = ("tierckpt", "fsspec")


def seconds_of(work: Callable[[], None]) -> float:
    """Do it, and return its wall time."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Bench:
    """A node's shards of one size, a server, and the clients."""

    def __init__(self, server: Server, folder: Path, megabytes: int, clients: list[str]) -> None:
        self.server = server
        self.local = LocalStore(folder / f"local-{megabytes}")
        self.local.create()
        shard_bytes = (megabytes * 10**6 // SHARDS // PAGE_BYTES) * PAGE_BYTES
        self.images = [shared(shard_bytes) for _ in range(SHARDS)]
        self.keys = [ShardKey(VersionId(1, 0), s, SHARDS) for s in range(SHARDS)]
        for key, image in zip(self.keys, self.images, strict=True):
            digests = make_sound(image)
            record = manifest(key.shard, SHARDS, 0, len(image), digests)
            self.local.commit(key, image, record)
        self.data_bytes = shard_bytes * SHARDS
        self.target = memoryview(mmap.mmap(-1, self.data_bytes))
        self.target[:] = bytes(1) * len(self.target)  # no page faults later
        self.stores = {client: self._store(client) for client in clients}
        low = range(0, shard_bytes, PART_BYTES)
        self.bare = BareClient(server, [f"bare/{i:05d}" for i in range(SHARDS * len(low))])
        self.parts = [image[i : i + PART_BYTES] for image in self.images for i in low]
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

    def round(self) -> Iterator[tuple[str, str, float, float]]:
        """Measure everything once, each client next to the bare one: yields client, direction, and
        the seconds of both."""
        self.version += 1
        for client, store in self.stores.items():
            ours = seconds_of(lambda store=store: self.flush(store))
            yield client, "flush", ours, seconds_of(lambda: self.bare.put(self.parts))
        for client, store in self.stores.items():
            ours = seconds_of(lambda store=store: self.restore(store))
            self.check()
            yield client, "restore", ours, seconds_of(self._bare_get)
            store.retire(facts_of(self.version, SHARDS).name)

    def flush(self, store: PersistentStore) -> None:
        """Do the agent's work: check the local files, and flush them as one version."""
        with ExitStack() as stack:
            opened = [stack.enter_context(open_shard(self.local, key)) for key in self.keys]
            sources = [ShardSource(s, image, record) for s, (image, record) in enumerate(opened)]
            facts = facts_of(self.version, SHARDS)
            if not store.flush(facts, len(self.images[0]), sources).committed:
                raise RuntimeError("the version is not complete")

    def restore(self, store: PersistentStore) -> None:
        """Do the work of a restart's reader: read and verify all runs of blocks."""
        name = facts_of(self.version, SHARDS).name
        readers = [store.open_shard(name, shard) for shard in range(SHARDS)]
        size = len(self.images[0])

        def check(shard: int, low: int) -> None:
            begin, high = shard * size + low, min(low + RUN_BYTES, size)
            view = self.target[begin : shard * size + high]
            readers[shard].read_into(low, view)
            for at in range(0, len(view), BLOCK_BYTES):
                digest(view[at : at + BLOCK_BYTES])

        with ThreadPoolExecutor(READERS) as pool:
            runs = [(s, low) for s in range(SHARDS) for low in range(0, size, RUN_BYTES)]
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

    def close(self) -> None:
        """Close the stores, and remove the bare client's objects."""
        for store in self.stores.values():
            store.close()


def measure(
    options: argparse.Namespace, megabytes: int, rounds: int, server: Server, folder: Path
) -> list[dict[str, Any]]:
    """Clients take turns. The first round, with its connections, imports and page faults, does not
    count."""
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with closing(Bench(server, folder, megabytes, options.clients)) as bench:
        for number in range(rounds + 1):
            for client, direction, ours, bare in bench.round():
                own = samples.setdefault((client, direction), [])
                own += [(ours, bare)] if number else []
        return [
            {
                **{"client": client, "direction": direction, "data_bytes": bench.data_bytes},
                "seconds": asdict(spread(ours for ours, _ in found)),
                "of_bare": asdict(spread(bare / ours for ours, bare in found)),
            }
            for (client, direction), found in samples.items()
        ]


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
    yield Server("the server of --endpoint", options.endpoint, options.bucket, keys)


def main() -> None:
    parser = parser_of(
        __doc__, toy="40 MB, one round", place="the shards and the server; default /dev/shm"
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
    options = parser.parse_args()
    if unknown := set(options.clients) - set(CLIENTS):
        parser.error(f"clients are {', '.join(CLIENTS)}, not {', '.join(sorted(unknown))}")
    megabytes, rounds = (40, 1) if options.toy else (200, options.rounds or 5)
    parent = options.dir or SHARED_MEMORY
    about = machine.description(parent)
    clean_up_when_terminated()
    with temporary(parent) as folder, chosen_server(options, folder) as server:
        rows = measure(options, megabytes, rounds, server, folder)
    publish(options.json, about, server=server.name, rows=rows)


if __name__ == "__main__":
    main()
