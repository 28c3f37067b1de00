"""How long does a version take to be durable on local disk while busy processes want all cores?

    python benchmarks/saturated.py --toy
    python benchmarks/saturated.py --json saturated.json

An agent's process commits versions, a thread a shard, while busy processes in sessions of their
own take all the CPU time that they get. `--nice` and `--ways` choose the agent's priority and the
way of writing; *8-mib* is pieces of 8 MiB, as an agent wrote before 2026-11-26.

durable                  from the order to the last commit of a version's shards, median and range
of the idle bare device  time of a bare O_DIRECT write of as many bytes over a recycled file on the
                         idle machine, over that of *ours*
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from lib import machine
from lib.figures import Spread, spread
from lib.files import clean_up_when_terminated, temporary, write_json
from lib.limits import Limits
from lib.report import align
from lib.shards import manifest, shared
from lib.terminal import parser_of
from tierckpt.agent.processor import NICE, lower_priority, shorten_slices
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.storage import durable as direct_file
from tierckpt.storage.local import LocalStore

"""The setting's default."""
PAUSE_SECONDS = 0.1
"""Time between two versions: a thread that waited before has a claim to a core."""


@dataclass(frozen=True)
class Way:
    """How the agent writes: bytes a system call, its slices, and the niceness of its threads."""

    write_bytes: int
    short_slices: bool
    raised: bool = False


WAYS = {
    "ours": Way(direct_file.WRITE_BYTES, short_slices=True),
    "8-mib": Way(8 << 20, short_slices=False),
    "8-mib-short-slices": Way(8 << 20, short_slices=True),
    "one-write": Way(direct_file.WRITE_BYTES, short_slices=False),
    "normal-priority": Way(direct_file.WRITE_BYTES, short_slices=False, raised=True),
}


@dataclass
class Row:
    """One way with some busy processes. durable: seconds from the order to the last commit of a
    version's shards. bare: seconds of a bare write of the same bytes on the idle machine."""

    busy: int
    way: str
    nice: int
    data_bytes: int
    durable: Spread | None = None
    bare: Spread | None = None
    samples: list[float] = field(default_factory=list, repr=False)


class Agent:
    """The commits of an agent with a thread for each of `shards` trainers, in a process and a
    session of its own, as agents are."""

    def __init__(self, folder: Path, shard_bytes: int, shards: int, way: str, nice: int) -> None:
        self._theirs: Connection
        self._ours, self._theirs = multiprocessing.Pipe()
        arguments = (self._theirs, folder, shard_bytes, shards, way, nice)
        fork = multiprocessing.get_context("fork")
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


def _serve(
    orders: Connection, folder: Path, shard_bytes: int, shards: int, way: str, nice: int
) -> None:
    os.setsid()
    if nice:
        lower_priority(nice)
    how = WAYS[way]
    direct_file.WRITE_BYTES = how.write_bytes
    store = LocalStore(folder)
    store.create()
    images = [shared(shard_bytes) for _ in range(shards)]
    version, together = 0, threading.Barrier(shards + 1)

    def commits(shard: int) -> None:
        if how.raised:  # needs the right to do that
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)
        if how.short_slices:
            shorten_slices()
        while True:
            together.wait()
            key = ShardKey(VersionId(1, version), shard, shards)
            store.commit(key, images[shard], manifest(shard, shards, version, shard_bytes))
            together.wait()
            store.retire(key)  # its file is reused
            together.wait()

    for shard in range(shards):
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


HEADERS = ("busy", "way", "nice", "durable ms (min..max)", "of the idle bare device")


def table(rows: list[Row]) -> str:
    """The table, one line per way and number of busy processes."""
    return align([HEADERS, *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    if row.durable is None or row.bare is None:
        return (str(row.busy), row.way, "not measured")
    d = row.durable
    durable = f"{d.median * 1e3:.0f} ({d.low * 1e3:.0f}..{d.high * 1e3:.0f})"
    share = f"{row.bare.median / d.median:.2f}"
    return (str(row.busy), row.way, str(row.nice), durable, share)


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure the idle device, then all ways in turns, next to each number of busy processes."""
    shard_bytes = options.shard_mb << 20
    data_bytes = shard_bytes * options.shards
    limits = Limits(data_bytes, folder)
    bare = spread(limits.write_recycled().wall_s for _ in range(options.rounds))
    cases = [(way, nice) for nice in options.nice for way in options.ways]
    agents = {
        case: Agent(folder / f"{n}", shard_bytes, options.shards, *case)
        for n, case in enumerate(cases)
    }
    rows = []
    for agent in agents.values():
        for _ in range(2):
            agent.commit()  # new files, page faults
    for count in options.busy:
        here = [Row(count, *case, data_bytes, bare=bare) for case in cases]
        with busy_processes(count):
            for _ in range(options.rounds):
                for row in here:
                    time.sleep(PAUSE_SECONDS)
                    row.samples.append(agents[row.way, row.nice].commit())
        for row in here:
            row.durable = spread(row.samples)
        rows += here
    for agent in agents.values():
        agent.close()
    return rows


def numbers(text: str) -> list[int]:
    """Read numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(
        __doc__,
        toy="1 MB shards, 2 rounds, few processes",
        place="where shards are written; default a disk",
    )
    parser.add_argument("--shard-mb", type=int, help="size of a shard; default 96, toy 1")
    parser.add_argument("--shards", type=int, default=2, help="trainers of the node; default 2")
    parser.add_argument("--busy", type=numbers, help="busy processes; default 0,2,8,16, toy 0,2")
    parser.add_argument(
        "--ways",
        type=lambda text: text.split(","),
        default=["ours", "8-mib"],
        help=f"of {', '.join(WAYS)}",
    )
    parser.add_argument("--nice", type=numbers, default=[NICE], help="of the agent")
    parser.add_argument("--rounds", type=int, help="versions of each; default 12, toy 2")
    options = parser.parse_args()
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"ways are {', '.join(WAYS)}, not {', '.join(sorted(unknown))}")
    options.shard_mb = options.shard_mb or (1 if options.toy else 96)
    options.busy = options.busy or ([0, 2] if options.toy else [0, 2, 8, 16])
    options.rounds = options.rounds or (2 if options.toy else 12)
    options.dir = options.dir or machine.scratch_parent()
    return options


def main() -> None:
    options = arguments()
    about = machine.description(options.dir)
    clean_up_when_terminated()
    with temporary(options.dir) as folder:
        rows = measure(options, folder)
    print(
        f"{about['cpu']}, {about['cores']} cores, {about['filesystem']}, load of others "
        f"{about['load_average'][0]:.1f}; versions of {rows[0].data_bytes / 1e6:.0f} MB\n"
    )
    print(table(rows))
    if options.json:
        write_json(options.json, {"machine": about, "rows": list(map(asdict, rows))})


if __name__ == "__main__":
    main()
