"""The simulated studies of scale.py: goodput by ranks, losses by scheme, restarts at one store.

Three ways to take checkpoints, at 2 to 16,384 ranks. Costs are those that stall.py measured on one
H100 for GPT-2 (`MEASURED`), scaled to the state of this job. Failures are Llama 3's, by rank and by
node.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lib.scale.checks import (
    DAY_SECONDS,
    LLAMA3_DAYS,
    LLAMA3_INTERRUPTIONS,
    LLAMA3_NODE_PARTS,
    LLAMA3_RANKS,
)
from lib.terminal import say
from tierckpt.simulation.course import Study, simulate
from tierckpt.simulation.model import (
    Redundancy,
    costs_of,
    exposed_seconds,
    kind_rates,
    losses_per_second,
)
from tierckpt.simulation.scenario import (
    Bandwidth,
    Failures,
    Job,
    Level,
    Nodes,
    Restart,
    Scenario,
)

MEASURED = Path(__file__).resolve().parents[2] / "results" / "2026-11-26-gpt2-h100.json"
RANKS = (2, 8, 64, 512, 4096, 16_384)
RANKS_PER_NODE = 8
STATE_BYTES = 14e9
"""Parameters and Adam's state of a model of about a billion parameters."""
STEP_SECONDS = 1.0
OURS_LEAST_SECONDS, OURS_COPY_SECONDS = 0.0022, 0.0109
"""Slowdown of a step with a version in memory: the least that was seen, and the one of a rank that
copies all of the 1.5 GB. A rank copies its share of the state alone."""
OVERHEAD_SHARE = 0.01
"""Versions in memory take no more of the time."""
BANDWIDTH = Bandwidth(
    disk_bytes=4e9, network_bytes=50e9, store_bytes=100e9, coding_bytes=6e9, store_opens=10_000
)
"""One fast disk and 400 Gbit/s a node, and a file system of 100 GB/s for all. Assumed, but coding:
benchmarks/coding.py."""
RESTART = Restart(notice_seconds=10.0, start_seconds=60.0, node_seconds=120.0)
WARM_SECONDS = 5.0
"""A restart of processes under `tierckpt run`, with a rendezvous of many ranks. Assumed; measured
on two ranks: 0.2 to 0.9 s."""


@dataclass(frozen=True)
class Measured:
    """Seconds for each byte of state."""

    torch_save: float
    dcp_stall: float
    dcp_durable: float
    state_bytes: float


def measured() -> Measured:
    """The costs of the results file."""
    document = json.loads(MEASURED.read_text())
    state = float(document["state_bytes"])
    rows = {row["name"]: row for row in document["methods"]}

    def per_byte(method: str, figure: str) -> float:
        return float(rows[method][figure]["median"]) / state

    return Measured(
        per_byte("torch-save", "slowdown"),
        per_byte("dcp-thread", "slowdown"),
        per_byte("dcp-thread", "durable"),
        state,
    )


def failures(rate_factor: float = 1.0) -> Failures:
    """Llama 3's: per rank for processes, per node for its parts."""
    ranks, nodes = LLAMA3_RANKS, LLAMA3_RANKS // RANKS_PER_NODE
    time = LLAMA3_DAYS * DAY_SECONDS / rate_factor
    return Failures(
        process_every_seconds=time * ranks / (LLAMA3_INTERRUPTIONS - LLAMA3_NODE_PARTS),
        node_every_seconds=time * nodes / LLAMA3_NODE_PARTS,
    )


