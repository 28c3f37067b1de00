"""`tierckpt doctor`: the findings of all checks on one screen, with the cures."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import asdict
from rich.table import Table
from rich.text import Text

from tierckpt._text import bytes_of, some
from tierckpt.doctor.examination import Report, examine_all
from tierckpt.doctor.software import Finding, Mark, Subject, valid_config
from tierckpt.run.launcher import place_of

from .arguments import add_json, place
from .output import UNLIMITED

if TYPE_CHECKING:
    from rich.console import Console


CURE = "cure"
SIGNS = {Mark.GOOD: "✓", Mark.ABSENT: "-", Mark.WARNING: "!", Mark.CROSS: "✗", CURE: "→"}
PLAIN_SIGNS = {**SIGNS, Mark.GOOD: "+", Mark.CROSS: "x", CURE: "->"}
"""For terminals without Unicode."""
STYLES = {Mark.GOOD: "green", Mark.ABSENT: "dim", Mark.WARNING: "yellow", Mark.CROSS: "bold red"}


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt doctor`."""
    parser.description = (
        "Looks at the software, the machine, the places for checkpoints, the network "
        "and the settings, and prints a cure beside each cross. Under torchrun or mpirun it also "
        "compares all nodes: torchrun --nproc-per-node 1 ... -m tierckpt doctor. The exit status "
        "is 1 if there is a cross; warnings do not count."
    )
    text = "the job's path (default: as the settings say)"
    parser.add_argument("--path", type=place, metavar="P", help=text)
    text = "the job's persistent_path: a directory or URL"
    parser.add_argument("--persistent-path", type=place, metavar="Q", help=text)
    parser.add_argument("--shm-dir", type=place, metavar="D", help="the place for shared memory")
    text = "size of parameters and optimizer state together, e.g. 12G: is there room for it?"
    parser.add_argument("--state-bytes", default="0", metavar="SIZE", help=text)
    add_json(parser)
    parser.set_defaults(run=doctor)


def doctor(args: argparse.Namespace, console: Console) -> int:
    """Examine this node, or all nodes of a launch; returns 1 if there is a cross."""
    given = {"path": args.path, "persistent_path": args.persistent_path, "shm_dir": args.shm_dir}
    arguments = {name: value for name, value in given.items() if value is not None}
    environment = dict(os.environ)
    config = valid_config(arguments, environment)
    state_bytes = bytes_of(args.state_bytes)
    reports = examine_all(Subject(config, environment, arguments, state_bytes))
    if place_of(environment).rank == 0:
        if args.json:
            print(json.dumps([_as_json(report) for report in reports], indent=2))
        else:
            _print(reports, console)
    return int(any(report.count(Mark.CROSS) for report in reports))


def _as_json(report: Report) -> dict[str, object]:
    findings = [
        {"section": section.title, **asdict(finding)}
        for section in report.sections
        for finding in section.findings
    ]
    crosses, warnings = report.count(Mark.CROSS), report.count(Mark.WARNING)
    counts = {"node": report.node, "crosses": crosses, "warnings": warnings}
    return {**counts, "findings": findings}


def _print(reports: Sequence[Report], console: Console) -> None:
    """The first report in full, and of the others what needs a cure."""
    signs = SIGNS if (console.encoding or "").lower().startswith("utf") else PLAIN_SIGNS
    if console.width < UNLIMITED:
        _print_table(reports, signs, console)
    else:
        for line in _lines(reports, signs):
            console.print(line, soft_wrap=True)
    console.print(_closing(reports), soft_wrap=True)


def _lines(reports: Sequence[Report], signs: Mapping[str, str]) -> Iterator[str]:
    """A line for each finding and each cure, for a program that reads them."""
    width = max(len(finding.name) for report in reports for finding in report.findings)
    for title, findings in _parts(reports):
        yield f"  {title}"
        for finding in findings:
            yield f"{signs[finding.mark]} {finding.name:{width}} {finding.text}"
            if finding.cure:
                yield f"  {'':{width}} {signs[CURE]} {finding.cure}"


def _print_table(reports: Sequence[Report], signs: Mapping[str, str], console: Console) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, findings in _parts(reports):
        table.add_row("", Text(title, style="bold"), "")
        for finding in findings:
            sign = Text(signs[finding.mark], style=STYLES[finding.mark])
            table.add_row(sign, finding.name, finding.text)
            if finding.cure:
                table.add_row("", "", Text(f"{signs[CURE]} {finding.cure}", style="cyan"))
    console.print(table)


def _parts(reports: Sequence[Report]) -> Iterator[tuple[str, list[Finding]]]:
    for section in reports[0].sections:
        yield section.title, [*section.findings]
    for report in reports[1:]:
        bad = [f for f in report.findings if f.mark in (Mark.WARNING, Mark.CROSS)]
        if bad:
            yield f"On {report.node}", bad


def _closing(reports: Sequence[Report]) -> str:
    if not any(report.count(mark) for mark in (Mark.CROSS, Mark.WARNING) for report in reports):
        return "nothing needs a cure"
    return f"{_counted(reports, Mark.CROSS)} to cure, {_counted(reports, Mark.WARNING)} to consider"


def _counted(reports: Sequence[Report], mark: Mark) -> str:
    """`2 (torch, path)`: the rows may have left the screen."""
    names = [f.name for report in reports for f in report.findings if f.mark is mark]
    return f"{len(names)} ({some([*dict.fromkeys(names)], 4)})" if names else "0"
