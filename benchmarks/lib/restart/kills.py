"""Kill to next step: the time that a job loses when one of its processes is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lib.figures import Spread, spread
from lib.launchers import (
    LOOPBACKS,
    SHIM,
    environment,
    horovodrun,
    torchrun,
    write_discovery,
)
from lib.processes import MARK, Family
from lib.report import align
from tierckpt.testing import free_ports

HERE = Path(__file__).resolve().parent
PARTS = ("started", "imported", "met", "built", "attached", "restored", "stepped")
"""Moments after the kill, on rank 0; a part is the time since the moment before. started: the
script's first line, after the death was noticed, the other ranks were ended, and processes were
started or forked. Where rank 0 survives, its next call of the training function."""
LIMIT_SECONDS = 600.0
TORCHRUN, RUN, ELASTIC, INPROCESS = "torchrun", "tierckpt run", "hvd.elastic", "NVRx in-process"
LAUNCHERS = (TORCHRUN, RUN, ELASTIC, INPROCESS)


@dataclass(frozen=True)
class Job:
    """One job: its folders, and how often its rank 1 is killed."""

    launcher: str
    world: int
    state_bytes: int
    kills: int
    folder: str
    memory: str


@dataclass
class Kills:
    """The restarts of one job."""

    launcher: str
    world: int
    state_bytes: int
    total: Spread
    parts: dict[str, Spread]
    shim: dict[str, Spread] = field(default_factory=dict)
    """For `tierckpt run`: the parts of `started`, from its own record."""


def missing(launcher: str) -> str | None:
    """Why a launcher cannot run here, or None."""
    packages = {ELASTIC: "horovod", INPROCESS: "nvidia_resiliency_ext"}
    package = packages.get(launcher)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed"


def measure(
    launcher: str, world: int, state_bytes: int, kills: int, places: tuple[Path, Path]
) -> Kills:
    """Run one job with its rank 1 killed `kills` times; the first time is not counted: the
    machine's caches are cold, and the shim has learned no imports."""
    for each in places:
        each.mkdir(parents=True)
    folder, memory = places
    job = Job(launcher, world, state_bytes, kills + 1, str(folder), str(memory))
    family = Family(uuid.uuid4().hex)
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**environment(folder), "PYTHONPATH": path, MARK: family.token}
    try:
        with (folder / "log").open("w") as log:
            started = [
                subprocess.Popen(command, env={**env, **more}, stdout=log, stderr=log)
                for command, more in _commands(job, folder)
            ]
            if started[0].wait(LIMIT_SECONDS):
                raise RuntimeError((folder / "log").read_text()[-3000:])
    finally:
        family.kill()
    for process in started:
        process.wait()
    return figures(job, folder)


def _commands(job: Job, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Commands and additional variables; the job ends with the first one."""
    plan = json.dumps(asdict(job))
    rank = [str(HERE / "killed_rank.py"), plan]
    match job.launcher:
        case "hvd.elastic":
            command = horovodrun(job.world, write_discovery(folder / "hosts.sh", LOOPBACKS))
            return [([*command, sys.executable, str(HERE / "killed_elastic.py"), plan], {})]
        case "NVRx in-process":
            # One reserve rank for each kill. No launcher: it would end the survivors.
            size, port = job.world + job.kills, str(free_ports(1)[0])
            place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, str(HERE / "killed_inprocess.py"), plan]
            return [(command, {**place, "RANK": str(each)}) for each in range(size)]
        case "tierckpt run":
            shim = (*SHIM, "--times", str(folder / "times"))
            return [([*torchrun(job.world, shim), *rank], {})]
    return [([*torchrun(job.world), *rank], {})]


def figures(job: Job, folder: Path) -> Kills:
    """The figures of a job from the records of its ranks, without the first failure."""
    killed = [float(line) for line in (folder / "kills").read_text().splitlines()]
    starts = [json.loads(line) for line in (folder / "starts").read_text().splitlines()]
    if len(starts) != len(killed) + 1:
        raise RuntimeError(f"{len(killed)} kills and {len(starts)} starts")
    rows = [_parts(*each) for each in list(zip(killed, starts[1:], strict=True))[1:]]
    parts = {name: spread(row[name] for row in rows) for name in PARTS}
    total = spread(sum(row.values()) for row in rows)
    shim = _shim(folder / "times", killed)
    return Kills(job.launcher, job.world, job.state_bytes, total, parts, shim)


def _parts(killed: float, marks: dict[str, float]) -> dict[str, float]:
    """The parts of one restart, in seconds."""
    moments, row, last = {**marks, "started": marks["begun"]}, {}, killed
    for name in PARTS:
        row[name], last = moments[name] - last, moments[name]
    return row


def _shim(path: Path, killed: list[float]) -> dict[str, Spread]:
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()][1:]
    found = {"death": spread(r["failed"] - k for r, k in zip(records, killed[1:], strict=True))}
    for name in ("noticed", "ended", "forked", "script"):
        found[name] = spread(r["parts"][name] for r in records)
    return found


def table(rows: list[Kills]) -> str:
    """The table, one line per launcher; *x ours*: as a multiple of the time of `tierckpt run`."""
    ours = next((row.total.median for row in rows if row.launcher.startswith(RUN)), None)
    lines = [("launcher", "total s (min..max)", "x ours", *PARTS)]
    for row in rows:
        total = f"{row.total.median:.2f} ({row.total.low:.2f}..{row.total.high:.2f})"
        ratio = f"{row.total.median / ours:.1f}" if ours else "-"
        lines.append((row.launcher, total, ratio, *(f"{row.parts[n].median:.3f}" for n in PARTS)))
    text = align(lines)
    for row in rows:
        if row.shim:
            parts = ", ".join(f"{name} {part.median:.3f}" for name, part in row.shim.items())
            text += f"\nstarted, of tierckpt run: {parts}"
    return text


__all__ = ["LAUNCHERS", "Job", "Kills", "figures", "measure", "missing", "table"]
