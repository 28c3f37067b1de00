"""`tierckpt interval` and `simulate`: how often to checkpoint, and what failures cost.

`interval` computes how often each level should take a version. `simulate` gives goodput, lost
work, traffic and best intervals of a simulated job.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from tierckpt._text import counted, size_text, time_text
from tierckpt.core.tuning import (
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
from tierckpt.events import Record, decode, event_files, lines_of, unreadable

from .arguments import add_json, duration
from .output import print_columns

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tierckpt.events import Record
    from tierckpt.simulation.course import Estimate, Study
    from tierckpt.simulation.scenario import Scenario


MAX_STEPS = 10**9
MEASURED = "the agent's cost to the training is known only for levels on `auto`"
TIMED = {"sealed": "stall", "interval": "cost"}
"""Events, and the time read from each."""


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
    job = observe(*read_events(args.events)) if args.events else Job()
    job = by_hand(job, args)
    check(job, args)
    levels = list(job.levels.values())
    free = optimum(levels, job.step_seconds)
    held = within_budget(levels, free, args.budget)
    steps = whole_steps(held, job.step_seconds, MAX_STEPS)
    chosen = [n * job.step_seconds for n in steps]
    console.print(interval_table(levels, free, steps, chosen))
    for line in conclusions(job, levels, steps, overhead(levels, chosen), args.budget):
        console.print(line, soft_wrap=True)


# --- observations --------------------------------------------------------------------------------


class Job(Struct, frozen=True):
    """The input of the table."""

    step_seconds: float = 0.0
    levels: dict[str, LevelModel] = field(default_factory=dict)
    """In the order of `SHARES`. A rate of NaN is unknown."""
    notes: tuple[str, ...] = ()


def read_events(places: Iterable[Path]) -> tuple[list[Record], list[str]]:
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
        for start, end in pairwise([0, *cuts, len(own)]):
            yield own[start:end]


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


def interval_table(
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
            str(count) if count < MAX_STEPS else "-",
            *(f"{100 * share:.2f} %" for share in (part.checkpoints, part.lost)),
        )
    return shown


def conclusions(
    job: Job, levels: Sequence[LevelModel], steps: Sequence[int], spent: Overhead, budget: float
) -> list[str]:
    """Sentences below the table."""
    settings = ", ".join(
        f"{level.name}_every_steps={n if n < MAX_STEPS else 0}"
        for level, n in zip(levels, steps, strict=True)
    )
    return [
        f"A step takes {time_text(job.step_seconds)}. Checkpoints take "
        f"{100 * spent.checkpoints:.2f} % of the training time (budget {100 * budget:g} %). "
        f"{100 * spent.goodput:.1f} % of the wall time is useful training.",
        f"Settings: {settings}",
        *(f"Note: {note}" for note in job.notes),
    ]


PHASES = {
    "training": "training that counted",
    "checkpoints": "checkpoint stalls",
    "lost": "lost work",
    "start": "first start",
    "noticed": "failure noticed",
    "nodes": "replacing nodes",
    "restart": "processes started again",
    "recovery": "recovery",
}
SHOWN_BESIDE_EACH_OTHER = "value", "goodput", "lost work", "restarts", "stalls", "failures"


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt simulate SCENARIO`."""
    parser.description = (
        "Simulates a job that fails and restarts, from a scenario in a TOML file "
        "(`tierckpt simulate --example > job.toml` writes one to start from). Options replace "
        "values of the file, and these replace values measured from events. Needs the extra "
        "[simulate]."
    )
    parser.add_argument("scenario", type=Path, nargs="?", metavar="SCENARIO", help="a TOML file")
    text = "print an example, and end: %(choices)s (default: %(const)s)"
    names = ("cluster", "llama3", "torch-save", "spot", "constant")
    parser.add_argument("--example", nargs="?", const=names[0], choices=names, help=text)
    text = "measure costs, restarts and the failure rate from a job's events_dir; may be repeated"
    parser.add_argument(
        "--events", type=Path, action="append", default=[], metavar="EVENTS", help=text
    )
    text = "set a value of the scenario, such as job.ranks=1024; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "simulate each value, and print a line for each: job.ranks=64,1024,16384"
    parser.add_argument("--vary", metavar="NAME=VALUES", help=text)
    text = "simulate also with the best interval of each level, by the formula"
    parser.add_argument("--best", action="store_true", help=text)
    parser.add_argument("--replicas", type=int, metavar="N", help="number of repetitions")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all random numbers")
    add_json(parser)
    parser.set_defaults(run=simulate)


def simulate(args: argparse.Namespace, console: Console) -> None:
    """Run `tierckpt simulate`. Raises ConfigError for a scenario that makes no sense."""
    from tierckpt.simulation.course import document
    from tierckpt.simulation.scenario import EXAMPLES

    if args.example is not None:
        print(EXAMPLES[args.example], end="")
        return
    tree, source = _tree(args)
    studies = _studies(tree, source, args)
    if args.json:
        documents = {name: document(study) for name, study in studies.items()}
        print(json.dumps(documents if args.vary else documents[""], indent=2))
    elif args.vary:
        print_columns(_beside_each_other(studies), ("value",), console)
        for name, study in studies.items():
            for note in study.notes:
                console.print(f"Note on {name}: {note}", soft_wrap=True)
    else:
        for name, study in studies.items():
            _print_studies(study, name, console)


