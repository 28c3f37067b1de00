"""Costs: durations, bytes and files of a version, by level, from bandwidths. Pure.

A version has S bytes on N nodes. Its shards are of equal size, S / N on each node. After a restart
each node receives the state that it needs once, whatever the source: all S bytes in a data-parallel
job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tierckpt.erasure.groups import Scheme

from .scenario import Level, Scenario


@dataclass(frozen=True)
class LevelCosts:
    """One level, per version; seconds and bytes."""

    name: str
    stall_seconds: float
    """Time that a version adds to the training."""
    latency_seconds: float
    """From the end of the stall until the version is complete here."""
    flush_seconds: float
    """The part of the latency that the store's state changes."""
    restore_seconds: float
    written_bytes: float
    network_bytes: float
    read_bytes: float
    """Bytes that a restart reads from here."""
    files: int


def costs_of(scenario: Scenario) -> dict[str, LevelCosts]:
    """The costs of every level in use. Levels below local are written from there."""
    found: dict[str, LevelCosts] = {}
    for level in scenario.levels:
        source = found.get("local") if level.name in ("peer", "persistent") else None
        found[level.name] = _one(scenario, level, 0.0 if source is None else source.latency_seconds)
    return found


def _one(scenario: Scenario, level: Level, before_seconds: float) -> LevelCosts:
    own = write_seconds(scenario, level) if level.write_seconds is None else level.write_seconds
    read = restore_seconds(scenario, level)
    state, job = scenario.job.state_bytes, scenario.job
    stall = level.cost_seconds + (own if level.blocking else 0.0)
    latency = 0.0 if level.blocking else own
    if level.write_seconds is None and not level.blocking:
        latency += before_seconds
    written, network = state, 0.0
    if level.name == "peer":
        written, network = _parity_bytes(level, state)
    copies = {"shards": 1, "nodes": job.nodes, "ranks": job.ranks}[level.readers]
    return LevelCosts(
        level.name,
        stall,
        latency,
        own if level.name == "persistent" and not level.blocking else 0.0,
        read if level.restore_seconds is None else level.restore_seconds,
        written,
        network,
        state * copies,
        _files(scenario, level),
    )


def write_seconds(scenario: Scenario, level: Level) -> float:
    """From the version on the level before until it is complete here."""
    job, bandwidth = scenario.job, scenario.bandwidth
    shard = job.state_bytes / job.nodes
    if level.name == "memory":
        return job.step_seconds  # it is copied during the next step
    if level.name == "local":
        return shard / bandwidth.disk_bytes
    if level.name == "peer":
        scheme = Scheme.parse(level.scheme)
        _, network = _parity_bytes(level, shard)
        coding = 0.0 if scheme.name == "partner" else shard / bandwidth.coding_bytes
        return max(network / bandwidth.network_bytes, coding)
    writers = min(level.writers or job.nodes, job.nodes)
    sent = job.state_bytes / writers / bandwidth.network_bytes
    opens = _files(scenario, level) / bandwidth.store_opens
    return max(job.state_bytes / bandwidth.store_bytes, sent) + opens


def restore_seconds(scenario: Scenario, level: Level) -> float:
    """Reading a version, and bringing it to all nodes."""
    job, bandwidth = scenario.job, scenario.bandwidth
    shard, everyone = job.state_bytes / job.nodes, job.needed_bytes / bandwidth.network_bytes
    if level.name == "memory":
        return everyone
    if level.name == "local":
        return shard / bandwidth.disk_bytes + everyone
    if level.name == "peer":
        scheme = Scheme.parse(level.scheme)
        sources = {"partner": 1, "xor": level.group_size - 1, "rs": scheme.k}.get(scheme.name, 1)
        read = shard / bandwidth.disk_bytes
        # Survivors collect rows side by side: the lost node receives only its own bytes.
        network = (2 if sources > 1 else 1) * shard / bandwidth.network_bytes
        coding = 0.0 if sources == 1 else shard / bandwidth.coding_bytes
        return read + max(network, coding) + everyone
    copies = {"shards": 1, "nodes": job.nodes, "ranks": job.ranks}[level.readers]
    readers = job.nodes if level.readers == "shards" else 1
    at_store = copies * job.state_bytes / bandwidth.store_bytes
    at_node = copies / job.nodes * job.state_bytes / bandwidth.network_bytes
    opens = max(copies, readers) / bandwidth.store_opens
    return max(at_store, at_node) + opens + (everyone if level.readers == "shards" else 0.0)


def protect_seconds(scenario: Scenario, level: Level) -> float:
    """After a restart, until the lost redundancy is there again: the same exchange once more, and
    the write of a node's shard and parity."""
    if level.protect_seconds is not None:
        return level.protect_seconds
    shard = scenario.job.state_bytes / scenario.job.nodes
    written, _ = _parity_bytes(level, shard)
    return write_seconds(scenario, level) + (shard + written) / scenario.bandwidth.disk_bytes


def exposed_seconds(scenario: Scenario, costs: Mapping[str, LevelCosts]) -> float:
    """Time from the loss of a node until its shards are protected again, if no other failure comes
    in between; 0 without a peer level."""
    restart, level = scenario.restart, scenario.level("peer")
    if level is None:
        return 0.0
    parts = restart.notice_seconds + restart.node_seconds + restart.start_seconds
    return parts + costs["peer"].restore_seconds + protect_seconds(scenario, level)


def _parity_bytes(level: Level, shard_bytes: float) -> tuple[float, float]:
    """Parity that is stored, and bytes that are sent, for a shard of this size.

    A row's collector receives k - 1 of its data segments, and sends m parities on, of which it
    keeps one: k + m - 1 messages a row, as in docs/internals/erasure.md.
    """
    scheme = Scheme.parse(level.scheme)
    if scheme.name == "none":
        return 0.0, 0.0
    k = scheme.k or level.group_size - 1
    return shard_bytes * scheme.m / k, shard_bytes * (k + scheme.m - 1) / k


def _files(scenario: Scenario, level: Level) -> int:
    """Files of one version."""
    ranks = scenario.job.ranks
    if level.name == "memory":
        return 0
    if level.name in ("local", "peer"):
        return 2 * ranks  # a shard, or parity, and its manifest
    if level.writers == 1:
        return 1
    return 2 * math.ceil(ranks / level.shards_per_file) + 1  # data and record; the manifest
