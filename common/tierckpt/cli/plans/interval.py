"""`tierckpt interval`: how often each level should take a version."""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tierckpt._event_files import Record, decode, event_files, lines_of, unreadable
from tierckpt._units import time_text
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

from ..arguments import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_STEPS = 10**9
MEASURED = "the agent's cost to the training is known only for levels on `auto`"
TIMED = {"sealed": "stall", "interval": "cost"}
"""Events, and the time that is read from each."""


def add_interval(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt interval`."""
    parser.description = (
        "Uses the events of a job (events_dir), or times given by hand, which take "
        "precedence. Times look like 20ms, 1.5s, 3m, 8h, 2d; without a unit they are seconds."
    )
    text = "the job's events_dir, or files from it; of several nodes, those of all"
    parser.add_argument("--events", type=Path, nargs="+", default=[], metavar="EVENTS", help=text)
    text = "duration of a step without a checkpoint"
    parser.add_argument("--step", type=duration, metavar="TIME", help=text)
    text = "mean time between failures of the job, of any kind; default: from the events"
    parser.add_argument("--failure-every", type=rarity, metavar="TIME", help=text)
    parser.add_argument(
        "--level",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "TIME"),
        help=f"one of {', '.join(SHARES)}; the time that a version there adds to the training; and "
        "optionally the time between failures that need this level, and the time of a restart from "
        "it",
    )
    text = "share of the training time that checkpoints may take"
    parser.add_argument("--budget", type=float, default=0.03, metavar="SHARE", help=text)
    parser.set_defaults(run=interval)


def rarity(text: str) -> float:
    """Seconds between failures; `inf` for no failures. Raises as `duration` does."""
    return math.inf if text == "inf" else duration(text)


def interval(args: argparse.Namespace, console: Console) -> None:
    """Print the table. Raises ConfigError when something is missing or wrong."""
    job = observe(*read(args.events)) if args.events else Job()
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


# --- observations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The input of the table."""

    step_seconds: float = 0.0
    levels: dict[str, LevelModel] = field(default_factory=dict)
    """In the order of `SHARES`. A rate of NaN is unknown."""
    notes: tuple[str, ...] = ()


def read(places: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """All events in these folders and files in order of time, and notes about lines that are none.
    Raises ConfigError if a file cannot be read, or none has an event."""
    found, bad = list[Record](), Counter[Path]()
    for path in event_files(places):
        for line in lines_of(path):
            record = decode(line)
            if record is None or TIMED.get(record["name"], "") not in ("", *record["seconds"]):
                bad[path] += 1
            else:
                found.append(record)
    if bad and not found:
        raise ConfigError(
            f"{next(iter(bad))}, line 1: not an event of a job; give files that Tierckpt wrote to "
            "events_dir"
        )
    notes = [note for path, number in bad.items() for note in unreadable(path, number)]
    return sorted(found, key=lambda record: record["time_seconds"]), notes


def observe(events: Sequence[Record], notes: Iterable[str] = ()) -> Job:
    """Costs, latencies, and how often each level was needed, from a job's own events. `notes` are
    passed on."""
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
    note = f"{' and '.join(unknown)} counted at no cost: {MEASURED}; give --level"
    return Job(_step_seconds(events), levels, (*notes, note) if unknown else (*notes,))


def _costs(events: Sequence[Record]) -> dict[str, float]:
    """The cost of a version by level: as measured on automatic intervals, else the stalls."""
    stalls: dict[int, float] = defaultdict(float)
    for event in events:
        if event["name"] == "sealed":
            stall = event["seconds"]["stall"]
            stalls[event["version"]] = max(stalls[event["version"]], stall)
    found = {"memory": median(stalls.values())} if stalls else {}
    measured = (e for e in events if e["name"] == "interval")
    return found | {e["level"]: e["seconds"]["cost"] for e in measured}


def _writing(events: Sequence[Record], level: str) -> float:
    """Median seconds until a node has written a version to a level; 0 if none was written."""
    found = [e for e in events if (e["name"], e["level"]) == ("committed", level)]
    return median(sum(e["seconds"].values()) for e in found) if found else 0.0


def _history(events: Sequence[Record]) -> Iterator[list[Record]]:
    """Each rank's events, split at its restarts."""
    by_rank: dict[int, list[Record]] = defaultdict(list)
    for event in events:
        by_rank[event["rank"]].append(event)
    for own in by_rank.values():
        cuts = [i for i, event in enumerate(own) if event["name"] == "restored"]
        for begin, end in pairwise([0, *cuts, len(own)]):
            yield own[begin:end]


def _step_seconds(events: Sequence[Record]) -> float:
    """The median duration of a step between consecutive versions of one run."""
    found = []
    for run_events in _history(events):
        for one, next_one in pairwise(e for e in run_events if e["name"] == "sealed"):
            steps = next_one["version"] - one["version"]
            if steps > 0:
                found.append((next_one["time_seconds"] - one["time_seconds"]) / steps)
    return median(found) if found else 0.0


def _failures(events: Sequence[Record]) -> tuple[dict[str, int], dict[str, float], float]:
    """By level, the number of failures that needed it and the median seconds until the job was
    back; and the seconds observed in total. A job that was closed and started later did not
    fail."""
    count, gaps = dict.fromkeys(SHARES, 0), defaultdict(list)
    events = [event for event in events if event["name"] not in ("started", "attached")]
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
            # Shards from peers' parity and from other nodes' agents count as the local level.
            level = max((p if p in SHARES else "local" for p in parts), key=list(SHARES).index)
            count[level] += 1
            gap = event["time_seconds"] - before["time_seconds"]
            gaps[level].append(max(gap, event["seconds"].get("total", 0.0)))
        ended = False
    return count, {level: median(seconds) for level, seconds in gaps.items()}, span_seconds


def by_hand(job: Job, args: argparse.Namespace) -> Job:
    """The job with the values given on the command line. Raises ConfigError."""
    levels = dict(job.levels)
    for name, *times in args.level:
        if name not in SHARES or not 1 <= len(times) <= 3:
            raise ConfigError(
                f"--level {' '.join([name, *times])}: give one of {', '.join(SHARES)} and one to "
                "three times: cost of a version, time between failures, duration of a restart"
            )
        try:
            # The second time is the one between failures.
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
    """Raise ConfigError, with the option to give, if a needed value is unknown."""
    if not job.levels:
        raise ConfigError("no checkpoint is known; give --events EVENTS or --level NAME TIME")
    if not job.step_seconds > 0:
        raise ConfigError("the duration of a step is unknown; give --step TIME")
    if not 0 < args.budget < 1:
        raise ConfigError(f"--budget is {args.budget}; give a share between 0 and 1")
    unknown = [n for n, x in job.levels.items() if not x.failures_per_second < math.inf]
    if unknown:
        raise ConfigError(
            f"the rate of failures that need {' and '.join(unknown)} is unknown: the events "
            "contain no restart; give --failure-every TIME, or the time between failures with "
            "--level"
        )


# --- output --------------------------------------------------------------------------------------


def table(
    levels: Sequence[LevelModel],
    free: Sequence[float],
    steps: Sequence[int],
    chosen: Sequence[float],
) -> Table:
    """One line per level: the interval without and with the budget, the share of time that
    checkpoints take, and the share lost to failures."""
    from rich.table import Table

    shown = Table(title="How often to take a version", title_justify="left")
    shown.add_column("level")
    for name in ("costs", "fails every", "best", "chosen", "in steps", "takes", "loses"):
        shown.add_column(name, justify="right")
    for level, best, count, interval_seconds in zip(levels, free, steps, chosen, strict=True):
        part = overhead([level], [interval_seconds])
        rate = level.failures_per_second
        shown.add_row(
            level.name,
            time_text(level.cost_seconds),
            time_text(1 / rate) if rate else "never",
            time_text(best),
            time_text(interval_seconds),
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
        f"A step takes {time_text(job.step_seconds)}. Checkpoints take "
        f"{100 * spent.checkpoints:.2f} % of the training time (budget {100 * budget:g} %). "
        f"{100 * spent.goodput:.1f} % of the wall time is useful training.",
        f"Settings: {settings}",
        *(f"Note: {note}" for note in job.notes),
    ]
