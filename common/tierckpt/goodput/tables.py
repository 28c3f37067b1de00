"""The account for people and programs: tables, sentences, advice, and a document for JSON. Pure.

The advice names the largest badput that something can be done about.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tierckpt._text import counted

from .account import CATEGORIES, NOT_RUNNING, RESTART, Account, Ending, RunAccount

__all__ = ["category_lines", "conclusions", "run_lines"]


def document(job: Account, program_goodput: float | None) -> dict[str, Any]:
    """The whole account. Times are Unix seconds, shares are from 0 to 1.

    - `elapsed_seconds`: the sum of all categories; `not_running_seconds`: time that is not counted
    - `goodput`, `scheduling_goodput`, `runtime_goodput`, `program_goodput`: shares; the last one is
      null without its options
    - `categories`: for each name `title`, `google` (the term there), `seconds`, `share` of the
      elapsed time, and `count`, the number of runs that have it
    - `made_steps`, `lost_steps` (made again), `unseen_steps` (the most that may be missing in both)
    - `failures`: runs that ended without `closed`, and that another run followed
    - `uncertain_seconds`: sum of the times within which the failures are known
    - `notes`: sentences
    - `runs`: a list, with these fields and some of those above:

      - `number`, `begin`, `end`: from 1; the start of its processes, and its last sign of life or
        its failure
      - `world`, `clock_rank`: number of ranks; the rank whose clock counts
      - `from_version`, `to_version`: restored and last version
      - `ending`, `reason`: `closed`, `failed` or `open` (the last run, without an end so far); the
        reason of a clean end
      - `slowest_rank`, `slowest_stall_seconds`, `fastest_stall_seconds`: the longest and the
        shortest stalls of a rank
      - `last_to_attach`, `wait_seconds`: the rank for which all waited at the start; how long
        `clock_rank` waited
      - `seconds`: by category, those of the restart before the run included
    """
    seconds, counts, elapsed = job.seconds, job.counts, job.elapsed_seconds
    return {
        "elapsed_seconds": elapsed,
        "not_running_seconds": seconds[NOT_RUNNING],
        "goodput": job.goodput,
        "scheduling_goodput": job.scheduling_goodput,
        "runtime_goodput": job.runtime_goodput,
        "program_goodput": program_goodput,
        "categories": {
            name: {
                "title": category.title,
                "google": category.google,
                "seconds": seconds[name],
                "share": seconds[name] / elapsed if elapsed else 0.0,
                "count": counts[name],
            }
            for name, category in CATEGORIES.items()
        },
        "made_steps": job.made_steps,
        "lost_steps": job.lost_steps,
        "unseen_steps": job.unseen_steps,
        "failures": job.failures,
        "uncertain_seconds": job.uncertain_seconds,
        "runs": [_run(run) for run in job.runs],
        "notes": job.notes,
    }


def _run(run: RunAccount) -> dict[str, Any]:
    return {
        "number": run.number,
        "begin": run.begin,
        "end": run.end,
        "world": run.world,
        "clock_rank": run.reference,
        "from_version": run.from_version,
        "to_version": run.to_version,
        "made_steps": run.made_steps,
        "lost_steps": run.lost_steps,
        "ending": run.ending.value,
        "reason": run.reason,
        "uncertain_seconds": run.uncertain_seconds,
        "unseen_steps": run.unseen_steps,
        "slowest_rank": run.slowest_rank,
        "slowest_stall_seconds": run.slowest_seconds,
        "fastest_stall_seconds": run.fastest_seconds,
        "last_to_attach": run.last_to_attach,
        "wait_seconds": run.wait_seconds,
        "seconds": {name: value for name, value in run.seconds.items() if value},
    }


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


WORTH_SHARE = 0.01
"""A smaller share of the elapsed time gets no advice."""
STALL_SHARE = 0.03
"""The default of the setting `overhead_budget`."""


def advice(job: Account, places: str) -> Iterator[str]:
    """Sentences on what would help, largest share first. `places`: the events, as arguments of a
    command."""
    if not (elapsed := job.elapsed_seconds):
        return
    seconds = job.seconds
    again = [run for run in job.runs if run.after_failure and run.in_new_process]
    restarts = [run for run in again if not run.by_shim]
    restart = sum(run.seconds[name] for run in restarts for name in RESTART)
    found = []
    if (share := seconds["lost"] / elapsed) > WORTH_SHARE:
        text = f"Lost work is {100 * share:.1f} %: `tierckpt interval --events {places}` computes "
        found.append((share, f"{text}the best interval of each level from the same events."))
    if (share := restart / elapsed) > WORTH_SHARE:
        mean = restart / len(restarts)
        text = f"Restarts are {100 * share:.1f} %, {mean:.1f} s each: `tierckpt run` keeps torch "
        found.append((share, f"{text}imported and starts the script again in milliseconds."))
    if (share := seconds["checkpoint"] / elapsed) > STALL_SHARE:
        text = f"Checkpoint stalls are {100 * share:.1f} %: longer intervals, or `auto`, which "
        found.append((share, f"{text}holds them within the setting overhead_budget."))
    if (share := seconds["noticed"] / elapsed) > WORTH_SHARE:
        text = f"Failures went unnoticed for {100 * share:.1f} %: a shorter timeout of the process "
        found.append((share, f"{text}group (init_process_group(timeout=...)) ends a hang sooner."))
    yield from (text for _, text in sorted(found, reverse=True))
