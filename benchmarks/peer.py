"""How much does an exchange between agents cost, compared with a bare socket?

    python benchmarks/peer.py --toy
    python benchmarks/peer.py --json peer.json

All members of a redundancy group are in one process, each with a transport and a folder
(`--dir`), connected by loopback. Each sample protects one shard of every member; then bare
sockets send as many bytes.

GB/s               shards over wall time, median and range
CPU-s/GB           CPU time of the process per GB of shards
sent, written      bytes between members, and of parity, as multiples of the shards
bare GB/s sent     speed of the bare sockets
bare CPU-s/GB      their CPU time per GB of shards
CPU of the bare    CPU time of the exchange over that of the bare sockets
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lib import machine
from lib.figures import Spread, spread
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary, write_json
from lib.limits import Cost
from lib.report import align
from lib.shards import manifest, shared
from lib.terminal import parser_of
from tierckpt.erasure import kernels
from tierckpt.erasure.codes import Code
from tierckpt.erasure.groups import RedundancyGroup
from tierckpt.peer.exchange import Exchange, Party, Report, Shard
from tierckpt.peer.transport import Transport
from tierckpt.storage.local import LocalStore

CODES = {"partner, 2 members": Code(2, 1, 1), "xor, 4 members": Code(4, 3, 1)}
CODES["rs 4+2"] = Code(6, 4, 2)
PIECE_BYTES = 1 << 20
"""Bytes that the bare socket sends at once: a window of the exchange."""


@dataclass
class Row:
    """One scheme; a sample protects the shard of every member once.

    data_bytes: size of all shards. sent_bytes: traffic between the members. seconds, cpu_seconds:
    the whole group, in one process. bare_seconds, bare_cpu_seconds: bare sockets with sent_bytes.
    """

    scheme: str
    data_bytes: int
    sent_bytes: int = 0
    written_bytes: int = 0
    seconds: Spread | None = None
    cpu_seconds: Spread | None = None
    bare_seconds: Spread | None = None
    bare_cpu_seconds: Spread | None = None
    samples: list[tuple[Cost, Cost]] = field(default_factory=list, repr=False)

    def finish(self) -> None:
        """Compute medians and ranges of the samples."""
        self.seconds = spread(ours.wall_s for ours, _ in self.samples)
        self.cpu_seconds = spread(ours.cpu_s for ours, _ in self.samples)
        self.bare_seconds = spread(bare.wall_s for _, bare in self.samples)
        self.bare_cpu_seconds = spread(bare.cpu_s for _, bare in self.samples)
        self.samples = []


class Group:
    """All members of a group in this process, each with a transport and a folder of its own."""

    def __init__(self, scheme: str, image: memoryview, folder: Path) -> None:
        self.code = CODES[scheme]
        self.folder, self.image = folder / scheme.replace(" ", "-"), image
        self.transports = [Transport(b"benchmark", "127.0.0.1") for _ in range(self.code.n)]
        self.row = Row(scheme, self.code.n * len(image))
        self.version = 0

    def exchange(self) -> tuple[Cost, list[Report]]:
        """Protect the next version. The parity files of the previous one are reused."""
        self.version += 1
        addresses = tuple(t.address for t in self.transports)
        ring = RedundancyGroup(tuple(range(self.code.n)), self.code)
        exchanges = []
        for member, transport in enumerate(self.transports):
            store = LocalStore(self.folder / str(member))
            for key in store.parities():
                store.retire(key)
            record = manifest(member, self.code.n, self.version, len(self.image))
            shard = Shard(self.image, record)
            party = Party(ring, addresses, member)
            exchanges.append(Exchange(transport, party, shard, store))
        reports: list[Report] = []
        threads = [threading.Thread(target=lambda e=e: reports.append(e.run())) for e in exchanges]
        cost = _timed_process(threads)
        if len(reports) != self.code.n:
            raise RuntimeError("an exchange failed; its error is above")
        return cost, reports

    def sample(self) -> None:
        """Run one exchange, then send as many bytes through bare sockets."""
        cost, reports = self.exchange()
        self.row.sent_bytes = sum(r.sent_bytes for r in reports)
        self.row.written_bytes = sum(r.parity_bytes for r in reports)
        self.row.samples.append((cost, bare(self.image, self.row.sent_bytes, self.code.n)))

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


def bare(image: memoryview, nbytes: int, pairs: int) -> Cost:
    """Send `nbytes` through `pairs` loopback connections at once, and drop them."""
    share = nbytes // pairs
    threads, opened = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(pairs):
            caller = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
            opened += [caller, accepted]
            threads.append(threading.Thread(target=_send, args=(caller, image, share)))
            threads.append(threading.Thread(target=_receive, args=(accepted, share)))
    cost = _timed_process(threads)
    for sock in opened:
        sock.close()
    return cost


def _send(sock: socket.socket, image: memoryview, nbytes: int) -> None:
    for low in range(0, nbytes, PIECE_BYTES):
        at = low % (len(image) - PIECE_BYTES + 1)
        sock.sendall(image[at : at + min(PIECE_BYTES, nbytes - low)])


def _receive(sock: socket.socket, nbytes: int) -> None:
    window = memoryview(bytearray(PIECE_BYTES))
    while nbytes > 0:
        nbytes -= sock.recv_into(window[: min(PIECE_BYTES, nbytes)])


def _timed_process(threads: list[threading.Thread]) -> Cost:
    """Run all threads; return wall and CPU time. The process must do nothing else."""
    wall, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


HEADERS = (
    "scheme",
    "GB/s (min..max)",
    "CPU-s/GB",
    "sent",
    "written",
    "bare GB/s sent",
    "bare CPU-s/GB",
    "CPU of the bare",
)


def table(rows: list[Row]) -> str:
    """The table, one line per scheme. GB are GB of shards unless the header says otherwise."""
    return align([HEADERS, *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    if not (row.seconds and row.cpu_seconds and row.bare_seconds and row.bare_cpu_seconds):
        return (row.scheme, "not measured")
    middle, low, high = (
        row.data_bytes / s / 1e9 for s in (row.seconds.median, row.seconds.high, row.seconds.low)
    )
    return (
        row.scheme,
        f"{middle:.2f} ({low:.2f}..{high:.2f})",
        f"{row.cpu_seconds.median / row.data_bytes * 1e9:.2f}",
        f"{row.sent_bytes / row.data_bytes:.2f} x",
        f"{row.written_bytes / row.data_bytes:.2f} x",
        f"{row.sent_bytes / row.bare_seconds.median / 1e9:.2f}",
        f"{row.bare_cpu_seconds.median / row.data_bytes * 1e9:.2f}",
        f"{row.cpu_seconds.median / row.bare_cpu_seconds.median:.2f} x",
    )


def measure(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Take turns, so that other load of the machine affects all of them equally."""
    image = shared(options.shard_mb << 20)
    groups = [Group(scheme, image, folder) for scheme in CODES]
    try:
        for number in range(options.rounds + 1):
            for group in groups:
                group.sample()
                if number == 0:
                    group.row.samples.clear()  # page faults, connections, new files
        for group in groups:
            group.row.finish()
            yield group.row
    finally:
        for group in groups:
            group.close()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(
        __doc__, toy="8 MB shards, 2 rounds", place="where parity is written; default /dev/shm"
    )
    parser.add_argument("--shard-mb", type=int, help="size of a shard; default 128, toy 8")
    parser.add_argument("--rounds", type=int, help="turns of everything; default 7, toy 2")
    options = parser.parse_args()
    options.shard_mb = options.shard_mb or (8 if options.toy else 128)
    options.rounds = options.rounds or (2 if options.toy else 7)
    options.dir = options.dir or SHARED_MEMORY
    return options


def main() -> None:
    options = arguments()
    about = machine.description(options.dir)
    clean_up_when_terminated()
    with temporary(options.dir) as folder:
        rows = list(measure(options, folder))
    library = kernels.find_isal()
    print(f"{about['cpu']}, {about['cores']} cores, load {os.getloadavg()[0]:.1f}")
    print(f"shards of {options.shard_mb} MiB, parity on {about['filesystem']}; all members in one")
    print(f"process, over loopback; {library.path if library else kernels.ISAL_MISSING}\n")
    print(table(rows))
    if options.json:
        document = {
            **about,
            "shard_bytes": options.shard_mb << 20,
            "rows": [{k: v for k, v in asdict(row).items() if k != "samples"} for row in rows],
        }
        write_json(options.json, document)
        print(f"figures: {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
