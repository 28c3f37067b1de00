"""How long does a version take to be durable on local disk while busy processes want all cores?

    python benchmarks/saturated.py --toy
    python benchmarks/saturated.py --json saturated.json

An agent's process commits versions of two shards, a thread each, while busy processes in sessions
of their own take all the CPU time that they get.

ours              an agent's threads: niceness 10, short slices
normal-priority   the same at normal priority, without short slices

durable   seconds from the order to the last commit of a version's shards
bare      of an O_DIRECT write of as many bytes over a recycled file on the idle machine
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lib import machine
from lib.figures import spread
from lib.files import clean_up_when_terminated, temporary
from lib.limits import Limits
from lib.report import publish
from lib.shards import manifest, shared
from lib.terminal import parser_of
from tierckpt.agent.processor import lower_priority, shorten_slices
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.storage.local import LocalStore

SHARDS = 2
PAUSE_SECONDS = 0.1
"""Time between two versions: a thread that waited before has a claim to a core."""
WAYS = ("ours", "normal-priority")


class Agent:
    """The commits of an agent with a thread for each shard, in a process and a session of its own,
    as agents are."""

    def __init__(self, folder: Path, shard_bytes: int, way: str) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        arguments = (theirs, folder, shard_bytes, way)
        self._process = fork.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    def commit(self) -> float:
        """Commit a version; returns the seconds until it was durable."""
        self._ours.send(True)
        return float(self._ours.recv())

    def close(self) -> None:
        """End the process."""
        self._ours.send(False)
        self._process.join()


def _serve(orders: Connection, folder: Path, shard_bytes: int, way: str) -> None:
    os.setsid()
    if way == "ours":
        lower_priority()
    store = LocalStore(folder)
    store.create()
    images = [shared(shard_bytes) for _ in range(SHARDS)]
    version, together = 0, threading.Barrier(SHARDS + 1)

    def commits(shard: int) -> None:
        if way == "ours":
            shorten_slices()
        while True:
            together.wait()
            key = ShardKey(VersionId(1, version), shard, SHARDS)
            store.commit(key, images[shard], manifest(shard, SHARDS, version, shard_bytes))
            together.wait()
            store.retire(key)  # its file is reused
            together.wait()

    for shard in range(SHARDS):
        threading.Thread(target=commits, args=(shard,), daemon=True).start()
    while orders.recv():
        version, begin = version + 1, time.perf_counter()
        together.wait()
        together.wait()
        orders.send(time.perf_counter() - begin)
        together.wait()


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that use all the CPU time that they get, like data loaders."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    os.setsid()  # workers of a launcher have sessions of their own
    while True:
        sum(range(100_000))


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure the idle device, then all ways in turns, next to each number of busy processes."""
    shard_bytes = options.shard_mb << 20
    limits = Limits(SHARDS * shard_bytes, folder)
    bare = asdict(spread(limits.write_recycled().wall_s for _ in range(options.rounds)))
    agents = {way: Agent(folder / way, shard_bytes, way) for way in WAYS}
    for agent in agents.values():
        for _ in range(2):
            agent.commit()  # new files, page faults
    rows = []
    for count in options.busy:
        samples: dict[str, list[float]] = {way: [] for way in agents}
        with busy_processes(count):
            for _ in range(options.rounds):
                for way, agent in agents.items():
                    time.sleep(PAUSE_SECONDS)
                    samples[way].append(agent.commit())
        for way, found in samples.items():
            row = {"busy": count, "way": way, "data_bytes": SHARDS * shard_bytes}
            rows.append({**row, "durable": asdict(spread(found)), "bare": bare})
    for agent in agents.values():
        agent.close()
    return rows


def main() -> None:
    parser = parser_of(
        __doc__,
        toy="1 MB shards, 2 rounds, few processes",
        place="where shards are written; default a disk",
    )
    parser.add_argument("--busy", help="busy processes; default 0,2,8, toy 0,2")
    parser.add_argument("--rounds", type=int, help="versions of each; default 12, toy 2")
    options = parser.parse_args()
    options.shard_mb = 1 if options.toy else 96
    busy = options.busy or ("0,2" if options.toy else "0,2,8")
    options.busy = [int(count) for count in busy.split(",")]
    options.rounds = options.rounds or (2 if options.toy else 12)
    parent = options.dir or machine.scratch_parent()
    about = machine.description(parent)
    clean_up_when_terminated()
    with temporary(parent) as folder:
        rows = measure(options, folder)
    publish(options.json, about, rows=rows)


if __name__ == "__main__":
    main()
