"""SCR-Exa's figure, simulated to 1,024 ranks from the measured cost of a version.

The data set is fixed, so on more ranks an epoch has fewer steps, and root checkpointing still
writes all bytes while all wait. A rank has a core of its own, and a step takes the CPU time that it
takes here.
"""

from __future__ import annotations

import argparse
import math
from statistics import median

from msgspec.structs import replace

from lib.methods.alternatives import BYTES_PER_SECOND
from lib.methods.ours import FLUSHED_OF
from lib.papers import results
from lib.papers.models import MODELS
from lib.papers.results import Row
from lib.papers.rule import cost_of
from lib.scale.steps import steps as ballots
from tierckpt.simulation.course import simulate
from tierckpt.simulation.model import costs_of
from tierckpt.simulation.scenario import Bandwidth, Job, Level, Scenario

WORLDS = (1, 8, 64, 512, 1024)
SAMPLES = {"edsr": 16_000, "resnet50": 1_281_167}
"""Of an epoch: EDSR's 1,000 batches of 16 patches, and ImageNet's images."""
OWN_CORES = 2
"""Costs are those of so many ranks at most, which have a core each here."""
BANDWIDTH = Bandwidth(disk_bytes=1e9, network_bytes=1e9, store_bytes=BYTES_PER_SECOND)
"""Disk and network of a node are assumed."""
RANKS_PER_NODE = 8
EPOCHS = 200


class NoCostsError(RuntimeError):
    """The results file lacks a cost to simulate on, or it is noise."""


def simulated(options: argparse.Namespace, key: Row) -> Row:
    """Overhead and restore of one method at so many ranks."""
    rows = [
        row
        for row in results.read(results.path_of("scr-exa"))["rows"]
        if row["status"] == "ok" and all(row[name] == key[name] for name in ("model", "launcher"))
    ]
    own = [r for r in rows if (r["part"], r["method"]) == ("epochs", key["method"])]
    own = [row for row in own if row["world"] <= OWN_CORES]
    if not own:
        who = f"{key['model']}, {key['launcher']}, {key['method']}"
        raise NoCostsError(f"{who}: measure the part epochs with 1 or 2 ranks first")
    costs = [(cost_of(row), _step(row)) for row in own]
    costs = [pair for pair in costs if not pair[0].others] or costs
    seconds, cost = max(((c.of_one * step, c) for c, step in costs), key=lambda pair: pair[0])
    if seconds <= 0:
        raise NoCostsError(f"a version costs {1e3 * seconds:.1f} ms, which is noise: measure again")
    scenario = _scenario(key, own[0]["state_bytes"], min(step for _, step in costs), seconds)
    study = simulate(scenario)
    shares = study.phase_shares
    level = scenario.levels[0].name
    ranks = argparse.Namespace(ranks=[key["world"]])
    return {
        "epoch_samples": SAMPLES[key["model"]],
        "steps": scenario.levels[0].every_steps,
        "step_seconds": scenario.job.step_seconds,
        "version_seconds": study.costs[level].stall_seconds,
        "is_cpu_alone": bool(cost.others),
        "cost_visits": cost.visits,
        "overhead": shares["checkpoints"].mean / shares["training"].mean,
        "rank_bytes": scenario.job.state_bytes / _writers(key),
        "node_packets_a_step": next(ballots(ranks))["tree_packets"],
        "restore_seconds": _restore(rows, key, scenario, level),
    }


def _writers(key: Row) -> int:
    """Ranks that write a version."""
    return 1 if key["method"] == "root-shared" else int(key["world"])


def _step(row: Row) -> float:
    """CPU seconds of a step on one rank; of a rank on its own core the step itself."""
    own = [visit["step_cpu_seconds"] for visit in row.get("visits", [])]
    return median(own) if own else float(row["step_seconds"])


def _scenario(key: Row, state_bytes: int, step: float, seconds: float) -> Scenario:
    """The job with its levels; `seconds` is what a version costs here."""
    ranks = key["world"]
    every = math.ceil(SAMPLES[key["model"]] / MODELS[key["model"]].batch / ranks)
    if key["method"] == "root-shared":
        wait = max(seconds, state_bytes / BYTES_PER_SECOND)
        levels = (Level("persistent", every_steps=every, write_seconds=wait, blocking=True),)
    else:
        flushed = Level("persistent", every_steps=every * FLUSHED_OF)
        levels = (Level("local", every_steps=every, cost_seconds=seconds), flushed)
    job = Job(
        ranks=ranks,
        ranks_per_node=min(RANKS_PER_NODE, ranks),
        step_seconds=step,
        state_bytes=state_bytes,
        length_seconds=math.inf,
        work_seconds=EPOCHS * every * step,
    )
    return Scenario(job=job, bandwidth=BANDWIDTH, levels=levels, replicas=1)


def _restore(rows: list[Row], key: Row, scenario: Scenario, level: str) -> float | None:
    """The measured load of a cold restart of two ranks, and what more ranks add by the simulator's
    costs; None if it was not measured."""
    method = {"ours-flushed": "ours-local"}.get(key["method"], key["method"])
    found = [r for r in rows if (r["part"], r["method"]) == ("restarts", method)]
    if not found:
        return None
    two = replace(scenario, job=replace(scenario.job, ranks=2, ranks_per_node=1))
    more = [costs_of(each)[level].restore_seconds for each in (scenario, two)]
    return float(found[0]["load_seconds"]) + more[0] - more[1]


__all__ = ["SAMPLES", "WORLDS", "simulated"]
