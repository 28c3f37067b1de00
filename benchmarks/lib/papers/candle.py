"""CANDLE's NT3, and ResNet, under Horovod: a timeline of allreduces and copies, and the cost of
checkpoints over workers.

*Timeline*: Horovod's own and Tierckpt's, over workers and batch sizes, on one axis
(`tierckpt.tracing`): allreduces by message size, as DeepIntrospect lists them; gaps between updates
of the weights; the share of the copies hidden in them. *Workers*: duration of a checkpoint at every
step, and its cost, as DeepFreeze reports them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import to_builtins

from lib.files import SHARED_MEMORY, temporary
from lib.methods.registry import METHODS
from lib.papers.frequency import Frequency, attached
from lib.papers.models import MODELS
from lib.papers.results import Row
from lib.training.launchers import HorovodRanks
from tierckpt.cli.trace import load
from tierckpt.tracing.timeline import summarize

RANK = Path(__file__).with_name("traced_rank.py")


def keys(options: argparse.Namespace) -> Iterator[Row]:
    """What identifies each row: timelines over workers and batches, costs over workers."""
    for model in options.models:
        own = str(MODELS[model].batch)
        for world in options.worlds:
            timelines = [("timeline", "ours-memory", each) for each in options.samples]
            costs = [("workers", method, own) for method in options.methods]
            for part, method, samples in [*timelines, *costs]:
                if part in options.parts and (part == "workers" or world != "1"):
                    yield {
                        "model": model,
                        "part": part,
                        "method": method,
                        "world": int(world),
                        "samples": int(samples),
                    }


def missing(options: argparse.Namespace) -> list[str | None]:
    """Why the chosen rows cannot be measured here."""
    return [HorovodRanks.missing()]


def measure(options: argparse.Namespace, key: Row) -> Row:
    """Measure a row."""
    model = MODELS[key["model"]]
    about = {"title": model.title, "method_title": METHODS["horovod"][key["method"]].title}
    if key["part"] == "timeline":
        return {**about, **_timeline(key)}
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        places = (folder / "files", memory)
        places[0].mkdir()
        started = attached(
            key["method"], "horovod", key["model"], key["world"], places, options.timeout
        )
        with started as (team, size):
            frequency = Frequency(team, options.rounds)
            frequency.at(1, rounds=1, checkpoints=2)
            return {**about, "state_bytes": size, **frequency.at(1)}


def _timeline(key: Row) -> Row:
    """Train some traced steps, and sum up both timelines."""
    with temporary(SHARED_MEMORY) as folder:
        timeline, log = folder / "horovod.json", folder / "log"
        plan = json.dumps({**key, "folder": str(folder)})
        environment = {"HOROVOD_TIMELINE": str(timeline), "TIERCKPT_TRACE_DIR": str(folder)}
        environment["TIERCKPT_AGENT_LINGER_SECONDS"] = "0"
        command = [sys.executable, str(RANK), plan]
        for process in HorovodRanks.start(key["world"], command, environment, log):
            if process.wait():
                raise RuntimeError(f"{key['model']}: a rank failed:\n{log.read_text()[-3000:]}")
        found = summarize(load(sorted(folder.glob("trace-r*.json")), timeline))
    hidden = found.hidden
    return {
        "steps": found.steps,
        "allreduces": [to_builtins(bucket) for bucket in found.buckets],
        "gaps": to_builtins(found.gaps),
        "durations": {kind: to_builtins(stats) for kind, stats in found.durations.items()},
        "copy_us": hidden.copy_us,
        "hidden_in_communication": hidden.share(hidden.communication_us),
        "hidden_in_backward": hidden.share(hidden.backward_us),
        "hidden_in_gaps": hidden.share(hidden.computing_us),
    }
