"""CANDLE's NT3, and ResNet, under Horovod: a timeline of allreduces and copies, and the cost of
checkpoints over workers.

*Timeline*: Horovod's own and Tierckpt's, on one axis (`tierckpt.tracing`): allreduces by message
size, as DeepIntrospect lists them; gaps between updates of the weights; the share of the copies
hidden in them. *Workers*: duration of a checkpoint at every step, and the overhead, as DeepFreeze
reports them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from lib.files import SHARED_MEMORY, temporary
from lib.methods.registry import METHODS
from lib.papers.frequency import Frequency, attached
from lib.papers.models import MODELS, present
from lib.papers.results import Row
from lib.terminal import say
from lib.training.launchers import HorovodRanks
from lib.training.teams import TeamError
from tierckpt.cli.reports.trace import load
from tierckpt.tracing.summary import summarize

RANK = Path(__file__).with_name("traced_rank.py")
TRACED_WORLD = 2


def measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield finished rows."""
    missing = HorovodRanks.missing()
    if missing:
        say(missing)
        return
    for name in present(options.models):
        if "timeline" in options.parts:
            say(f"{name}: timeline")
            yield [{**_about(name, "timeline", "ours-memory", TRACED_WORLD), **_timeline(name)}]
        for world in map(int, options.worlds if "workers" in options.parts else ()):
            for method in options.methods:
                say(f"{name}: {world} workers, {method}")
                yield [_row(options, name, world, method)]


def _about(name: str, part: str, method: str, world: int) -> Row:
    model = MODELS[name]
    return {
        "model": name,
        "title": model.title,
        "part": part,
        "method": method,
        "method_title": METHODS["horovod"][method].title,
        "world": world,
        "batch": model.shape,
        "simulated": False,
        "status": "ok",
    }


def _row(options: argparse.Namespace, name: str, world: int, method: str) -> Row:
    """The duration of a checkpoint, and the overhead with one at every step."""
    row = _about(name, "workers", method, world)
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        places = (folder / "files", memory)
        places[0].mkdir()
        try:
            with attached(method, "horovod", name, world, places, options.timeout) as (team, size):
                frequency = Frequency(team, options.rounds)
                frequency.at(1, rounds=1, checkpoints=2)
                return {**row, "state_bytes": size, **frequency.at(1)}
        except TeamError as error:
            return {**row, "status": f"failed: {error}"}


def _timeline(name: str) -> Row:
    """Train some traced steps, and sum up both timelines."""
    with temporary(SHARED_MEMORY) as folder:
        timeline, log = folder / "horovod.json", folder / "log"
        plan = json.dumps({"model": name, "folder": str(folder)})
        environment = {"HOROVOD_TIMELINE": str(timeline), "TIERCKPT_TRACE_DIR": str(folder)}
        environment["TIERCKPT_AGENT_LINGER_SECONDS"] = "0"
        command = [sys.executable, str(RANK), plan]
        for process in HorovodRanks.start(TRACED_WORLD, command, environment, log):
            if process.wait():
                raise RuntimeError(f"{name}: a rank failed:\n{log.read_text()[-3000:]}")
        found = summarize(load(sorted(folder.glob("trace-r*.json")), timeline))
    hidden = found.hidden
    return {
        "steps": found.steps,
        "allreduces": [asdict(bucket) for bucket in found.buckets],
        "gaps": asdict(found.gaps),
        "durations": {kind: asdict(stats) for kind, stats in found.durations.items()},
        "copy_us": hidden.copy_us,
        "hidden_in_communication": hidden.share(hidden.communication_us),
        "hidden_in_backward": hidden.share(hidden.backward_us),
        "hidden_in_gaps": hidden.share(hidden.computing_us),
    }
