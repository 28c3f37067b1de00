"""How long does a job take from the start of its processes to its first useful step?

    python benchmarks/restart.py --toy
    python benchmarks/restart.py --json restart.json
    python benchmarks/restart.py --worlds 2,4 --megabytes 48,192 --nodes 2

benchmarks/README.md explains the columns and how they are measured.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lib import machine
from lib.figures import Spread, spread
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary, write_json
from lib.limits import CHUNK_BYTES, direct_file
from lib.report import align
from lib.restart.methods import WAYS

HERE = Path(__file__).resolve().parent
RUN_LIMIT_S = 300.0
BARE_THREADS = 4


@dataclass
class Row:
    """One way to restart, for one size and number of ranks.

    total: seconds from the start of the processes to the end of the first step, on the slowest
    rank. restore: the part of total from the moment when all ranks are ready. read, exchanged,
    storage: bytes of all ranks, as a multiple of the state; storage counts the bytes that the
    kernel fetched from the device. peak_bytes: memory that the restore took on the worst rank,
    including the restored state.
    """

    way: str
    title: str
    cache: str
    world: int
    nodes: int
    state_bytes: int
    status: str = "ok"
    total: Spread | None = None
    restore: Spread | None = None
    read: float | None = None
    exchanged: float | None = None
    storage: float | None = None
    peak_bytes: int = 0
    phases: dict[str, Spread] = field(default_factory=dict)


def run_job(world: int, plan: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    """Run all ranks of one run; return the start time, and the results of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TIERCKPT_AGENT_LINGER_SECONDS": "0",
    }
    command = [sys.executable, str(HERE / "lib" / "restart" / "rank.py"), json.dumps(plan)]
    begin = time.monotonic()
    ranks = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=RUN_LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    results = []
    for number, (rank, (out, errors)) in enumerate(zip(ranks, outputs, strict=True)):
        if rank.returncode:
            raise RuntimeError(f"rank {number}: {errors.strip()[-2000:]}")
        results.append(json.loads(out.strip().splitlines()[-1]))
    return begin, results


class Bench:
    """One size and number of ranks: a first run, and the runs that restart from its checkpoints."""

    def __init__(self, options: argparse.Namespace, folder: Path, memory: Path) -> None:
        self.world, self.nodes = options.world, options.nodes
        self.state_bytes = options.megabytes << 20
        self.root, self.memory = folder, memory
        self.ways = [name for name in options.ways if find_spec(WAYS[name].module.split(".")[0])]
        self.rows = [
            Row(name, WAYS[name].title, cache, self.world, self.nodes, self.state_bytes)
            for name in self.ways
            for cache in self._caches(name)
        ]
        self.samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.bare: list[float] = []
        """Bytes per second of a bare read of the local shards."""

    @staticmethod
    def _caches(name: str) -> tuple[str, ...]:
        if name in ("nothing", "ours-memory"):
            return ("-",)
        return ("cold",) if WAYS[name].ours else ("warm", "cold")

    def leave(self) -> None:
        """Make the first run, which leaves a checkpoint for every way."""
        for name in self.ways:
            (self.root / name).mkdir()
            (self.memory / name).mkdir()
        _, results = run_job(self.world, {**self._plan(None), "seed": 1})
        self.state_bytes = results[0]["state_bytes"]
        self.digests = results[0]["digests"]
        for row in self.rows:
            row.state_bytes = self.state_bytes

    def _plan(self, way: str | None, **more: Any) -> dict[str, Any]:
        return {
            "root": str(self.root),
            "memory": str(self.memory),
            "ways": self.ways,
            "nodes": self.nodes,
            "state_bytes": self.state_bytes,
            "way": way,
            **more,
        }

    def restart(self, row: Row, timed: bool, checked: bool) -> None:
        """Make one run that restarts.

        timed: keep its times. checked: compare the restored bits, and sample memory. That costs
        time.
        """
        self._lose(row.way)
        if row.cache == "cold":
            evict(self.root / row.way)
        try:
            plan = self._plan(row.way, seed=2, checked=checked)
            begin, results = run_job(self.world, plan)
            if checked and row.way != "nothing" and results[0]["digest"] != self.digests[row.way]:
                raise RuntimeError("the restored state differs from the saved one")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            row.status = str(error).splitlines()[-1][:200]
            return
        if checked:
            row.peak_bytes = max(rank["peak_bytes"] for rank in results)
        if timed:
            self.samples.setdefault((row.way, row.cache), []).append(_sample(begin, results))

    def _lose(self, name: str) -> None:
        """Delete the files that this way loses between the two runs."""
        lost, root = WAYS[name].lost, self.root / name
        if "memory" in lost:
            shutil.rmtree(self.memory / name)
            (self.memory / name).mkdir()
        nodes = sorted(root.glob("node*"))
        for node in nodes if "disks" in lost else nodes[-1:] if "node" in lost else []:
            shutil.rmtree(node)

    def measure_bare(self) -> None:
        """Read the local shards from the device without any other work."""
        files = [p for p in (self.root / "ours-local").rglob("*.safetensors")]
        if not files:
            return
        evict(self.root / "ours-local")
        begin = time.perf_counter()
        for path in files:
            _read_direct(path)
        seconds = time.perf_counter() - begin
        self.bare.append(sum(p.stat().st_size for p in files) / seconds)

    def finish(self) -> None:
        """Compute the figures of all rows."""
        for row in self.rows:
            samples = self.samples.get((row.way, row.cache), [])
            if not samples or row.status != "ok":
                continue
            row.total = spread(s["total"] for s in samples)
            row.restore = spread(s["restore"] for s in samples)
            for name in ("read", "exchanged", "storage"):
                if name in samples[0]:
                    setattr(row, name, samples[-1][name] / self.state_bytes)
            for phase in samples[0]["phases"]:
                row.phases[phase] = spread(s["phases"][phase] for s in samples)


