"""How fast is redundancy computed, compared with the speed of memory?

    python benchmarks/coding.py --toy
    python benchmarks/coding.py --json coding.json

Tierckpt with ISA-L and with numpy, in windows of shared memory, and the encode of pyeclib take
turns, each in a thread of its own, with a copy by numpy next to each. Rebuilding starts from as
many lost data segments as the code tolerates.

GB/s               data (without parity) over wall time, median and range; depends on other load
GB/CPU-s, CPU-s/GB data and CPU time of the thread; the target is judged on this of the limit
CPU time of a copy that reads and writes as many bytes, over Tierckpt's times pyeclib      CPU
time of pyeclib over Tierckpt's freeze ms          longest time for which another Python thread
was blocked: by the GIL, or by load
"""

from __future__ import annotations

import argparse
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from lib import machine
from lib.figures import Spread, spread
from lib.files import write_json
from lib.limits import Cost, timed
from lib.report import align, targets_text
from lib.targets import Verdict
from lib.terminal import parser_of
from tierckpt.erasure import kernels
from tierckpt.erasure.codes import Matrix, decoding
from tierckpt.erasure.kernels import Bytes, Isal, Product

CODES = {"xor 7+1": (7, 1), "rs 4+2": (4, 2), "rs 6+2": (6, 2)}
TARGET_GB_PER_S = 4.0
"""Gigabytes of data per second and core, without holding the GIL."""
FREEZE_SECONDS = 0.05
"""Longer than the usual waits of a thread on a busy machine, shorter than a call with the GIL."""


@dataclass
class Row:
    """One operation by one implementation. Figures are None if it could not run.

    seconds, cpu_seconds: one pass over data_bytes. freeze_seconds: the longest time for which
    another Python thread was blocked during the pass. limit_cpu_seconds: a copy that reads and
    writes as many bytes (`Bench.limit`).
    """

    code: str
    work: str
    by: str
    data_bytes: int
    moved_bytes: int
    status: str = "ok"
    seconds: Spread | None = None
    cpu_seconds: Spread | None = None
    freeze_seconds: Spread | None = None
    limit_cpu_seconds: Spread | None = None
    samples: list[tuple[Cost, float, float]] = field(default_factory=list, repr=False)

    def finish(self) -> None:
        """Compute medians and ranges of the samples."""
        costs = [cost for cost, _, _ in self.samples]
        self.seconds = spread(cost.wall_s for cost in costs)
        self.cpu_seconds = spread(cost.cpu_s for cost in costs)
        self.freeze_seconds = spread(freeze for _, freeze, _ in self.samples)
        self.limit_cpu_seconds = spread(limit for _, _, limit in self.samples)
        self.samples = []


class Bench:
    """Segments in shared memory, like slots, and all operations on them."""

    def __init__(self, segment_bytes: int, window_bytes: int) -> None:
        self.segment_bytes, self.window_bytes = segment_bytes, window_bytes
        most = max(k for k, _ in CODES.values())
        rng = np.random.default_rng(0)
        self.sources = [shared(segment_bytes) for _ in range(most)]
        self.outputs = [shared(segment_bytes) for _ in range(2)]
        for source in self.sources:
            source[:] = rng.integers(0, 256, segment_bytes, dtype=np.uint8)
        self.outputs[0][:], self.outputs[1][:] = self.sources[0], self.sources[1]
        self.ways: list[tuple[Row, Callable[[], object]]] = []
        library = kernels.find_isal()
        for name, (k, m) in CODES.items():
            encode = decoding(k, range(k), range(k, k + m))
            # As many data segments are lost as the code tolerates: the densest matrix.
            rebuild = decoding(k, range(m, k + m), range(m))
            self._ours(name, "encode", "ISA-L", encode, library)
            self._ours(name, "encode", "numpy", encode, None)
            self._ours(name, "rebuild", "ISA-L", rebuild, library)
            self._pyeclib(name, k, m)

    def _row(self, code: str, work: str, by: str) -> Row:
        k, m = CODES[code]
        return Row(code, work, by, k * self.segment_bytes, (k + m) * self.segment_bytes)

    def _ours(self, code: str, work: str, by: str, matrix: Matrix, library: Isal | None) -> None:
        row = self._row(code, work, by)
        if by == "ISA-L" and library is None:
            row.status = "not installed: pip install tierckpt[rs]"
        product = Product(matrix, library)
        sources = self.sources[: len(matrix[0])]
        outputs = self.outputs[: len(matrix)]

        def run() -> None:
            for low in range(0, self.segment_bytes, self.window_bytes):
                window = slice(low, low + self.window_bytes)
                product.run([s[window].data for s in sources], [o[window].data for o in outputs])

        self.ways.append((row, run))

    def _pyeclib(self, code: str, k: int, m: int) -> None:
        """pyeclib's whole encode, including its copy of the data into fragments."""
        row = self._row(code, "encode", "pyeclib")
        kind = "isa_l_rs_vand" if m > 1 else "isa_l_rs_cauchy"
        try:
            from pyeclib.ec_iface import ECDriver

            driver = ECDriver(k=k, m=m, ec_type=kind)
        except Exception as error:  # its errors share no other base class
            row.status = f"not run: {error}"
            self.ways.append((row, lambda: None))
            return
        data = np.concatenate(self.sources[:k]).tobytes()
        self.ways.append((row, lambda: driver.encode(data)))

    def limit(self, moved_bytes: int) -> float:
        """CPU-seconds of a numpy copy that reads and writes `moved_bytes` in all."""
        seconds, left = 0.0, moved_bytes // 2
        for source in (*self.sources, *self.sources):
            part = source[: min(left, self.segment_bytes)]
            seconds += timed(lambda part=part: np.copyto(self.outputs[0][: part.size], part)).cpu_s
            left -= part.size
        return seconds

    def round(self) -> None:
        """Run each operation once, each next to its limit."""
        for row, run in self.ways:
            if row.status == "ok":
                limit = self.limit(row.moved_bytes)
                row.samples.append((*watched(run), limit))


