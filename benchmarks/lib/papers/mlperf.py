"""MLPerf Storage's checkpoint workload, run by DLIO: ours beside DLIO's own writer.

The layout is that of the 8B model under ZeRO-3, with every width a sixteenth; the number of layers
and of ranks is the published one. A job of DLIO writes the checkpoints, another one reads them
after its files were dropped from the page cache. DLIO takes the times; of each checkpoint the
slowest rank counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from lib.files import evict, temporary
from lib.papers.results import Row
from lib.papers.rule import Judged, table, word

CHOICES = {"methods": ("ours-local", "dlio-torch"), "worlds": ("8",)}
TOY = {"worlds": ("2",)}
KEY = ("method", "world")
MECHANISMS = {"ours-local": "Tierckpt", "dlio-torch": "TorchSave"}
BENCHMARKS = Path(__file__).resolve().parents[2]
CHECKPOINTS = 10
PAUSE_SECONDS = 0.5
"""Time between two checkpoints, for work that they leave to the background."""
SCALED = {"hidden_size": 256, "ffn_hidden_size": 896, "vocab_size": 8016}
TOY = {"hidden_size": 64, "ffn_hidden_size": 224, "vocab_size": 2004}


def keys(options: argparse.Namespace) -> Iterator[Row]:
    """What identifies each row."""
    for world in options.worlds:
        for method in options.methods:
            yield {"method": method, "world": int(world)}


def missing(options: argparse.Namespace) -> list[str | None]:
    """Why DLIO cannot run here."""
    if shutil.which("mpirun") is None:
        return ["mpirun is not installed"]
    found = importlib.util.find_spec("dlio_benchmark")
    if found is None or not found.submodule_search_locations:
        return ["dlio_benchmark is not installed (`papers.py --help` says how)"]
    base = Path(found.submodule_search_locations[0], "checkpointing", "base_checkpointing.py")
    if "def load_checkpoint" not in base.read_text():
        return ["this dlio_benchmark is too old: it reads no checkpoints (see `papers.py --help`)"]
    return []


def measure(options: argparse.Namespace, key: Row) -> Row:
    """Measure a row."""
    count = 2 if options.toy else CHECKPOINTS
    with temporary(options.dir) as folder:
        job = _Job(key["method"], key["world"], folder, options)
        written = job.run("write", count)
        evict(folder / "checkpoints")
        read = job.run("read", count)
        return {
            "state_bytes": round(written["checkpoint_size_GB"] * (1 << 30)),
            "layout": job.widths,
            "write_seconds": written["seconds"],
            "read_seconds": read["seconds"],
        }


class _Job:
    """Runs of DLIO with one mechanism, in one folder."""

    def __init__(self, method: str, world: int, folder: Path, options: argparse.Namespace) -> None:
        self._mechanism, self._world, self._folder = MECHANISMS[method], world, folder
        self._limit_seconds = options.timeout
        self.widths = TOY if options.toy else SCALED

    def run(self, kind: str, count: int) -> dict[str, Any]:
        """Write or read `count` checkpoints; returns the size of one in `checkpoint_size_GB`
        (GiB), and the `seconds` of each on its slowest rank. Raises RuntimeError if DLIO fails."""
        output = self._folder / kind
        command = ["mpirun", "--oversubscribe", "-np", str(self._world)]
        if os.geteuid() == 0:
            command.insert(1, "--allow-run-as-root")
        command += [sys.executable, "-m", "dlio_benchmark.main", *self._overrides(kind, count)]
        path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
        job = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, "TIERCKPT_AGENT_LINGER_SECONDS": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = job.communicate(timeout=self._limit_seconds)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)  # mpirun ends its ranks
                job.communicate()
        if job.returncode != 0:
            raise RuntimeError(f"DLIO failed ({job.returncode}):\n{text[-3000:]}")
        summary = json.loads((output / "summary.json").read_text())
        return {
            "checkpoint_size_GB": summary["metric"]["checkpoint_size_GB"],
            "seconds": [self._slowest(output, kind, number + 1) for number in range(count)],
        }

    def _slowest(self, output: Path, kind: str, number: int) -> float:
        name = {"write": "save_ckpt", "read": "load_ckpt"}[kind] + str(number)
        files = (output / f"{rank}_per_epoch_stats.json" for rank in range(self._world))
        return max(float(json.loads(file.read_text())["1"][name]["duration"]) for file in files)

    def _overrides(self, kind: str, count: int) -> list[str]:
        """Hydra's overrides of the workload."""
        mechanism = f"lib.dlio.mechanisms.{self._mechanism}"
        counts = {"num_checkpoints_write": 0, "num_checkpoints_read": 0}
        counts[f"num_checkpoints_{kind}"] = count
        checkpoint = {
            "checkpoint_folder": self._folder / "checkpoints",
            "checkpoint_mechanism_classname": mechanism,
            "time_between_checkpoints": PAUSE_SECONDS,
            **counts,
        }
        return [
            "workload=llama_8b_zero3",
            *(f"++workload.model.transformer.{key}={value}" for key, value in self.widths.items()),
            *(f"++workload.checkpoint.{key}={value}" for key, value in checkpoint.items()),
            f"++workload.output.folder={self._folder / kind}",
            f"hydra.run.dir={self._folder / kind}",
            "hydra.output_subdir=null",
        ]


TITLES = {"ours-local": "**Tierckpt, to local**", "dlio-torch": "DLIO's `torch.save`"}
_HEAD = ["writer", "ranks", "MB", "write, s (range)", "GB/s", "read, s (range)", "GB/s"]


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    ordered = sorted(rows, key=lambda row: (row["world"], row["method"] != "ours-local"))
    counts = sorted({len(row["write_seconds"]) for row in rows})
    factor = published["hidden_size"] // rows[0]["layout"]["hidden_size"]
    return [
        f"{' and '.join(map(str, counts))} checkpoints of one run, fsync'ed, then read by another "
        "job with a cold cache; means of the slowest rank, by DLIO's clock. The layout is that of "
        f"the 8B model of {published['gigabytes']} GB, every width divided by {factor}. Only "
        "Tierckpt verifies a checksum, and keeps a copy in shared memory.",
        table([_HEAD, *map(_line, ordered)]),
    ]


def verdicts(rows: list[Row], published: dict[str, Any]) -> Iterator[Judged]:
    """The goal of at least the speed of DLIO's own writer, in one run each."""
    by = {row["method"]: row for row in rows}
    if TITLES.keys() <= by.keys():
        cases = [
            (kind, word(mean(by["ours-local"][name]) <= mean(by["dlio-torch"][name]), visits=1))
            for kind, name in (("write", "write_seconds"), ("read", "read_seconds"))
        ]
        yield Judged("MLPerf Storage: as fast as DLIO's own writer (one run)", cases)


def _line(row: Row) -> list[str]:
    size = row["state_bytes"]
    return [
        TITLES[row["method"]],
        f"{row['world']}",
        f"{size / 1e6:,.0f}",
        *_seconds(row["write_seconds"], size),
        *_seconds(row["read_seconds"], size),
    ]


def _seconds(values: list[float], size: int) -> list[str]:
    spread = f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    return [spread, f"{size / mean(values) / 1e9:.2f}"]
