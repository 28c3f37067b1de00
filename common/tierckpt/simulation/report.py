"""The result of a simulation as a document for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from statistics import fmean
from typing import Any

from .course import Estimate, Study

DAY_SECONDS = 86400.0


def document(study: Study) -> dict[str, Any]:
    """All results. Infinite and unknown values are null; an estimate has `mean` and `error`.

    - `simulated`: true; `scenario`: all values, in seconds and bytes; `notes`: sentences
    - `goodput`, `wall_seconds`, `useful_seconds`, `failures`, `beyond_redundancy`: estimates
    - `work_done`: the work was done in all replicas
    - `failures_by_kind`, `mean_seconds_between_failures`, `store_outages`: means
    - `phases`: an estimate of the share of each use of time
    - `sources`: for each level that restarts read, `restarts`, `load_seconds`, `lost_seconds`
    - `levels`: for each level `every_steps`, `every_seconds`, `best_seconds`, `stall_seconds`,
      `failures_per_second` that need it, `latency_seconds`, `restore_seconds`, `versions`,
      `written_bytes_per_day`, `network_bytes_per_day`, `restart_bytes`, `files_per_version`,
      `files_per_day`
    - `expected_beyond_redundancy`: by the formula
    """
    outcomes = study.outcomes
    walls = [outcome.wall_seconds for outcome in outcomes]
    failures = [float(sum(outcome.failures.values())) for outcome in outcomes]
    every = [wall / max(1.0, count) for wall, count in zip(walls, failures, strict=True)]
    found: dict[str, Any] = _plain(
        {
            "simulated": True,
            "scenario": asdict(study.scenario),
            "goodput": _estimate(study.goodput),
            "wall_seconds": _estimate(study.estimate(walls)),
            "useful_seconds": _estimate(study.estimate(map(study.useful_seconds, outcomes))),
            "work_done": all(outcome.done for outcome in outcomes),
            "failures": _estimate(study.estimate(failures)),
            "mean_seconds_between_failures": fmean(every) if any(failures) else None,
            "failures_by_kind": _means(study, "failures"),
            "phases": {name: _estimate(share) for name, share in study.phase_shares.items()},
            "sources": sources(study),
            "levels": levels(study),
            "beyond_redundancy": _estimate(
                study.estimate(float(o.beyond_redundancy) for o in outcomes)
            ),
            "expected_beyond_redundancy": study.expected_losses,
            "store_outages": fmean(o.outages for o in outcomes),
            "notes": list(study.notes),
        }
    )
    return found


def sources(study: Study) -> dict[str, dict[str, float]]:
    """Restarts by the level that they read: how many, how long, and how much work was lost."""
    found = {}
    names = dict.fromkeys(name for outcome in study.outcomes for name in outcome.sources)
    for name in names:
        count = sum(o.sources[name] for o in study.outcomes)
        lost = math.fsum(o.lost_by_source.get(name, 0.0) for o in study.outcomes)
        load = math.fsum(o.seconds.get(f"load {name}", 0.0) for o in study.outcomes)
        found[name] = {
            "restarts": count / len(study.outcomes),
            "load_seconds": load / count,
            "lost_seconds": lost / count,
        }
    return found


def levels(study: Study) -> dict[str, dict[str, Any]]:
    """Intervals, costs, traffic and files by level. Traffic is that of all nodes together."""
    found = {}
    days = fmean(o.wall_seconds for o in study.outcomes) / DAY_SECONDS
    for rung in study.plan.schedule.rungs:
        cost = study.costs[rung.name]
        versions = fmean(study.versions(o)[rung.name] for o in study.outcomes)
        found[rung.name] = {
            "every_steps": rung.every_steps,
            "every_seconds": rung.every_steps * study.plan.schedule.pace_seconds,
            "best_seconds": study.plan.best_seconds.get(rung.name),
            "failures_per_second": study.plan.rates[rung.name],
            "stall_seconds": rung.stall_seconds,
            "latency_seconds": rung.latency_seconds,
            "restore_seconds": cost.restore_seconds,
            "versions": versions,
            "written_bytes_per_day": versions * cost.written_bytes / days,
            "network_bytes_per_day": versions * cost.network_bytes / days,
            "restart_bytes": cost.read_bytes,
            "files_per_version": cost.files,
            "files_per_day": versions * cost.files / days,
        }
    return found


def _means(study: Study, name: str) -> dict[str, float]:
    counters = [getattr(outcome, name) for outcome in study.outcomes]
    names = dict.fromkeys(key for counter in counters for key in counter)
    return {key: fmean(counter[key] for counter in counters) for key in names}


def _estimate(found: Estimate) -> dict[str, float]:
    return {"mean": found.mean, "error": found.error}


def _plain(value: Any) -> Any:
    """The value without numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
