"""The cost of a step's ballot at 2 to 16,384 ranks: calculated from parts that ballots.py measured.

Nodes have eight ranks. Messages that follow each other make the time; those between nodes make the
traffic. A ballot is read at the next boundary, so a step that lasts longer does not wait for it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.scale.studies import RANKS_PER_NODE
from tierckpt.coordination.leader_tree import FAN_OUT

BALLOTS = Path(__file__).resolve().parents[2] / "results" / "2026-11-26-ballots-2-cores.json"
NETWORK_SECONDS = 20e-6
"""Time that a message takes longer between two machines than on one. Assumed."""
CYCLE_SECONDS = 1e-3
"""Horovod looks for new reductions this often (its default)."""

STEP_WAYS = {"tree": "page and tree", "ring": "gloo's ring", "mpi": "Horovod over MPI"}


class Parts:
    """What ballots.py measured."""

    def __init__(self, path: Path = BALLOTS) -> None:
        document = json.loads(path.read_text())
        parts, most = document["parts"], document["rows"][-1]
        self.message_seconds: float = parts["message_seconds"]
        self.tree_hop_seconds: float = parts["tree_hop_seconds"]
        self.gloo_hop_seconds: float = parts["gloo_hop_seconds"]
        self.page_seconds: float = parts["page_seconds"]
        self.vote_bytes: int = parts["vote_bytes"]
        frames = 2 * (most["nodes"] - 1)
        self.frame_packets: float = most["tree_packets"] / frames
        self.frame_bytes: float = most["tree_bytes"] / frames
        self.ring_packets: float = most["gloo_packets"] / most["ranks"]
        self.ring_bytes: float = most["gloo_bytes"] / most["ranks"]


def levels_of(nodes: int) -> int:
    """Return the levels of a tree of so many nodes below its root."""
    levels, most = 0, 1
    while most < nodes:
        levels, most = levels + 1, most * FAN_OUT + 1
    return levels


def tree_seconds(nodes: int, parts: Parts) -> float:
    """Return the time of a ballot by the pages of the nodes and the tree of their leaders: a hop
    for each level, up and down, and the other children of a node one after the other."""
    others = min(FAN_OUT, nodes - 1) - 1 if nodes > 1 else 0
    level = parts.tree_hop_seconds + NETWORK_SECONDS + others * parts.message_seconds
    return parts.page_seconds + 2 * levels_of(nodes) * level


def ring_seconds(ranks: int, nodes: int, parts: Parts) -> float:
    """Return the time of gloo's reduction: 2 (N - 1) messages one after the other, of which those
    from node to node pass the network. The first two were measured with the launch."""
    hops = 2 * (ranks - 1)
    between = hops / RANKS_PER_NODE if nodes > 1 else 0
    launch = 2 * (parts.gloo_hop_seconds - parts.message_seconds)
    return launch + hops * parts.message_seconds + between * NETWORK_SECONDS


def mpi_seconds(ranks: int, nodes: int, parts: Parts) -> float:
    """Return the time of Horovod's reduction over MPI, by recursive doubling, after one cycle.
    (Over Gloo it is a ring.)"""
    rounds, between = math.ceil(math.log2(ranks)), math.ceil(math.log2(nodes))
    return CYCLE_SECONDS + rounds * parts.message_seconds + between * NETWORK_SECONDS


def steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the cost of a ballot for each number of ranks: seconds, and packets and bytes that the
    busiest node sends and receives."""
    parts = Parts()
    for ranks in options.ranks:
        nodes = math.ceil(ranks / RANKS_PER_NODE)
        links = min(FAN_OUT, nodes - 1)  # of the root; a leader below has one more
        links += nodes > 1 + FAN_OUT
        doubling = 2 * RANKS_PER_NODE * math.ceil(math.log2(nodes))
        yield {
            "ranks": ranks,
            "nodes": nodes,
            "training_thread_seconds": parts.page_seconds,
            "tree_seconds": tree_seconds(nodes, parts),
            "ring_seconds": ring_seconds(ranks, nodes, parts),
            "mpi_seconds": mpi_seconds(ranks, nodes, parts),
            "tree_packets": 2 * links * parts.frame_packets,
            "tree_bytes": 2 * links * parts.frame_bytes,
            # A node sends to the next one and receives from the one before.
            "ring_packets": 2 * parts.ring_packets * (nodes > 1),
            "ring_bytes": 2 * parts.ring_bytes * (nodes > 1),
            "mpi_packets": doubling * parts.frame_packets,
            "mpi_bytes": doubling * parts.frame_bytes,
        }


__all__ = ["BALLOTS", "STEP_WAYS", "steps"]
