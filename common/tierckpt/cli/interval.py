"""`tierckpt interval`: how often each level should take a version."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tierckpt.core.tuning.interval_model import (
    SHARES,
    LevelModel,
    Overhead,
    optimum,
    overhead,
    rates,
    whole_steps,
    within_budget,
)
from tierckpt.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNITS_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST_STEPS = 10**9
MEASURED = "what the agent's writing takes from the training is only known of levels on `auto`"
TIMED = {"sealed": "stall", "interval": "cost"}
"""Events, and which of their times is asked for."""
Record = dict[str, Any]


def interval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of `tierckpt interval`."""
    parser = commands.add_parser(
        "interval",
        help="compute the best interval between checkpoints, for each level",
        description="From what a job's events say (events_dir), or from figures given by hand; "
        "those win. Times are like 20ms, 1.5s, 3m, 8h, 2d; seconds without a unit.",
    )
    what = "what ranks wrote to events_dir"
    parser.add_argument("--events", type=Path, nargs="+", default=[], metavar="FILE", help=what)
    what = "a step without a checkpoint"
    parser.add_argument("--step", type=duration, metavar="TIME", help=what)
    what = "mean time between failures of the job, of any kind; default: as in the events"
    parser.add_argument("--failure-every", type=rarity, metavar="TIME", help=what)
    parser.add_argument(
        "--level",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "TIME"),
        help=f"one of {', '.join(SHARES)}, what a version there adds to the training, and if you "
        "like, the time between failures that need this level, and that of a restart from it",
    )
    what = "share of the training's time that checkpoints may take"
    parser.add_argument("--budget", type=float, default=0.03, metavar="SHARE", help=what)
    parser.set_defaults(run=run)


def duration(text: str) -> float:
    """Seconds. Raises ArgumentTypeError, which argparse shows."""
    number = text.rstrip("smhd")
    try:
        seconds = float(number) * UNITS_SECONDS[text[len(number) :] or "s"]
    except (KeyError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no finite time of 0 or more; write for example 1.5s, 20m or 8h"
        )
    return seconds


def rarity(text: str) -> float:
    """Seconds between failures; `inf` where there are none. Raises what `duration` raises."""
    return math.inf if text == "inf" else duration(text)


def run(args: argparse.Namespace, console: Console) -> None:
    """Print the table. Raises ConfigError when something is missing or wrong."""
    job = observe(read(args.events)) if args.events else Job()
    job = by_hand(job, args)
    check(job, args)
    levels = list(job.levels.values())
    free = optimum(levels, job.step_seconds)
    held = within_budget(levels, free, args.budget)
    steps = whole_steps(held, job.step_seconds, MOST_STEPS)
    chosen = [n * job.step_seconds for n in steps]
    console.print(table(levels, free, steps, chosen))
    for line in conclusions(job, levels, steps, overhead(levels, chosen), args.budget):
        console.print(line, soft_wrap=True)


# --- what is known -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What the table is made from."""

    step_seconds: float = 0.0
    levels: dict[str, LevelModel] = field(default_factory=dict)
    """In the order of `SHARES`; a rate of NaN is not known yet."""
    notes: tuple[str, ...] = ()


