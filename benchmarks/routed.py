"""How long does a program wait for a checkpoint file: written to a folder, or routed?

    python benchmarks/routed.py --toy
    python benchmarks/routed.py --json routed.json

One process writes a file of random bytes in three ways, in turns, to an idle disk.

waits     until the rename of a file, with or without fsync; for *routed* until the version's
          end, when it is in memory
durable   until the file is on disk as far as the program knows; for *routed*: committed
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib import machine
from lib.figures import spread
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary
from lib.report import publish
from lib.terminal import parser_of
from tierckpt.files import Files

Sample = tuple[float, float | None]
"""Seconds until the program continues, and until the file is durable, if it ever is."""


def directly(folder: Path, content: bytes, sync: bool) -> Sample:
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


def routed(files: Files, content: bytes) -> Sample:
    """Write a version with one file, and wait for the agent's commit."""
    begin = time.perf_counter()
    with files.version() as f, Path(f.route("state.bin")).open("wb") as file:
        file.write(content)
    waits = time.perf_counter() - begin
    assert f.complete
    files.wait()
    return waits, time.perf_counter() - begin


def measure(megabytes: int, rounds: int, folder: Path, memory: Path) -> list[dict[str, Any]]:
    """Measure all ways in turns; the first round, with its page faults, does not count."""
    content = os.urandom(1 << 20) * megabytes
    levels = {"local_every_steps": 1, "local_every_seconds": 0.0}
    with Files(folder / "ckpts", shm_dir=memory, **levels) as files:
        ways: dict[str, Callable[[], Sample]] = {
            "file": lambda: directly(folder, content, sync=False),
            "file, fsync": lambda: directly(folder, content, sync=True),
            "routed": lambda: routed(files, content),
        }
        samples: dict[str, list[Sample]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, run in ways.items():
                sample = run()
                samples[way] += [sample] if number else []
                os.sync()  # the next one must not wait for this one's pages
    rows = []
    for way, found in samples.items():
        waits = spread(waits for waits, _ in found)
        durable = spread(seconds for _, seconds in found if seconds is not None)
        rows.append(
            {"way": way, "waits": asdict(waits), "durable": asdict(durable) if durable else None}
        )
    return rows


def main() -> None:
    parser = parser_of(
        __doc__, toy="1 MiB, 2 rounds", place="where files are written; default a disk"
    )
    parser.add_argument("--rounds", type=int, help="files of each way; default 9, toy 2")
    options = parser.parse_args()
    megabytes = 1 if options.toy else 200
    parent = options.dir or machine.scratch_parent()
    about = machine.description(parent)
    clean_up_when_terminated()
    with temporary(parent) as folder, temporary(SHARED_MEMORY) as memory:
        rows = measure(megabytes, options.rounds or (2 if options.toy else 9), folder, memory)
    publish(options.json, about, file_bytes=megabytes << 20, rows=rows)


if __name__ == "__main__":
    main()