def base(ranks: int, rate_factor: float, days: float, replicas: int) -> Scenario:
    """All but the levels."""
    return Scenario(
        job=Job(
            ranks=ranks,
            ranks_per_node=min(RANKS_PER_NODE, max(1, ranks // 2)),  # two nodes at least
            step_seconds=STEP_SECONDS,
            state_bytes=STATE_BYTES,
            length_seconds=days * DAY_SECONDS,
        ),
        failures=failures(rate_factor),
        nodes=Nodes(),
        bandwidth=BANDWIDTH,
        restart=RESTART,
        replicas=replicas,
    )


def torch_save(scenario: Scenario) -> Scenario:
    """Rank 0 writes while all wait, at Daly's interval; after a failure every node reads."""
    seconds = measured().torch_save * STATE_BYTES
    level = Level(
        "persistent", policy="daly", write_seconds=seconds, blocking=True, readers="nodes"
    )
    return replace(scenario, levels=(level,))


def dcp_async(scenario: Scenario) -> Scenario:
    """DCP's `async_save` in a thread, at Daly's interval."""
    costs = measured()
    level = Level(
        "persistent",
        policy="daly",
        cost_seconds=costs.dcp_stall * STATE_BYTES,
        write_seconds=costs.dcp_durable * STATE_BYTES,
        readers="nodes",
    )
    return replace(scenario, levels=(level,))


def ideal_store(scenario: Scenario) -> Scenario:
    """A store alone, at no cost: nothing stalls, all nodes write at the store's full speed, once a
    minute, and the state is read once. No method with one level is better."""
    return replace(scenario, levels=(Level("persistent", every_seconds=60.0),))


def ours(scenario: Scenario, scheme: str = "partner") -> Scenario:
    """Memory at every step, or as often as `OVERHEAD_SHARE` allows where a rank copies much; local
    once a minute, other nodes, the store once in ten minutes."""
    job = scenario.job
    share = STATE_BYTES / job.ranks
    copy = OURS_COPY_SECONDS * share / measured().state_bytes
    stall = max(OURS_LEAST_SECONDS, copy)
    every = math.ceil(stall / (OVERHEAD_SHARE * STEP_SECONDS))
    group_size = max(2, min(8, job.nodes))
    levels = (
        Level("memory", every_steps=every, cost_seconds=stall),
        Level("local", every_seconds=60.0, cost_seconds=0.05),
        Level("peer", scheme=scheme, group_size=group_size),
        Level("persistent", every_seconds=600.0, cost_seconds=0.05),
    )
    restart = replace(scenario.restart, warm_start_seconds=WARM_SECONDS)
    return replace(scenario, levels=levels, restart=restart)


WAYS = {
    "torch.save, rank 0": torch_save,
    "DCP async_save": dcp_async,
    "ideal, store alone": ideal_store,
    "ours, four levels": ours,
}


SCHEMES = ("partner", "xor", "rs 4+2")
DECADE_SECONDS = 3650 * DAY_SECONDS


def goodput(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Goodput of each way at each number of ranks, at Llama 3's rates and at ten times these."""
    for factor in (1.0, 10.0):
        for ranks in options.ranks:
            for name, way in WAYS.items():
                scenario = way(base(ranks, factor, options.days, options.replicas))
                study = simulate(scenario)
                row = _row(study, name, factor)
                say(f"{ranks} ranks, failures x {factor:g}: {name}, {100 * row['goodput']:.2f} %")
                yield row


def _row(study: Study, name: str, factor: float) -> dict[str, Any]:
    shares = study.phase_shares
    away = [
        share.mean
        for phase, share in shares.items()
        if phase not in ("training", "checkpoints", "lost")
    ]
    failures = study.estimate(float(sum(o.failures.values())) for o in study.outcomes)
    walls = study.estimate(o.wall_seconds for o in study.outcomes)
    return {
        "way": name,
        "ranks": study.scenario.job.ranks,
        "rate_factor": factor,
        "goodput": study.goodput.mean,
        "goodput_error": study.goodput.error,
        "lost": shares["lost"].mean,
        "stalls": shares["checkpoints"].mean,
        "restarts": math.fsum(away),
        "failures_per_day": failures.mean / walls.mean * DAY_SECONDS,
    }


def redundancy(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Losses beyond each scheme in ten years at Llama 3's rates, by the formula."""
    ranks = options.ranks[-1]
    for scheme in SCHEMES:
        scenario = ours(base(ranks, 1.0, options.days, options.replicas), scheme)
        expected = expected_losses(scenario, DECADE_SECONDS)
        say(f"{scheme}: {expected:.2g} in ten years")
        yield {
            "scheme": scheme,
            "ranks": ranks,
            "losses_in_ten_years": expected,
            "probability_of_one": -math.expm1(-expected),
        }


def expected_losses(scenario: Scenario, seconds: float) -> float:
    """By the formula, for the loss of single nodes."""
    peer = scenario.level("peer")
    assert peer is not None
    groups = Redundancy(scenario.job, peer)
    rate = kind_rates(scenario.job, scenario.failures)["node"] / scenario.job.nodes
    window = exposed_seconds(scenario, costs_of(scenario))
    return seconds * losses_per_second(groups, rate, window)


def storm(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds until all ranks have the state again, all of them restarting at once."""
    for ranks in options.ranks:
        scenario = ours(base(ranks, 1.0, 1.0, 1))
        found = costs_of(scenario)
        persistent = scenario.levels[-1]
        row: dict[str, Any] = {"ranks": ranks}
        for readers in ("ranks", "nodes", "shards"):
            other = replace(scenario, levels=(replace(persistent, readers=readers),))
            row[f"each_{readers}"] = costs_of(other)["persistent"].restore_seconds
        row["peer"] = found["peer"].restore_seconds
        yield row
