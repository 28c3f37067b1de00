"""Kill to next step: the time that a job loses when one of its processes is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lib.figures import Spread, spread
from lib.report import align

HERE = Path(__file__).resolve().parent
PARTS = ("started", "imported", "met", "built", "attached", "restored", "stepped")
"""Moments after the kill, on rank 0; a part is the time since the moment before. started: the
script's first line, after the death was noticed, the other ranks were ended, and processes were
started or forked."""
OURS = ("attached", "restored")
"""Parts that are Tierckpt's own, with the shim's part of `started`."""
LIMIT_SECONDS = 600.0
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
LAUNCHERS = {
    "torchrun": [*_TORCHRUN, "--max-restarts", "100"],
    "tierckpt run": [*_TORCHRUN, "-m", "tierckpt.run", "--max-restarts", "100"],
}


@dataclass
class Kills:
    """The restarts of one job."""

    launcher: str
    world: int
    state_bytes: int
    total: Spread
    parts: dict[str, Spread]
    shim: dict[str, Spread]
    """For `tierckpt run`: the parts of `started`, from its own record."""


def measure(
    launcher: str, world: int, state_bytes: int, kills: int, places: tuple[Path, Path]
) -> Kills:
    """Run one job, whose rank 1 is killed `kills` times; the first time is not counted: the
    machine's caches are cold, and the shim has learned no imports."""
    folder, memory = places
    for each in (folder, memory):
        each.mkdir(parents=True)
    plan = {"state_bytes": state_bytes, "kills": kills + 1}
    where = {"folder": str(folder), "memory": str(memory)}
    how = list(LAUNCHERS[launcher])
    how[how.index("--standalone") + 1 : how.index("--standalone") + 1] = [
        "--nproc-per-node",
        str(world),
    ]
    if launcher == "tierckpt run":
        how += ["--times", str(folder / "times")]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TIERCKPT_AGENT_LINGER_SECONDS": "0",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    command = [sys.executable, *how, str(HERE / "killed_rank.py"), json.dumps({**plan, **where})]
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_SECONDS
        )
    if done.returncode:
        raise RuntimeError((folder / "log").read_text()[-3000:])
    return _figures(launcher, world, state_bytes, folder)


def _figures(launcher: str, world: int, state_bytes: int, folder: Path) -> Kills:
    killed = [float(line) for line in (folder / "kills").read_text().splitlines()]
    starts = [json.loads(line) for line in (folder / "starts").read_text().splitlines()]
    if len(starts) != len(killed) + 1:
        raise RuntimeError(f"{len(killed)} kills and {len(starts)} starts")
    rows = []
    for at, marks in list(zip(killed, starts[1:], strict=True))[1:]:
        marks["started"], row, last = marks["begun"], {}, at
        for name in PARTS:
            row[name], last = marks[name] - last, marks[name]
        rows.append(row)
    parts = {name: spread(row[name] for row in rows) for name in PARTS}
    total = spread(sum(row.values()) for row in rows)
    return Kills(launcher, world, state_bytes, total, parts, _shim(folder / "times", killed))


def _shim(path: Path, killed: list[float]) -> dict[str, Spread]:
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()][1:]
    found = {"death": spread(r["failed"] - k for r, k in zip(records, killed[1:], strict=True))}
    for name in ("noticed", "ended", "forked", "script"):
        found[name] = spread(r["parts"][name] for r in records)
    return found


def table(rows: list[Kills]) -> str:
    """The table, one line per launcher."""
    lines = [("launcher", "total s (min..max)", *PARTS)]
    for row in rows:
        total = f"{row.total.median:.2f} ({row.total.low:.2f}..{row.total.high:.2f})"
        lines.append((row.launcher, total, *(f"{row.parts[n].median:.3f}" for n in PARTS)))
    text = align(lines)
    for row in rows:
        if row.shim:
            parts = ", ".join(f"{name} {part.median:.3f}" for name, part in row.shim.items())
            text += f"\nstarted, of tierckpt run: {parts}"
    return text


__all__ = ["LAUNCHERS", "Kills", "measure", "table"]
