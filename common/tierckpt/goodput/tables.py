"""The account as tables and sentences for people. Pure."""

from __future__ import annotations

import time

from tierckpt._text import counted

from .account import Account, RunAccount
from .categories import CATEGORIES, NOT_RUNNING, RESTART
from .spans import Ending

WORTH_SECONDS = 0.1
"""A rank that others waited for a shorter time for is not named."""


def category_lines(job: Account) -> list[tuple[str, ...]]:
    """The time by category, titles first."""
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


def run_lines(job: Account) -> list[tuple[str, ...]]:
    """The runs, titles first."""
    lines = [("run", "began", "ranks", "seconds", "start", "steps", "lost", "stalls", "end")]
    return [*lines, *(_run_line(one) for one in job.runs)]


def _run_line(one: RunAccount) -> tuple[str, ...]:
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
    if one.ending is Ending.CLOSED:
        return f"closed: {one.reason}"
    if one.ending is Ending.FAILED:
        exact = one.uncertain_seconds
        return f"failed (± {exact:.1f} s)" if exact else "failed"
    return "no end yet"


def conclusions(job: Account, program: str = "") -> list[str]:
    """Sentences below the tables. `program`: what is known of the program goodput."""
    kept = job.made_steps - job.lost_steps
    unseen, were = "", "was" if job.lost_steps == 1 else "were"
    if job.unseen_steps:
        unseen = f"; up to {job.unseen_steps} more may have been lost after the last records"
    lines = [
        f"Goodput {100 * job.goodput:.1f} %: scheduling {100 * job.scheduling_goodput:.1f} % x "
        f"runtime {100 * job.runtime_goodput:.1f} %{program}.",
        f"{kept} of {job.made_steps} steps counted, and {job.lost_steps} {were} lost "
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


__all__ = ["category_lines", "conclusions", "run_lines"]
