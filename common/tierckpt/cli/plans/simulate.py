"""`tierckpt simulate`: goodput, lost work, traffic and best intervals of a job, simulated."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tierckpt._text import counted, size_text
from tierckpt._units import time_text
from tierckpt.errors import ConfigError

from ..arguments import add_json
from ..columns import print_columns

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt._event_files import Record
    from tierckpt.simulation.replicas import Estimate, Study
    from tierckpt.simulation.scenario import Scenario

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
    from tierckpt.simulation.examples import EXAMPLES
    from tierckpt.simulation.report import document

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
            _print(study, name, console)


def _tree(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The tables of the file, events and options, and their name in messages."""
    from tierckpt.simulation.scenario_file import assignments, merge, read

    if args.scenario is None and not args.events:
        raise ConfigError(
            "no scenario; give a file, which `tierckpt simulate --example > job.toml` writes to "
            "start from, or --events EVENTS"
        )
    measured = from_events(args.events) if args.events else {}
    given = read(args.scenario) if args.scenario is not None else {}
    options = {name: getattr(args, name) for name in ("replicas", "seed")}
    named = {name: value for name, value in options.items() if value is not None}
    tree = merge(measured, given, named, assignments(args.set))
    return tree, str(args.scenario or args.events[0])


def _studies(tree: dict[str, Any], source: str, args: argparse.Namespace) -> dict[str, Study]:
    """By name: one, named with empty text, or one for each value of --vary."""
    from tierckpt.simulation.replicas import simulate as run
    from tierckpt.simulation.replicas import with_best_intervals
    from tierckpt.simulation.scenario_file import assignment, merge, scenario_of

    if not args.vary:
        scenarios = {"": scenario_of(tree, source)}
    else:
        name, equals, values = args.vary.partition("=")
        if not equals:
            raise ConfigError(f"--vary {args.vary}: write a name and values, job.ranks=64,1024")
        scenarios = {
            f"{name}={value}": scenario_of(merge(tree, assignment(name, value)), source)
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
    from tierckpt._event_files import event_files
    from tierckpt.goodput.account import account
    from tierckpt.goodput.records import read as read_records

    from .interval import observe, read

    files = event_files(places)
    events, notes = read(files)
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


def _print(study: Study, name: str, console: Console) -> None:
    from tierckpt.simulation.report import levels, sources

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
