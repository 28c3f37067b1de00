"""How fast is redundancy computed, compared with the speed of memory?

    python benchmarks/coding.py --toy
    python benchmarks/coding.py --json coding.json

Tierckpt's encode with ISA-L and with numpy, in windows of shared memory, and that of pyeclib (with
its copy of the data into fragments) take turns on one thread, with a copy by numpy next to each.

seconds, cpu_seconds   one pass over the data (without parity)
limit_cpu_seconds      CPU time of a copy that reads and writes as many bytes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lib import machine
from lib.figures import spread
from lib.limits import timed
from lib.report import publish
from lib.shards import shared
from lib.terminal import parser_of
from tierckpt.erasure import kernels
from tierckpt.erasure.codes import decoding
from tierckpt.erasure.kernels import Isal, Product

CODES = {"xor 7+1": (7, 1), "rs 4+2": (4, 2)}
WINDOW_BYTES = 1 << 20


class Bench:
    """Segments in shared memory, like slots."""

    def __init__(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.sources = [np.frombuffer(shared(segment_bytes), np.uint8) for _ in range(7)]
        self.outputs = [np.frombuffer(shared(segment_bytes), np.uint8) for _ in range(2)]

    def ours(self, k: int, m: int, library: Isal | None) -> Callable[[], object]:
        """Tierckpt's encode."""
        product = Product(decoding(k, range(k), range(k, k + m)), library)

        def run() -> None:
            for low in range(0, self.segment_bytes, WINDOW_BYTES):
                window = slice(low, low + WINDOW_BYTES)
                sources = [source[window].data for source in self.sources[:k]]
                product.run(sources, [output[window].data for output in self.outputs[:m]])

        return run

    def pyeclib(self, k: int, m: int) -> Callable[[], object] | None:
        """pyeclib's encode, or None where it is not installed."""
        try:
            from pyeclib.ec_iface import ECDriver
        except ImportError:
            return None
        driver = ECDriver(k=k, m=m, ec_type="isa_l_rs_vand" if m > 1 else "isa_l_rs_cauchy")
        data = np.concatenate(self.sources[:k]).tobytes()
        return lambda: driver.encode(data)

    def limit(self, moved_bytes: int) -> float:
        """CPU-seconds of a numpy copy that reads and writes `moved_bytes` in all."""
        seconds, left = 0.0, moved_bytes // 2
        for source in (*self.sources, *self.sources):
            part = source[: min(left, self.segment_bytes)]
            seconds += timed(lambda part=part: np.copyto(self.outputs[0][: part.size], part)).cpu_s
            left -= part.size
        return seconds


def measure(segment_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Take turns, so that other load of the machine affects all of them equally."""
    bench, library = Bench(segment_bytes), kernels.find_isal()
    ways = []
    for code, (k, m) in CODES.items():
        by = {"ISA-L": bench.ours(k, m, library) if library else None}
        by |= {"numpy": bench.ours(k, m, None), "pyeclib": bench.pyeclib(k, m)}
        ways += [(code, k, k + m, name, run) for name, run in by.items() if run]
    samples: list[list[tuple[float, float, float]]] = [[] for _ in ways]
    for number in range(rounds + 1):  # the first one makes tables
        for own, (_, _, moved, _, run) in zip(samples, ways, strict=True):
            limit, cost = bench.limit(moved * segment_bytes), timed(run)
            own += [(cost.wall_s, cost.cpu_s, limit)] if number else []
    names = ("seconds", "cpu_seconds", "limit_cpu_seconds")
    return [
        {
            **{"code": code, "work": "encode", "by": name, "data_bytes": k * segment_bytes},
            **{
                figure: asdict(spread(values))
                for figure, values in zip(names, zip(*own, strict=True), strict=True)
            },
        }
        for own, (code, k, _, name, _) in zip(samples, ways, strict=True)
    ]


def main() -> None:
    parser = parser_of(__doc__, toy="4 MB segments, 2 rounds")
    options = parser.parse_args()
    segment_bytes, rounds = (4 << 20, 2) if options.toy else (32 << 20, 9)
    rows = measure(segment_bytes, rounds)
    publish(options.json, machine.description(Path.cwd()), segment_bytes=segment_bytes, rows=rows)


if __name__ == "__main__":
    main()
