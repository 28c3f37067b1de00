"""How long does a ballot across nodes take, and how much CPU time? Real gloo, light processes.

    python benchmarks/ballots.py --toy
    python benchmarks/ballots.py --worlds 8,16,32,64 --json ballots.json

Each rank is a process that does nothing else. Two kinds of ballots take turns in the same
processes: a reduction over gloo, which passes messages around a ring of all ranks, and the tree
of node leaders. Ranks on one machine act as nodes of `--node-ranks` ranks. All of them share the
cores, so the wall time is that of the CPU time of all messages. The packets are those of the
loopback device, with the acknowledgements.

A cluster has the time of one message after the other. So the parts are measured, too: a frame of
the tree between two processes, a ballot of two ranks on two nodes (two hops, with all the
software of a leader), and a vote on the page of a node. scale.py computes ballots of up to 16,384
ranks from these.

To count only its own packets, as root: unshare -n sh -c 'ip link set lo up && python ...'
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from ddp_ckpt import TorchGroup
from lib.machine import description
from lib.ranks import rows_of_ranks
from lib.report import publish, table
from lib.terminal import parser_of
from tierckpt.coordination.ballots import GroupBallots, SharedBallots, page_bytes
from tierckpt.coordination.leader_tree import leader_tree
from tierckpt.core.decisions import VOTE_WIDTH, Vote
from tierckpt.group import Node, SingleGroup

KINDS = ("gloo", "tree")
FRAME = struct.Struct(f"<qq{VOTE_WIDTH + 2}q")
"""A message of the tree."""
ROUND_TRIPS, TURNS = 2000, 500
QUIET_SECONDS = 0.3


def loopback() -> tuple[int, int]:
    """Return the packets and bytes that this machine has sent to itself."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, counts = line.partition(":")
        if device.strip() == "lo":
            received, packets = map(int, counts.split()[:2])
            return packets, received
    return 0, 0


def message_seconds() -> float:
    """Return the time of one frame between two processes that wait for it as a leader does: half
    the median round trip."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if not child:
            with socket.create_connection(listener.getsockname()) as end:
                _answer(end)
            os._exit(0)
        end, _ = listener.accept()
    trips = []
    with end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            begin = time.perf_counter()
            end.sendall(FRAME.pack(*range(VOTE_WIDTH + 4)))
            select.select([end], [], [])
            FRAME.unpack(end.recv(FRAME.size, socket.MSG_WAITALL))
            trips.append(time.perf_counter() - begin)
    os.waitpid(child, 0)
    return median(trips) / 2


def _answer(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while select.select([end], [], []) and (frame := end.recv(FRAME.size, socket.MSG_WAITALL)):
        end.sendall(FRAME.pack(*FRAME.unpack(frame)))


class _NodeRank(SingleGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def page_seconds(ranks: int) -> float:
    """Return the CPU time of one rank that casts a vote on the page of so many ranks, and reads
    the result."""
    nbytes = page_bytes(ranks, VOTE_WIDTH)
    memory = os.memfd_create("page")
    os.ftruncate(memory, nbytes)
    parts = [
        SharedBallots(mmap.mmap(memory, nbytes), _NodeRank(rank, ranks), VOTE_WIDTH, {})
        for rank in range(ranks)
    ]
    begin = time.process_time()
    for _ in range(TURNS):
        for cast in [part.all_reduce_min(Vote().pack()) for part in parts]:
            cast.wait()
    used = time.process_time() - begin
    for part in parts:
        part.close()
    os.close(memory)
    return used / (TURNS * ranks)


def traffic(group: TorchGroup, ballots: GroupBallots, count: int) -> tuple[float, float]:
    """Return the packets and bytes of a ballot, of all ranks."""
    group.barrier()
    time.sleep(QUIET_SECONDS)  # the last messages of the barrier
    before = loopback()
    time.sleep(QUIET_SECONDS)
    for _ in range(count):
        ballots.all_reduce_min(Vote().pack()).wait()
    time.sleep(QUIET_SECONDS)
    packets, nbytes = (now - then for now, then in zip(loopback(), before, strict=True))
    return packets / count, nbytes / count


def measure(folder: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run one rank; yields the figures."""
    group = TorchGroup()
    hosts = [str(other // options["node_ranks"]) for other in range(group.size)]
    node = Node.of(hosts[group.rank], hosts)
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
    sent = {kind: traffic(group, kinds[kind], options["ballots"]) for kind in KINDS}
    everyone: list[Any] = group.all_gather_object(found)
    figures: dict[str, Any] = {"ranks": group.size, "nodes": node.count}
    for kind in KINDS:
        rounds = [[theirs[kind][n] for theirs in everyone] for n in range(options["rounds"])]
        seconds = median(max(wall for wall, _ in each) for each in rounds)
        cpu = median(sum(used for _, used in each) for each in rounds)
        figures[f"{kind}_seconds"] = seconds / options["ballots"]
        figures[f"{kind}_cpu_seconds"] = cpu / options["ballots"]
        figures[f"{kind}_packets"], figures[f"{kind}_bytes"] = sent[kind]
    yield figures
    group.barrier()
    kinds["tree"].close()
    group.close()


def run(given: dict[str, Any], world: int) -> dict[str, Any]:
    """Measure the ballots of so many processes."""
    (row,) = rows_of_ranks(measure, world, given, start_method="fork")
    return row


def parts(given: dict[str, Any]) -> dict[str, float]:
    """Measure the parts of a ballot."""
    two = run(given | {"node_ranks": 1}, 2)
    return {
        "frame_bytes": FRAME.size,
        "vote_bytes": 8 * VOTE_WIDTH,
        "message_seconds": message_seconds(),
        "tree_hop_seconds": two["tree_seconds"] / 2,
        "gloo_hop_seconds": two["gloo_seconds"] / 2,
        "page_seconds": page_seconds(given["node_ranks"]),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--worlds", default="8,16,32,64", help="numbers of ranks")
    parser.add_argument("--node-ranks", type=int, default=8, help="ranks of a node")
    options = parser.parse_args()
    worlds = [4] if options.toy else [int(world) for world in options.worlds.split(",")]
    given = {
        "node_ranks": 2 if options.toy else options.node_ranks,
        "rounds": 2 if options.toy else 7,
        "ballots": 5 if options.toy else 20,
    }
    measured = parts(given)
    rows = [run(given, world) for world in worlds]
    print(table([measured]))
    publish(options.json, description(Path(tempfile.gettempdir())), parts=measured, rows=rows)


if __name__ == "__main__":
    main()
