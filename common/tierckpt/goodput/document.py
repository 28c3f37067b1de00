"""The account as a document for JSON."""

from __future__ import annotations

from typing import Any

from .account import Account, RunAccount
from .categories import CATEGORIES, NOT_RUNNING


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
