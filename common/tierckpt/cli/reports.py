"""`tierckpt goodput` and `report`: where the time of a job went. They change nothing.

`goodput` accounts for the time over all runs of a job. `report` writes one HTML file about it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt._text import counted, size_text
from tierckpt.errors import ConfigError

from .arguments import add_json, duration, place
from .output import print_columns

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.goodput.account import Account

__all__ = ["add_report", "report"]


def add_goodput(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt goodput`."""
    parser.description = (
        "Reads the events of a job (events_dir) and divides the time from the start "
        "of its first process to its last record: training that counted, checkpoint stalls, lost "
        "work, and every part of a restart. The job may still run. Times look like 20ms, 1.5s, "
        "3m, 8h, 2d."
    )
    text = "the job's events_dir, or files from it; of several nodes, those of all"
    parser.add_argument("events", type=Path, nargs="+", metavar="EVENTS", help=text)
    text = "do not count a time without processes longer than this (default: count it, "
    text += "unless the job had ended by itself)"
    parser.add_argument("--gap", type=duration, default=float("inf"), metavar="TIME", help=text)
    text = "floating-point operations of a step on all ranks, for the program goodput"
    parser.add_argument("--step-flop", type=float, metavar="N", help=text)
    text = "peak operations per second of all ranks' accelerators, for the program goodput"
    parser.add_argument("--peak-flops", type=float, metavar="N", help=text)
    add_json(parser)
    parser.set_defaults(run=goodput)


def goodput(args: argparse.Namespace, console: Console) -> None:
    """Print the account. Raises ConfigError if the events cannot be used."""
    from tierckpt.events import event_files
    from tierckpt.goodput.account import account, document
    from tierckpt.goodput.records import read

    if (args.step_flop is None) != (args.peak_flops is None):
        raise ConfigError("the program goodput needs both --step-flop and --peak-flops")
    found, notes = read(event_files(args.events))
    job = account(found, notes, args.gap)
    program = _program_goodput(job, args)
    if args.json:
        print(json.dumps(document(job, program), indent=2))
    else:
        _print_goodput(job, program, args, console)


def _program_goodput(job: Account, args: argparse.Namespace) -> float | None:
    """Share of the peak that the training used while it made progress; None without figures."""
    if args.step_flop is None or not job.training_seconds:
        return None
    if not args.peak_flops > 0 or not args.step_flop > 0:
        raise ConfigError("--step-flop and --peak-flops must be more than 0")
    kept = job.made_steps - job.lost_steps
    return float(kept * args.step_flop / (job.training_seconds * args.peak_flops))


def _print_goodput(
    job: Account, program: float | None, args: argparse.Namespace, console: Console
) -> None:
    from tierckpt.goodput.account import advice, category_lines, conclusions, run_lines

    print_columns(category_lines(job), ("category", "ML Goodput Measurement"), console)
    console.print()
    print_columns(run_lines(job), ("began", "steps", "end"), console)
    console.print()
    unknown = "program unknown (give --step-flop and --peak-flops)"
    known = f"program {100 * program:.1f} %" if program is not None else unknown
    for line in conclusions(job, f"; {known}"):
        console.print(line, soft_wrap=True)
    for line in advice(job, shlex.join(map(str, args.events))):
        console.print(line, soft_wrap=True)
    for note in job.notes:
        console.print(f"Note: {note}", soft_wrap=True)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt report DIR [DIR]`."""
    parser.description = (
        "Writes one HTML file about a job that runs or has ended, which needs no network: where "
        "the time went, restarts, the history, the levels and what each copy cost, allreduces and "
        "the copies under them, cores in use, and differences between replicas. It shows what the "
        "job has recorded: events (events_dir) and a trace (trace_dir), and says what is missing. "
        "Nothing is changed in the job's folders. Needs the extra [plot]."
    )
    text = "a job's path, or a folder with its path, events and traces in it; two: side by side"
    parser.add_argument("job", type=place, nargs="+", metavar="DIR", help=text)
    text = "the file to write (default: %(default)s)"
    default = Path("report.html")
    parser.add_argument("-o", "--out", type=Path, default=default, metavar="FILE", help=text)
    parser.set_defaults(run=report)


def report(args: argparse.Namespace, console: Console) -> None:
    """Write the file. Raises ConfigError if matplotlib is missing, or a folder is that of no
    job."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "tierckpt report draws with matplotlib, which is not installed: "
            "pip install 'tierckpt[plot]'"
        )
    if args.job[2:]:
        raise ConfigError("tierckpt report shows two jobs beside each other at most")
    from tierckpt.report.sources import read_job

    jobs = [read_job(path) for path in args.job]
    from tierckpt.report.page import page  # imports matplotlib

    text, drawn = page(jobs)
    temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(args.out)
    finally:
        temporary.unlink(missing_ok=True)
    size = size_text(len(text))
    console.print(f"{args.out}: {counted(drawn, 'figure')}, {size}", soft_wrap=True)