def shared(nbytes: int) -> Bytes:
    """Anonymous shared memory, like a slot, with all pages touched."""
    array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    array[:] = 1
    return array


def watched(run: Callable[[], object]) -> tuple[Cost, float]:
    """Time `run` in a thread of its own; also return this thread's longest wait meanwhile."""
    costs: list[Cost] = []
    worker = threading.Thread(target=lambda: costs.append(timed(run)))
    worker.start()
    longest, last = 0.0, time.perf_counter()
    while worker.is_alive():
        time.sleep(0.0005)  # releases the GIL, and needs it again to continue
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    worker.join()
    return costs[0], longest


def judge(rows: list[Row]) -> list[Verdict]:
    """The targets for coding, one verdict each."""
    verdicts = []
    for code in ("xor 7+1", "rs 4+2"):
        target = f"{code} at {TARGET_GB_PER_S:.0f} GB/s of data a core, without holding the GIL"
        row = next(r for r in rows if (r.code, r.work, r.by) == (code, "encode", "ISA-L"))
        if row.seconds is None or row.cpu_seconds is None or row.freeze_seconds is None:
            verdicts.append(Verdict(target, "-", "not measured", row.status))
            continue
        # By CPU-seconds, so that other load of the machine does not count.
        speed = row.data_bytes / row.cpu_seconds.median / 1e9
        met = speed >= TARGET_GB_PER_S and row.freeze_seconds.median < FREEZE_SECONDS
        measured = f"{speed:.1f} GB per CPU-second, other threads blocked for up to "
        measured += f"{1e3 * row.freeze_seconds.median:.1f} ms"
        verdicts.append(Verdict(target, measured, "met" if met else "MISSED"))
    return verdicts


HEADERS = (
    "code",
    "work",
    "by",
    "GB/s (min..max)",
    "GB/CPU-s",
    "CPU-s/GB",
    "of the limit",
    "times pyeclib",
    "freeze ms",
)


def table(rows: list[Row]) -> str:
    """One way a line."""
    return align([HEADERS, *(_cells(row, rows) for row in rows)])


def _cells(row: Row, rows: list[Row]) -> tuple[str, ...]:
    if not (row.seconds and row.cpu_seconds and row.freeze_seconds and row.limit_cpu_seconds):
        return (row.code, row.work, row.by, row.status)
    peer = next(r.cpu_seconds for r in rows if (r.code, r.by) == (row.code, "pyeclib"))
    middle, low, high = (
        row.data_bytes / s / 1e9 for s in (row.seconds.median, row.seconds.high, row.seconds.low)
    )
    return (
        row.code,
        row.work,
        row.by,
        f"{middle:.2f} ({low:.2f}..{high:.2f})",
        f"{row.data_bytes / row.cpu_seconds.median / 1e9:.1f}",
        f"{row.cpu_seconds.median / row.data_bytes * 1e9:.3f}",
        f"{row.limit_cpu_seconds.median / row.cpu_seconds.median:.2f}",
        f"{peer.median / row.cpu_seconds.median:.1f}" if peer else "-",
        f"{1e3 * row.freeze_seconds.median:.1f}",
    )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__, toy="4 MB segments, 2 rounds")
    parser.add_argument("--segment-mb", type=int, help="size of a segment; default 32, toy 4")
    parser.add_argument("--window-kb", type=int, default=1024, help="bytes of a segment at once")
    parser.add_argument("--rounds", type=int, help="turns of everything; default 9, toy 2")
    options = parser.parse_args()
    options.segment_mb = options.segment_mb or (4 if options.toy else 32)
    options.rounds = options.rounds or (2 if options.toy else 9)
    return options


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Take turns, so that other load of the machine affects all of them equally."""
    bench = Bench(options.segment_mb << 20, options.window_kb << 10)
    bench.round()  # page faults, tables
    for row, _ in bench.ways:
        row.samples.clear()
    for _ in range(options.rounds):
        bench.round()
    for row, _ in bench.ways:
        row.finish()
        yield row


def main() -> None:
    options = arguments()
    about = machine.description(Path.cwd())
    rows = list(measure(options))
    verdicts = judge(rows)
    library = kernels.find_isal()
    print(
        f"{about['cpu']}, {about['cores']} cores; one thread, segments of {options.segment_mb} MiB"
    )
    print(
        f"windows of {options.window_kb} KiB; {library.path if library else kernels.ISAL_MISSING}\n"
    )
    print(table(rows), "\n")
    print(targets_text(verdicts))
    if options.json:
        document = {
            **about,
            "segment_bytes": options.segment_mb << 20,
            "window_bytes": options.window_kb << 10,
            "rows": [{k: v for k, v in asdict(row).items() if k != "samples"} for row in rows],
            "targets": [asdict(verdict) for verdict in verdicts],
        }
        write_json(options.json, document)
        print(f"figures: {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