def read(paths: Iterable[Path]) -> list[Record]:
    """All events, in order of time. Raises ConfigError, naming file and line."""
    found = []
    for path in paths:
        try:
            lines = path.read_text(errors="replace").splitlines(keepends=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                found.append(_event(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if line.endswith("\n"):  # the last line of a killed rank may be half a line
                    raise ConfigError(
                        f"{path}, line {number}: no event of a job; give files that Tierckpt wrote "
                        "to events_dir"
                    ) from error
    return sorted(found, key=lambda record: record["time_seconds"])


def _event(record: Record) -> Record:
    """With the fields that are asked for, whatever else it has. Raises what a wrong one raises."""
    name, seconds = str(record["name"]), record["seconds"]
    if name in TIMED:
        seconds[TIMED[name]]
    return {
        **record,
        "time_seconds": float(record["time_seconds"]),
        "name": name,
        "rank": int(record["rank"]),
        "level": str(record["level"]),
        "version": int(record["version"]),
        "seconds": {what: float(each) for what, each in seconds.items()},
    }


def observe(events: Sequence[Record]) -> Job:
    """Costs, latencies, and how often what level was needed, from a job's own events."""
    costs = _costs(events)
    writing = {name: _writing(events, name) for name in SHARES}
    there = [name for name in SHARES if name in costs or writing.get(name)]
    failed, restart_seconds, span_seconds = _failures(events)
    levels = {
        name: LevelModel(
            name,
            costs.get(name, 0.0),
            failed[name] / span_seconds if any(failed.values()) else math.nan,
            restart_seconds.get(name, 0.0),
            writing.get(name, 0.0),
        )
        for name in there
    }
    unknown = [name for name in there if name not in costs]
    note = f"{' and '.join(unknown)} counted as costing nothing: {MEASURED}; give --level"
    return Job(_step_seconds(events), levels, (note,) if unknown else ())


def _costs(events: Sequence[Record]) -> dict[str, float]:
    """What a version adds: as measured where the interval was automatic, else the stalls."""
    stalls: dict[int, float] = defaultdict(float)
    for event in events:
        if event["name"] == "sealed":
            stall = event["seconds"]["stall"]
            stalls[event["version"]] = max(stalls[event["version"]], stall)
    found = {"memory": median(stalls.values())} if stalls else {}
    measured = (e for e in events if e["name"] == "interval")
    return found | {e["level"]: e["seconds"]["cost"] for e in measured}


def _writing(events: Sequence[Record], level: str) -> float:
    """Seconds from an order to a level until a node has done it; 0 when there was none."""
    found = [e for e in events if (e["name"], e["level"]) == ("committed", level)]
    return median(sum(e["seconds"].values()) for e in found) if found else 0.0


def _history(events: Sequence[Record]) -> Iterator[list[Record]]:
    """Each rank's events, cut where it was restarted."""
    by_rank: dict[int, list[Record]] = defaultdict(list)
    for event in events:
        by_rank[event["rank"]].append(event)
    for own in by_rank.values():
        cuts = [i for i, event in enumerate(own) if event["name"] == "restored"]
        for begin, end in pairwise([0, *cuts, len(own)]):
            yield own[begin:end]


def _step_seconds(events: Sequence[Record]) -> float:
    """The median step between versions that followed each other in one run."""
    found = []
    for life in _history(events):
        for one, next_one in pairwise(e for e in life if e["name"] == "sealed"):
            steps = next_one["version"] - one["version"]
            if steps > 0:
                found.append((next_one["time_seconds"] - one["time_seconds"]) / steps)
    return median(found) if found else 0.0


def _failures(events: Sequence[Record]) -> tuple[dict[str, int], dict[str, float], float]:
    """By level: how often a failure needed it, and the median seconds until the job was back; and
    the seconds of it all. A job that ended as it should and came back later did not fail."""
    count, gaps = dict.fromkeys(SHARES, 0), defaultdict(list)
    first = min((event["rank"] for event in events), default=0)
    ended, span_seconds = False, 0.0
    for before, event in pairwise(events):
        ended = ended or (before["name"] == "closed" and before["rank"] == first)
        if not ended:
            span_seconds += event["time_seconds"] - before["time_seconds"]
        if event["name"] != "restored" or event["rank"] != first:
            continue
        if event["level"] and not ended:
            parts = event["level"].split(" and ")
            # What peers rebuild, and other nodes' agents have, is of the local level.
            level = max((p if p in SHARES else "local" for p in parts), key=list(SHARES).index)
            count[level] += 1
            gap = event["time_seconds"] - before["time_seconds"]
            gaps[level].append(max(gap, event["seconds"].get("total", 0.0)))
        ended = False
    return count, {level: median(seconds) for level, seconds in gaps.items()}, span_seconds


def by_hand(job: Job, args: argparse.Namespace) -> Job:
    """With what was given on the command line. Raises ConfigError."""
    levels = dict(job.levels)
    for name, *times in args.level:
        if name not in SHARES or not 1 <= len(times) <= 3:
            raise ConfigError(
                f"--level {' '.join([name, *times])}: give one of {', '.join(SHARES)} and one to "
                "three times: of a version, between failures, of a restart"
            )
        try:
            # The second is that between failures.
            seconds = [(rarity if n == 1 else duration)(text) for n, text in enumerate(times)]
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--level {name}: {error}") from error
        level = replace(levels.get(name, LevelModel(name, 0.0, math.nan)), cost_seconds=seconds[0])
        if len(seconds) > 1:
            level = replace(level, failures_per_second=1 / seconds[1] if seconds[1] else math.inf)
        if len(seconds) > 2:
            level = replace(level, restart_seconds=seconds[2])
        levels[name] = level
    levels = {name: levels[name] for name in SHARES if name in levels}
    if args.failure_every and levels:
        dealt = rates(list(levels), 1 / args.failure_every)
        given = {name for name, *times in args.level if len(times) > 1}
        levels |= {
            name: replace(levels[name], failures_per_second=rate)
            for name, rate in zip(levels, dealt, strict=True)
            if name not in given
        }
    return replace(job, levels=levels, step_seconds=args.step or job.step_seconds)


def check(job: Job, args: argparse.Namespace) -> None:
    """Raise ConfigError, saying what to give, unless all is known that is needed."""
    if not job.levels:
        raise ConfigError("no checkpoint is known of; give --events FILES or --level NAME TIME")
    if not job.step_seconds > 0:
        raise ConfigError("the duration of a step is not known; give --step TIME")
    if not 0 < args.budget < 1:
        raise ConfigError(f"--budget is {args.budget}; give a share between 0 and 1")
    unknown = [n for n, x in job.levels.items() if not x.failures_per_second < math.inf]
    if unknown:
        raise ConfigError(
            f"how often failures need {' and '.join(unknown)} is not known: no restart is in the "
            "events; give --failure-every TIME, or the time between failures with --level"
        )


# --- what is printed -----------------------------------------------------------------------------


def table(
    levels: Sequence[LevelModel],
    free: Sequence[float],
    steps: Sequence[int],
    chosen: Sequence[float],
) -> Table:
    """One line a level: intervals without and with the budget, the share of time that checkpoints
    take, and the share that is lost with failures."""
    from rich.table import Table

    shown = Table(title="How often to take a version", title_justify="left")
    shown.add_column("level")
    for name in ("costs", "fails every", "best", "chosen", "in steps", "takes", "is lost"):
        shown.add_column(name, justify="right")
    for level, best, count, interval_seconds in zip(levels, free, steps, chosen, strict=True):
        part = overhead([level], [interval_seconds])
        rate = level.failures_per_second
        shown.add_row(
            level.name,
            text_of(level.cost_seconds),
            text_of(1 / rate) if rate else "never",
            text_of(best),
            text_of(interval_seconds),
            str(count) if count < MOST_STEPS else "-",
            *(f"{100 * share:.2f} %" for share in (part.checkpoints, part.lost)),
        )
    return shown


def conclusions(
    job: Job, levels: Sequence[LevelModel], steps: Sequence[int], spent: Overhead, budget: float
) -> list[str]:
    """Sentences below the table."""
    settings = ", ".join(
        f"{level.name}_every_steps={n if n < MOST_STEPS else 0}"
        for level, n in zip(levels, steps, strict=True)
    )
    return [
        f"A step takes {text_of(job.step_seconds)}. Checkpoints take "
        f"{100 * spent.checkpoints:.2f} % of the training's time (budget {100 * budget:g} %); of "
        f"the wall time {100 * spent.goodput:.1f} % is useful training.",
        f"Settings: {settings}",
        *(f"Note: {note}" for note in job.notes),
    ]


def text_of(seconds: float) -> str:
    """A duration for people, such as 3.2 ms or 5.0 h."""
    if math.isinf(seconds):
        return "never"
    unit = "ms"
    for name, size in UNITS_SECONDS.items():
        if seconds >= size:
            unit = name
    return f"{seconds / UNITS_SECONDS[unit]:.3g} {unit}"