def _sample(begin: float, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one run: times of the slowest rank, bytes of all ranks."""
    found: dict[str, Any] = {"phases": {}}
    found["total"] = max(rank["marks"]["stepped"] for rank in results) - begin
    found["restore"] = max(rank["marks"]["restored"] - rank["marks"]["ready"] for rank in results)
    for name in results[0]["counted"]:
        values = [rank["counted"][name] for rank in results]
        if name.startswith("seconds."):
            found["phases"][name.removeprefix("seconds.")] = max(values)
        else:
            found[name] = sum(values)
    return found


def evict(folder: Path) -> None:
    """Drop all files in `folder` from the page cache, as a reboot does."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _read_direct(path: Path) -> None:
    """Read a file without the page cache, with BARE_THREADS threads."""
    offsets = iter(range(0, path.stat().st_size, CHUNK_BYTES))
    lock = threading.Lock()

    def read(fd: int) -> None:
        buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            os.preadv(fd, [buffer], offset)

    with direct_file(path, os.O_RDONLY) as fd:
        threads = [threading.Thread(target=read, args=(fd,)) for _ in range(BARE_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


HEADERS = ("way", "cache", "total s", "restore s (min..max)", "read", "storage", "sent", "peak MB")


def table(rows: list[Row]) -> str:
    """The table, one line per way."""
    return align([HEADERS, *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    if row.total is None or row.restore is None:
        return (row.title, row.status if row.status != "ok" else "not measured")
    restore = row.restore

    def times(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} x"

    return (
        row.title,
        row.cache,
        f"{row.total.median:.2f}",
        f"{restore.median:.3f} ({restore.low:.3f}..{restore.high:.3f})",
        times(row.read),
        times(row.storage),
        times(row.exchanged),
        f"{row.peak_bytes / 1e6:.0f}",
    )


def verdicts(bench: Bench) -> Iterator[str]:
    """The targets, judged for one size and number of ranks."""
    of = {(row.way, row.cache): row for row in bench.rows if row.restore is not None}
    memory = of.get(("ours-memory", "-"))
    peers = [r for (way, _), r in of.items() if not WAYS[way].ours and way != "nothing"]
    if memory is not None and memory.restore is not None and peers:
        best = min(peers, key=lambda r: r.restore.median if r.restore else 0.0)
        assert best.restore is not None
        mine, theirs = memory.restore.median, best.restore.median
        yield (
            f"{'met' if mine < theirs else 'MISSED'}: restart from memory faster than any other: "
            f"{mine:.3f} s, {best.title} ({best.cache}) {theirs:.3f} s"
        )
    for (way, _), row in of.items():
        if WAYS[way].ours and row.storage is not None and way != "ours-memory":
            yield (
                f"{'met' if row.storage <= 1.05 else 'MISSED'}: {row.title}: each byte read "
                f"from storage once: {row.storage:.2f} x the state, with headers and manifests"
            )
    local = of.get(("ours-local", "cold"))
    if local is not None and bench.bare:
        seconds = local.phases["verify"].median + local.phases["load"].median
        rate, bare = bench.state_bytes / seconds, spread(iter(bench.bare)).median
        yield (
            f"{'met' if rate >= 0.8 * bare else 'MISSED'}: cold restore at 0.8 of the device: "
            f"{rate / bare:.2f} ({rate / 1e9:.2f} of {bare / 1e9:.2f} GB/s; reading and verifying "
            f"alone {bench.state_bytes / local.phases['verify'].median / 1e9:.2f})"
        )


def measure(options: argparse.Namespace, folder: Path, memory: Path) -> Bench:
    """Measure all ways for one size and number of ranks, in turn."""
    bench = Bench(options, folder, memory)
    bench.leave()
    for number in range(options.rounds + (not options.toy)):
        timed = number < options.rounds
        for row in bench.rows:
            if row.status == "ok":
                bench.restart(row, timed, checked=options.toy or not timed)
        bench.measure_bare()
    bench.finish()
    return bench


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="12 MB, two ranks, one round")
    parser.add_argument("--megabytes", help="sizes of the state; default 48,192, toy 12")
    parser.add_argument("--worlds", default="2", help="numbers of ranks; default 2")
    parser.add_argument("--nodes", type=int, default=1, help="nodes for these ranks; default 1")
    parser.add_argument("--rounds", type=int, help="rounds; default 5, toy 1")
    parser.add_argument("--ways", help=f"some of {','.join(WAYS)}; toy: without the last two")
    parser.add_argument("--dir", type=Path, help="where checkpoints go; default: a disk")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    few = [name for name in WAYS if name not in ("dcp", "torchsnapshot")]
    options.ways = options.ways.split(",") if options.ways else few if options.toy else list(WAYS)
    options.megabytes = options.megabytes or ("12" if options.toy else "48,192")
    options.rounds = options.rounds or (1 if options.toy else 5)
    options.dir = options.dir or machine.scratch_parent()
    unknown = set(options.ways) - WAYS.keys()
    if unknown:
        parser.error(f"--ways {','.join(sorted(unknown))}: choose from {','.join(WAYS)}")
    return options


def main() -> None:
    options = arguments()
    clean_up_when_terminated()
    about = machine.description(options.dir)
    print(f"{about['cpu']}, {about['cores']} cores, load {os.getloadavg()[0]:.1f}")
    print(f"files on {about['filesystem']}; read, storage, sent: sums over ranks, x state\n")
    document: dict[str, Any] = {**about, "cases": []}
    cases = [(w, m) for w in options.worlds.split(",") for m in options.megabytes.split(",")]
    for world, megabytes in cases:
        case = argparse.Namespace(**{**vars(options), "world": int(world)})
        case.megabytes = int(megabytes)
        with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
            bench = measure(case, folder, memory)
        lines = list(verdicts(bench))
        print(f"{world} ranks on {case.nodes} node(s), {bench.state_bytes / 1e6:.0f} MB of state\n")
        print(table(bench.rows), *lines, "", sep="\n", flush=True)
        rows = [asdict(row) for row in bench.rows]
        document["cases"].append({"rows": rows, "bare": bench.bare, "targets": lines})
        if options.json:
            write_json(options.json, document)
    if options.json:
        print(f"figures: {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
