"""How long does a job take from the start of its processes to its first useful step?

    python benchmarks/restart.py --toy
    python benchmarks/restart.py --json restart.json
    python benchmarks/restart.py --kill 5
    python benchmarks/restart.py --lose 2
    python benchmarks/restart.py --worlds 2,4 --megabytes 48,192 --nodes 2

A first run leaves a checkpoint for each way and ends like a crash. Then runs restart, one way
after the other, round by round, with new processes and another seed of the model. The last round
is not timed: it compares model and optimizer bit for bit, and samples memory. `--ways` selects:

ours-memory       processes were lost: slots are mapped
ours-local        the memory of all nodes was lost: shards are mapped from disk
ours-peer         and the last node's disk: `partner`, lost shards are rebuilt
ours-persistent   all nodes were lost: shards are fetched and broadcast
torch-load        rank 0 loads, every tensor is broadcast
dcp               every rank loads
nothing           start afresh: the cost of any restart

cache      cold: files not in the page cache, as after a reboot; warm: as after a crash of processes
total s    from the start of the processes to the end of the first step, slowest rank, median
restore s  its part from when all ranks are ready (libraries, model) until the state is restored
read       bytes that ranks read from a level, as Tierckpt counts them, as a multiple of the state
storage    bytes that the kernel fetched from the device (/proc/self/io), likewise
sent       bytes that ranks received from each other, likewise
peak MB    peak memory of a rank, with the restored state, without mapped files and slots

`--kill N`: rank 1 kills itself N times in a job under torchrun, and under `tierckpt run`, with a
version to memory at every step. *total* runs from a SIGKILL to the end of the next step on rank
0: *started* (others ended, the script starts), *imported*, *met* (process group), *built* (model,
DDP, optimizer), *attached*, *restored*, *stepped*. The first kill does not count. Elastic Horovod
(its own commits) and NVIDIA's in-process wrapper (Tierckpt's checkpoints, a reserve rank a kill)
follow where they are installed; rank 0 survives there, and *started* ends with its return to the
training.

`--lose N`: two nodes of one rank and a spare one, names on this machine. The second node loses
its processes, memory and disk as soon as the peer level protects a version and the spare is
ready. Rows: torchrun with a spare agent and its limit of 15 s without a sign of life, with 3 s,
and `tierckpt run --standby`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib import machine
from lib.figures import spread
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary, write_json
from lib.report import align
from lib.restart import kills, lost_nodes
from lib.restart.methods import WAYS
from lib.restart.runs import Bench, Row
from lib.terminal import parser_of

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
    """Measure all ways for one size and number of ranks, by turns."""
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
    parser = parser_of(
        __doc__, toy="12 MB, two ranks, one round", place="where checkpoints go; default: a disk"
    )
    parser.add_argument("--megabytes", help="sizes of the state; default 48,192, toy 12")
    parser.add_argument("--worlds", default="2", help="numbers of ranks; default 2")
    parser.add_argument("--nodes", type=int, default=1, help="nodes for these ranks; default 1")
    parser.add_argument("--rounds", type=int, help="rounds; default 5, toy 1")
    parser.add_argument("--ways", help=f"some of {','.join(WAYS)}; toy: without the last one")
    text = "measure only the time from a SIGKILL to the next finished step, N times each"
    parser.add_argument("--kill", type=int, default=0, metavar="N", help=text)
    text = "measure only the time from the loss of a node to the next finished step, N times each"
    parser.add_argument("--lose", type=int, default=0, metavar="N", help=text)
    text = "for --kill and --lose: some of the launchers; default: those that are installed"
    parser.add_argument("--launchers", help=text)
    options = parser.parse_args()
    few = list(WAYS)[:-1]
    options.ways = options.ways.split(",") if options.ways else few if options.toy else list(WAYS)
    options.megabytes = options.megabytes or ("12" if options.toy else "48,192")
    options.rounds = options.rounds or (1 if options.toy else 5)
    options.dir = options.dir or machine.scratch_parent()
    known = lost_nodes.LAUNCHERS if options.lose else kills.LAUNCHERS
    here = [name for name in known if kills.missing(name) is None]
    options.launchers = options.launchers.split(";") if options.launchers else here
    if not set(options.launchers) <= set(known):
        parser.error(f"--launchers: choose from {';'.join(known)}")
    unknown = set(options.ways) - WAYS.keys()
    if unknown:
        parser.error(f"--ways {','.join(sorted(unknown))}: choose from {','.join(WAYS)}")
    return options


def measure_kills(options: argparse.Namespace, about: dict[str, Any]) -> None:
    """Measure the time from a failure to the next step, for all sizes and launchers."""
    document: dict[str, Any] = {**about, "kills": []}
    what = "SIGKILL of a rank" if options.kill else "loss of a node"
    for world in map(int, options.worlds.split(",")):
        for megabytes in map(int, options.megabytes.split(",")):
            rows = []
            for launcher in options.launchers:
                with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
                    places = (folder / "job", memory / "job")
                    size = megabytes << 20
                    if options.kill:
                        row = kills.measure(launcher, world, size, options.kill, places)
                    else:
                        row = lost_nodes.measure(launcher, size, options.lose, places)
                rows.append(row)
            print(f"{world} rank(s), {megabytes} MiB of state, {what} to the next step\n")
            print(kills.table(rows), "", sep="\n", flush=True)
            document["kills"] += map(asdict, rows)
            if options.json:
                write_json(options.json, document)


def main() -> None:
    options = arguments()
    clean_up_when_terminated()
    about = machine.description(options.dir)
    print(f"{about['cpu']}, {about['cores']} cores, load {os.getloadavg()[0]:.1f}")
    if options.kill or options.lose:
        measure_kills(options, about)
        return
    print(f"files on {about['filesystem']}; read, storage, sent: sums over ranks, x state\n")
    document: dict[str, Any] = {**about, "cases": []}
    cases = [(w, m) for w in options.worlds.split(",") for m in options.megabytes.split(",")]
    for world, megabytes in cases:
        case = argparse.Namespace(**{**vars(options), "world": int(world)})
        case.megabytes = int(megabytes)
        with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
            bench = measure(case, folder, memory)
        lines = list(verdicts(bench))
        size = f"{bench.state_bytes / 1e6:.0f} MB of state"
        print(f"{world} rank(s) on {case.nodes} node(s), {size}\n")
        print(table(bench.rows), *lines, "", sep="\n", flush=True)
        rows = [asdict(row) for row in bench.rows]
        document["cases"].append({"rows": rows, "bare": bench.bare, "targets": lines})
        if options.json:
            write_json(options.json, document)
    if options.json:
        print(f"figures: {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