def _tree(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The tables of the file, events and options, and their name in messages."""
    from tierckpt.simulation.scenario import assignments, merge_trees, read_tree

    if args.scenario is None and not args.events:
        raise ConfigError(
            "no scenario; give a file, which `tierckpt simulate --example > job.toml` writes to "
            "start from, or --events EVENTS"
        )
    measured = from_events(args.events) if args.events else {}
    given = read_tree(args.scenario) if args.scenario is not None else {}
    options = {name: getattr(args, name) for name in ("replicas", "seed")}
    named = {name: value for name, value in options.items() if value is not None}
    tree = merge_trees(measured, given, named, assignments(args.set))
    return tree, str(args.scenario or args.events[0])


def _studies(tree: dict[str, Any], source: str, args: argparse.Namespace) -> dict[str, Study]:
    """By name: one, named with empty text, or one for each value of --vary."""
    from tierckpt.simulation.course import simulate as run
    from tierckpt.simulation.course import with_best_intervals
    from tierckpt.simulation.scenario import assignment, merge_trees, scenario_of

    if not args.vary:
        scenarios = {"": scenario_of(tree, source)}
    else:
        name, equals, values = args.vary.partition("=")
        if not equals:
            raise ConfigError(f"--vary {args.vary}: write a name and values, job.ranks=64,1024")
        scenarios = {
            f"{name}={value}": scenario_of(merge_trees(tree, assignment(name, value)), source)
            for value in values.split(",")
        }
    if args.best:
        scenarios |= {
            f"{name or source}, best intervals": with_best_intervals(scenario)
            for name, scenario in scenarios.items()
            if _has_levels(scenario)
        }
    return {name: run(scenario) for name, scenario in scenarios.items()}


def _has_levels(scenario: Scenario) -> bool:
    if not scenario.levels:
        raise ConfigError("--best needs levels, and [constant] has none; remove --best")
    return True


# --- measured costs ------------------------------------------------------------------------------


def from_events(places: list[Path]) -> dict[str, Any]:
    """The tables that a job's own events give: steps, costs and intervals of levels, the parts of
    its restarts, and how often it failed."""
    from tierckpt.events import event_files
    from tierckpt.goodput.account import account
    from tierckpt.goodput.records import read as read_records

    files = event_files(places)
    events, notes = read_events(files)
    seen = observe(events, notes)
    job = account(*read_records(files))
    tree: dict[str, Any] = {"job": {"ranks": max(run.world for run in job.runs)}}
    if seen.step_seconds:
        tree["job"]["step"] = f"{seen.step_seconds}s"
    tree["levels"] = {}
    for name, level in seen.levels.items():
        every = _usual_steps(events, name)
        tree["levels"][name] = {"cost": f"{level.cost_seconds}s", "every_steps": every}
        if level.latency_seconds:
            tree["levels"][name]["write"] = f"{level.latency_seconds}s"
    restarts = [run.seconds for run in job.runs if run.after_failure]
    if restarts:
        noticed = median(s["noticed"] + s["ended"] for s in restarts)
        parts = ("relaunch", "import", "setup", "rendezvous", "attach", "first_step")
        start = median(math.fsum(s[part] for part in parts) for s in restarts)
        tree["restart"] = {"notice": f"{noticed}s", "start": f"{start}s"}
        tree["failures"] = {"job_every": f"{job.elapsed_seconds / len(restarts)}s"}
        load = median(s["restore"] for s in restarts)
        for level in tree["levels"].values():
            level["restore"] = f"{load}s"
    return tree


def _usual_steps(events: Sequence[Record], level: str) -> int:
    """Median number of steps between two versions of a level; 1 if none shows it."""
    name = "sealed" if level == "memory" else "committed"
    found = {e["version"] for e in events if (e["name"], e["level"]) == (name, level)}
    gaps = [after - before for before, after in pairwise(sorted(found))]
    return max(1, round(median(gaps))) if gaps else 1


# --- output --------------------------------------------------------------------------------------


def _print_studies(study: Study, name: str, console: Console) -> None:
    from tierckpt.simulation.course import levels, sources

    if name:
        console.print(f"\n{name}:", soft_wrap=True)
    print_columns(_phase_lines(study), ("time",), console)
    console.print()
    restarts = sources(study)
    if restarts:
        print_columns(_source_lines(restarts), ("restart from",), console)
        console.print()
    table = levels(study)
    if table:
        print_columns(_level_lines(table), ("level",), console)
        console.print()
    for line in _conclusions(study):
        console.print(line, soft_wrap=True)


def _percent(share: Estimate, digits: int = 2) -> str:
    error = "" if math.isnan(share.error) else f" ± {100 * share.error:.{digits}f}"
    return f"{100 * share.mean:.{digits}f}{error} %"


def _phase_lines(study: Study) -> list[tuple[str, ...]]:
    wall = study.estimate(o.wall_seconds for o in study.outcomes).mean
    lines: list[tuple[str, ...]] = [("time", "share", "in all")]
    for name, share in study.phase_shares.items():
        if share.mean > 0:
            level = name.removeprefix("load ")
            title = PHASES.get(name, f"restore from {level}" if level != name else name)
            lines.append((title, _percent(share), time_text(wall * share.mean)))
    return lines


def _source_lines(restarts: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("restart from", "restarts", "restore", "lost work, each")]
    for name, each in restarts.items():
        load, lost = time_text(each["load_seconds"]), time_text(each["lost_seconds"])
        lines.append((name, f"{each['restarts']:.1f}", load, lost))
    return lines


def _level_lines(table: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    head = ("level", "steps", "every", "best", "stall", "complete after", "restore")
    lines: list[tuple[str, ...]] = [(*head, "written a day", "network a day", "files a version")]
    for name, each in table.items():
        best = each["best_seconds"]
        lines.append(
            (
                name,
                str(each["every_steps"]) if each["every_steps"] < 10**9 else "-",
                time_text(each["every_seconds"]) if each["every_steps"] < 10**9 else "never",
                "-" if best is None else time_text(best),
                time_text(each["stall_seconds"]),
                time_text(each["latency_seconds"]),
                time_text(each["restore_seconds"]),
                "-" if name == "memory" else size_text(round(each["written_bytes_per_day"])) or "0",
                size_text(round(each["network_bytes_per_day"])) or "-",
                str(each["files_per_version"] or "-"),
            )
        )
    return lines


def _conclusions(study: Study) -> list[str]:
    """Sentences below the tables."""
    scenario, outcomes = study.scenario, study.outcomes
    walls = study.estimate(o.wall_seconds for o in outcomes)
    failures = study.estimate(float(sum(o.failures.values())) for o in outcomes)
    error = "" if math.isnan(failures.error) else f" ± {failures.error:.1f}"
    often = time_text(walls.mean / failures.mean) if failures.mean else "never"
    ranks = "1 rank" if scenario.job.ranks == 1 else f"{scenario.job.ranks:,} ranks"
    lines = [
        f"Simulated goodput {_percent(study.goodput)} in {time_text(walls.mean)} on "
        f"{ranks} ({counted(scenario.replicas, 'replica')}, seed "
        f"{scenario.seed}, 95 % confidence).",
        f"{failures.mean:.1f}{error} failures, one every {often}."
        if failures.mean
        else 'No failures: give their rates in [failures], such as node_every = "1y".',
        *_losses(study),
    ]
    if not math.isinf(scenario.job.work_seconds) and not all(o.done for o in outcomes):
        undone = sum(not o.done for o in outcomes)
        lines.append(f"The work was not done in {undone} of {len(outcomes)} replicas.")
    expected = study.expected_losses
    if expected is not None:
        beyond = study.estimate(float(o.beyond_redundancy) for o in outcomes).mean
        lines.append(
            f"Losses beyond the redundancy of the peer level: {beyond:.2g} in this time "
            f"(by the formula, of single nodes: {expected:.2g})."
        )
    return [*lines, *(f"Note: {note}" for note in study.notes)]


def _losses(study: Study) -> list[str]:
    """Where the rest of the time goes, as parts of that rest."""
    shares = {name: share.mean for name, share in study.phase_shares.items()}
    lost = math.fsum(share for name, share in shares.items() if name != "training")
    if lost <= 0:
        return []
    own = {"checkpoints": "stalls of versions", "lost": "training made again"}
    waits = lost - math.fsum(shares.get(name, 0.0) for name in own)
    parts = [(waits, "waiting, while no rank trains: the notice, nodes, processes, the restore")]
    parts += [(shares.get(name, 0.0), text) for name, text in own.items()]
    listed = "; ".join(f"{100 * share / lost:.0f} % {text}" for share, text in parts)
    return [f"Of the other {100 * lost:.2f} %: {listed}."]


def _beside_each_other(studies: Mapping[str, Study]) -> list[tuple[str, ...]]:
    """One line for each study."""
    lines: list[tuple[str, ...]] = [SHOWN_BESIDE_EACH_OTHER]
    for name, study in studies.items():
        shares = study.phase_shares
        restarts = math.fsum(
            share.mean
            for phase, share in shares.items()
            if phase not in ("training", "checkpoints", "lost")
        )
        failures = study.estimate(float(sum(o.failures.values())) for o in study.outcomes)
        lines.append(
            (
                name,
                _percent(study.goodput),
                f"{100 * shares['lost'].mean:.2f} %",
                f"{100 * restarts:.2f} %",
                f"{100 * shares['checkpoints'].mean:.2f} %",
                f"{failures.mean:.1f}",
            )
        )
    return lines
