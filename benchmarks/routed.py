"""How long does a program wait for a checkpoint file: written to a folder, or routed?

    python benchmarks/routed.py --toy
    python benchmarks/routed.py --json routed.json

One process writes a file of random bytes in three ways, in turns, to an idle disk.

program waits  until the rename of a file, with or without fsync; for *routed* until the version's
               end, when it is in memory; median and range
durable        until the file is on disk as far as the program knows; for *routed*: committed
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lib import machine
from lib.figures import Spread, spread
from lib.files import clean_up_when_terminated, temporary, write_json
from lib.report import align
from lib.terminal import parser_of
from tierckpt.files import Files

SHM = Path("/dev/shm")


@dataclass
class Row:
    """One way to write a file. waits: seconds until the program continues. durable: seconds until
    the file is on disk; None if it never is, as far as the program knows."""

    way: str
    waits: Spread | None = None
    durable: Spread | None = None
    samples: list[tuple[float, float | None]] = field(default_factory=list, repr=False)

    def sum_up(self) -> None:
        """Make the figures of the samples."""
        self.waits = spread(waits for waits, _ in self.samples)
        durable = [seconds for _, seconds in self.samples if seconds is not None]
        self.durable = spread(durable) if durable else None


def directly(folder: Path, content: bytes, sync: bool) -> tuple[float, float | None]:
    """Write a file under a temporary name and rename it, with or without fsync."""
    begin = time.perf_counter()
    part = folder / "state.part"
    with part.open("wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    part.rename(folder / "state.bin")
    waits = time.perf_counter() - begin
    return waits, waits if sync else None


def routed(files: Files, content: bytes) -> tuple[float, float | None]:
    """Write a version with one file, and wait for the agent's commit."""
    begin = time.perf_counter()
    with files.version() as f, Path(f.route("state.bin")).open("wb") as file:
        file.write(content)
    waits = time.perf_counter() - begin
    assert f.complete
    files.wait()
    return waits, time.perf_counter() - begin


def measure(options: argparse.Namespace, folder: Path, memory: Path) -> list[Row]:
    """Measure all ways in turns; the first round, with its page faults, does not count."""
    content = os.urandom(1 << 20) * options.mb
    levels = {"local_every_steps": 1, "local_every_seconds": 0.0}
    with Files(folder / "ckpts", shm_dir=memory, **levels) as files:
        ways: dict[str, Callable[[], tuple[float, float | None]]] = {
            "file": lambda: directly(folder, content, sync=False),
            "file, fsync": lambda: directly(folder, content, sync=True),
            "routed": lambda: routed(files, content),
        }
        rows = [Row(way) for way in ways]
        for number in range(options.rounds + 1):
            for row in rows:
                sample = ways[row.way]()
                row.samples += [sample] if number else []
                os.sync()  # the next one must not wait for this one's pages
    for row in rows:
        row.sum_up()
    return rows


def table(rows: list[Row]) -> str:
    """The table, one line for each way."""
    headers = ("way", "program waits, ms (min..max)", "durable after, ms (min..max)")
    return align([headers, *((r.way, _ms(r.waits), _ms(r.durable)) for r in rows)])


def _ms(found: Spread | None) -> str:
    if found is None:
        return "-"
    return f"{found.median * 1e3:.0f} ({found.low * 1e3:.0f}..{found.high * 1e3:.0f})"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(
        __doc__, toy="1 MiB, 2 rounds", place="where files are written; default a disk"
    )
    parser.add_argument("--mb", type=int, help="MiB of the file; default 200, toy 1")
    parser.add_argument("--rounds", type=int, help="files of each way; default 9, toy 2")
    options = parser.parse_args()
    options.mb = options.mb or (1 if options.toy else 200)
    options.rounds = options.rounds or (2 if options.toy else 9)
    options.dir = options.dir or machine.scratch_parent()
    return options


def main() -> None:
    options = arguments()
    about = machine.description(options.dir)
    clean_up_when_terminated()
    with temporary(options.dir) as folder, temporary(SHM) as memory:
        rows = measure(options, folder, memory)
    print(
        f"{about['cpu']}, {about['cores']} cores, {about['filesystem']}, load of others "
        f"{about['load_average'][0]:.1f}; a file of {options.mb} MiB\n"
    )
    print(table(rows))
    if options.json:
        results = [{k: v for k, v in asdict(row).items() if k != "samples"} for row in rows]
        write_json(options.json, {**about, "file_bytes": options.mb << 20, "rows": results})


if __name__ == "__main__":
    main()
