"""How long does a ballot across nodes take, and how much CPU time? Real gloo, light processes.

    python benchmarks/ballots.py --toy
    python benchmarks/ballots.py --worlds 8,16,32,64 --json ballots.json

Each rank is a process that does nothing else. Two kinds of ballots take turns in the same
processes: a reduction over gloo, which passes messages around a ring of all ranks, and the tree of
node leaders. Ranks on one machine act as nodes of `--node-ranks` ranks. All of them share the
cores, so the wall time is that of the CPU time of all messages; a cluster has the time of one
message after the other, which the last columns give for `--message-us` a message.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ddp_ckpt import TorchGroup
from lib.machine import description
from tierckpt.coordination.ballots.leader_tree import FAN_OUT, leader_tree
from tierckpt.coordination.ballots.vote_exchange import GroupBallots
from tierckpt.core.votes import VOTE_WIDTH, Vote
from tierckpt.group import Node

KINDS = ("gloo", "tree")


def ring_messages(ranks: int) -> int:
    """Return the messages of a ring's reduction that are sent one after the other."""
    return 2 * (ranks - 1)


def tree_messages(nodes: int) -> int:
    """Return the messages of a tree's reduction that are sent one after the other: each parent
    receives those of its children one after the other."""
    levels, most = 0, 1
    while most < nodes:
        levels, most = levels + 1, most * FAN_OUT + 1
    return 2 * levels * min(FAN_OUT, max(1, nodes - 1))


def run_rank(rank: int, options: dict[str, Any], world: int, folder: str) -> None:
    """Run one rank; rank 0 writes the figures."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/{world}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    group = TorchGroup()
    hosts = [str(other // options["node_ranks"]) for other in range(world)]
    node = Node.of(hosts[rank], hosts)
    tree = leader_tree(group, node, VOTE_WIDTH + 2)
    assert tree is not None, "the ranks could not connect"
    kinds = {
        "gloo": GroupBallots(group, VOTE_WIDTH),
        "tree": GroupBallots(group, VOTE_WIDTH, tree),
    }
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for turn in range(options["rounds"]):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            group.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            for _ in range(options["ballots"]):
                kinds[kind].all_reduce_min(Vote().pack()).wait()
            used = time.process_time() - cpu
            found[kind].append((time.perf_counter() - begin, used))
    everyone: list[Any] = group.all_gather_object(found)
    if rank == 0:
        figures: dict[str, Any] = {"ranks": world, "nodes": node.count}
        for kind in KINDS:
            rounds = [[theirs[kind][n] for theirs in everyone] for n in range(options["rounds"])]
            seconds = median(max(wall for wall, _ in each) for each in rounds)
            cpu = median(sum(used for _, used in each) for each in rounds)
            figures[f"{kind}_seconds"] = seconds / options["ballots"]
            figures[f"{kind}_cpu_seconds"] = cpu / options["ballots"]
        Path(folder, f"{world}.json").write_text(json.dumps(figures))
    group.barrier()
    kinds["tree"].close()
    group.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a few seconds, to try it")
    parser.add_argument("--worlds", default="8,16,32,64", help="numbers of ranks")
    parser.add_argument("--node-ranks", type=int, default=8, help="ranks of a node")
    parser.add_argument("--message-us", type=float, default=25.0, help="of one message, modelled")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    worlds = [4] if options.toy else [int(world) for world in options.worlds.split(",")]
    given = {
        "node_ranks": 2 if options.toy else options.node_ranks,
        "rounds": 2 if options.toy else 7,
        "ballots": 5 if options.toy else 20,
    }
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}; ms a ballot, and CPU ms of all ranks"
    )
    print("ranks nodes     gloo      CPU     tree      CPU")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            arguments = (given, world, folder)
            torch.multiprocessing.start_processes(
                run_rank, arguments, nprocs=world, start_method="fork"
            )
            row = json.loads(Path(folder, f"{world}.json").read_text())
            names = [f"{kind}_{what}" for kind in KINDS for what in ("seconds", "cpu_seconds")]
            cells = "".join(f"{1e3 * row[name]:>9.2f}" for name in names)
            print(f"{world:>5} {row['nodes']:>5}{cells}", flush=True)
            rows.append(row)
    print(f"modelled, {options.message_us:g} us a message, nodes of eight: ms a ballot")
    modelled = []
    for ranks in (64, 1024, 4096, 16384):
        ring = ring_messages(ranks) * options.message_us / 1e3
        tree = tree_messages(math.ceil(ranks / 8)) * options.message_us / 1e3
        print(f"{ranks:>6} gloo's ring {ring:>8.2f}   tree {tree:>6.2f}")
        modelled.append({"ranks": ranks, "ring_ms": ring, "tree_ms": tree})
    if options.json:
        content = {"run": description(Path(tempfile.gettempdir())), "rows": rows}
        content["modelled"] = modelled
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
