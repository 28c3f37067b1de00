"""The nodes of levels.py, seen from the benchmark: start them, send orders, add up answers; and the
levels as orders: the work of each, and a bare transfer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lib.levels.node import Setup, Work
from tierckpt.erasure.codes import Code
from tierckpt.testing import Network, NoNetworkError

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Place:
    """Folders for the files of nodes. They exist."""

    disk: Path
    memory: Path
    persistent: str


@dataclass(frozen=True)
class Done:
    """The result of one order to several nodes.

    seconds: each repetition, on the slowest node. span_s: from the first start to the last end.
    cpu_s, sent_bytes: sums over all nodes.
    """

    seconds: list[float]
    span_s: float
    cpu_s: float
    sent_bytes: int


class NodeError(RuntimeError):
    """A node could not execute an order; the message has the node and the reason."""


class Nodes:
    """`count` processes; orders go to the first few. For one thread. `close` ends them all."""

    def __init__(self, count: int, nbytes: int, place: Place, link_bytes_per_second: float) -> None:
        """Start the nodes, connected by cables of that rate each way (0: no limit).

        Without network namespaces they are connected by loopback. `limited` is True if the cables
        have a limit.
        """
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []
        self.no_network = ""
        """The reason if there are no cables."""
        try:
            network = self._cables(count, link_bytes_per_second)
            self.limited = network is not None and link_bytes_per_second > 0
            for number in range(count):
                setup = _setup(number, nbytes, place, network)
                self._processes.append(self._start(setup, network))
            answers = [self._receive(number) for number in range(count)]
        except BaseException:
            self.close()
            raise
        self.agents = [each["agent"] for each in answers]
        self._bare = [each["bare"] for each in answers]

    def _cables(self, count: int, bytes_per_second: float) -> Network | None:
        try:
            network = Network(count)
        except NoNetworkError as error:
            self.no_network = str(error)
            return None
        self._stack.callback(network.remove)
        for number in range(count if bytes_per_second > 0 else 0):
            network.narrow(number, bytes_per_second)
        return network

    def _start(self, setup: Setup, network: Network | None) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "node.py"), json.dumps(asdict(setup))]
        process = subprocess.Popen(
            [*(network.inside(setup.number) if network else []), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def close(self) -> None:
        """End all nodes."""
        self._stack.close()

    # --- orders --------------------------------------------------------------------------------

    def begin(self, orders: Iterable[dict[str, Any]]) -> Callable[[], Done]:
        """Send order i to node i; return a function that waits for all results."""
        numbers = [self._send(number, order) for number, order in enumerate(orders)]
        return lambda: _total([Work(**self._receive(number)) for number in numbers])

    def do(self, orders: Iterable[dict[str, Any]]) -> Done:
        """Send the orders and wait for all results."""
        return self.begin(orders)()

    def ring(self, members: int, nbytes: int, repeat: int) -> list[dict[str, Any]]:
        """Orders for a ring: each of `members` nodes sends `nbytes` to the next one."""
        to = [self._bare[(number + 1) % members] for number in range(members)]
        return [
            {"name": "bare_send", "repeat": repeat, "to": address, "nbytes": nbytes}
            for address in to
        ]

    def _send(self, number: int, order: dict[str, Any]) -> int:
        stdin = self._processes[number].stdin
        assert stdin is not None
        print(json.dumps(order), file=stdin, flush=True)
        return number

    def _receive(self, number: int) -> dict[str, Any]:
        stdout = self._processes[number].stdout
        assert stdout is not None
        line = stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process has ended"}
        if "error" in answer:
            raise NodeError(f"node {number}: {answer['error']}")
        return answer


def _setup(number: int, nbytes: int, place: Place, network: Network | None) -> Setup:
    folder = f"node{number}"
    return Setup(
        number,
        network.address(number) if network else "127.0.0.1",
        nbytes,
        str(place.disk / folder),
        str(place.memory / folder),
        place.persistent,
    )


def _total(works: list[Work]) -> Done:
    return Done(
        [max(same) for same in zip(*(work.seconds for work in works), strict=True)],
        max(work.end for work in works) - min(work.begin for work in works),
        sum(work.cpu_s for work in works),
        sum(work.sent_bytes for work in works),
    )


Orders = list[dict[str, Any]]


@dataclass(frozen=True)
class Level:
    """A level, one row of the results. order, bare_order: methods of `node.Node`. code: data and
    parity shards of a redundancy scheme in one group of `nodes` nodes."""

    name: str
    order: str
    bare_order: str
    nodes: int = 1
    code: tuple[int, int] | None = None

    def orders(self, nodes: Nodes, repeat: int) -> Orders:
        """Orders for the work of the level."""
        order: dict[str, Any] = {"name": self.order, "repeat": repeat}
        if self.code:
            code = Code(self.nodes, *self.code)
            order |= {"code": [code.n, code.k, code.m], "addresses": nodes.agents[: self.nodes]}
        return [order] * self.nodes

    def bare(self, nodes: Nodes, repeat: int, alone: Done) -> Orders:
        """Orders for a bare transfer of as many bytes as `alone` moved."""
        if not self.code:
            return [{"name": self.bare_order, "repeat": repeat}]
        each_bytes = alone.sent_bytes // (self.nodes * len(alone.seconds))
        return nodes.ring(self.nodes, each_bytes, repeat)


LEVELS = (
    Level("local", "commit_local", "bare_write"),
    Level("partner, 2 nodes", "protect", "bare_send", 2, (1, 1)),
    Level("xor, 4 nodes", "protect", "bare_send", 4, (3, 1)),
    Level("rs 4+2, 6 nodes", "protect", "bare_send", 6, (4, 2)),
    Level("persistent", "flush", "bare_copy"),
)
