"""Advice: the largest badput that something can be done about. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from .account import Account
from .categories import RESTART

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
