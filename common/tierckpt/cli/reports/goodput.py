"""`tierckpt goodput`: where the time of a job went, over all its runs."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt._text import counted
from tierckpt.errors import ConfigError

from ..arguments import add_json, duration
from ..columns import print_columns

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.goodput.account import Account, RunAccount


WORTH_SECONDS = 0.1
"""A rank that others waited for a shorter time for is not named."""


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
    text = "do not count a time without processes that is longer than this (default: count it, "
    text += "unless the job had ended by itself)"
    parser.add_argument("--gap", type=duration, default=float("inf"), metavar="TIME", help=text)
    text = "floating-point operations of a step on all ranks, for the program goodput"
    parser.add_argument("--step-flop", type=float, metavar="N", help=text)
    text = "peak operations per second of all ranks' accelerators, for the program goodput"
    parser.add_argument("--peak-flops", type=float, metavar="N", help=text)
    add_json(parser)
    text = "write a picture: a bar for each run, and one of all shares (needs matplotlib)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)
    parser.set_defaults(run=goodput)


def goodput(args: argparse.Namespace, console: Console) -> None:
    """Print the account. Raises ConfigError if the events cannot be used."""
    from tierckpt._event_files import event_files
    from tierckpt.goodput.account import account
    from tierckpt.goodput.document import document
    from tierckpt.goodput.records import read

    if (args.step_flop is None) != (args.peak_flops is None):
        raise ConfigError("the program goodput needs both --step-flop and --peak-flops")
    found, notes = read(event_files(args.events))
    job = account(found, notes, args.gap)
    program = _program_goodput(job, args)
    if args.json:
        print(json.dumps(document(job, program), indent=2))
    else:
        _print(job, program, args, console)
    if args.plot is not None:
        from tierckpt.goodput.plot import plot

        plot(job, args.plot)
        if not args.json:
            console.print(f"{args.plot}: the picture", soft_wrap=True)


def _program_goodput(job: Account, args: argparse.Namespace) -> float | None:
    """Share of the peak that the training used while it made progress; None without figures."""
    if args.step_flop is None or not job.training_seconds:
        return None
    if not args.peak_flops > 0 or not args.step_flop > 0:
        raise ConfigError("--step-flop and --peak-flops must be more than 0")
    kept = job.made_steps - job.lost_steps
    return float(kept * args.step_flop / (job.training_seconds * args.peak_flops))


def _print(job: Account, program: float | None, args: argparse.Namespace, console: Console) -> None:
    from tierckpt.goodput.advice import advice

    print_columns(_category_lines(job), ("category", "ML Goodput Measurement"), console)
    console.print()
    print_columns(_run_lines(job), ("began", "steps", "end"), console)
    console.print()
    for line in _conclusions(job, program):
        console.print(line, soft_wrap=True)
    for line in advice(job, shlex.join(map(str, args.events))):
        console.print(line, soft_wrap=True)
    for note in job.notes:
        console.print(f"Note: {note}", soft_wrap=True)


def _category_lines(job: Account) -> list[tuple[str, ...]]:
    from tierckpt.goodput.categories import CATEGORIES, NOT_RUNNING

    seconds, counts, elapsed = job.seconds, job.counts, job.elapsed_seconds or 1.0
    lines: list[tuple[str, ...]] = [
        ("category", "seconds", "share", "runs", "ML Goodput Measurement")
    ]
    for name, category in CATEGORIES.items():
        if seconds[name] > 0:
            share = f"{100 * seconds[name] / elapsed:.1f} %"
            row = (category.title, f"{seconds[name]:.2f}", share, str(counts[name]))
            lines.append((*row, category.google))
    lines.append(("elapsed", f"{elapsed:.2f}", "100.0 %", str(len(job.runs)), ""))
    if seconds[NOT_RUNNING] > 0:
        row = ("not running", f"{seconds[NOT_RUNNING]:.2f}", "", str(counts[NOT_RUNNING]))
        lines.append((*row, "not counted"))
    return lines


def _run_lines(job: Account) -> list[tuple[str, ...]]:
    lines = [("run", "began", "ranks", "seconds", "start", "steps", "lost", "stalls", "end")]
    return [*lines, *(_run_line(one) for one in job.runs)]


def _run_line(one: RunAccount) -> tuple[str, ...]:
    from tierckpt.goodput.categories import RESTART

    seconds = one.seconds
    start = sum(seconds[name] for name in (*RESTART, "first_step"))
    return (
        str(one.number),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.begin)),
        str(one.world),
        f"{one.end - one.begin:.1f}",
        f"{start:.2f}",
        f"{one.from_version} to {one.to_version}",
        str(one.lost_steps),
        f"{seconds['checkpoint']:.2f}",
        _end_text(one),
    )


def _end_text(one: RunAccount) -> str:
    from tierckpt.goodput.spans import Ending

    if one.ending is Ending.CLOSED:
        return f"closed: {one.reason}"
    if one.ending is Ending.FAILED:
        exact = one.uncertain_seconds
        return f"failed (± {exact:.1f} s)" if exact else "failed"
    return "no end yet"


def _conclusions(job: Account, program: float | None) -> list[str]:
    """Sentences below the tables."""
    kept = job.made_steps - job.lost_steps
    unknown = "program unknown (give --step-flop and --peak-flops)"
    known = f"program {100 * program:.1f} %" if program is not None else unknown
    unseen = ""
    if job.unseen_steps:
        unseen = f"; up to {job.unseen_steps} more may have been lost after the last records"
    lines = [
        f"Goodput {100 * job.goodput:.1f} %: scheduling {100 * job.scheduling_goodput:.1f} % x "
        f"runtime {100 * job.runtime_goodput:.1f} %; {known}.",
        f"{kept} of {job.made_steps} steps counted, and {job.lost_steps} were lost "
        f"({counted(job.failures, 'failure')}){unseen}.",
    ]
    if job.uncertain_seconds:
        lines.append(
            f"The times of the failures are known to {job.uncertain_seconds:.1f} s in all: so much "
            "of the restarts may be lost work."
        )
    slow = max(job.runs, key=lambda one: one.slowest_seconds)
    if slow.slowest_seconds > slow.fastest_seconds:
        lines.append(
            f"Slowest checkpoints: rank {slow.slowest_rank} in run {slow.number}, "
            f"{slow.slowest_seconds:.2f} s of stalls (the fastest rank: "
            f"{slow.fastest_seconds:.2f} s)."
        )
    late = max(job.runs, key=lambda one: one.wait_seconds)
    if late.wait_seconds >= WORTH_SECONDS:
        lines.append(
            f"Slowest start: rank {late.last_to_attach} in run {late.number}; rank "
            f"{late.reference} waited {late.wait_seconds:.2f} s for it."
        )
    return lines
