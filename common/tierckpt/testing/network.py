"""Nodes on one machine, each with its own network, and free ports.

Cables can be cut and narrowed: Linux network namespaces, joined by veth pairs and a bridge; making
them takes root, `ip` and `tc`. Standard library only, so that processes that represent nodes stay
small.

Free TCP ports are for servers that start later, in another process. The kernel may give the port
that it has given to `bind` with port 0, and got back, to anybody's connection before the server
has it. These ports are outside of the range from which it gives any.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["free_ports"]


HUB_ADDRESS = "10.99.0.254"
"""Address of the namespace with the bridge, for services that all nodes use, such as a server."""
QUEUE_SECONDS = 0.05
"""Time that traffic waits in a narrowed cable before it is dropped, as in a switch's buffer."""


class NoNetworkError(OSError):
    """Namespaces, or a requested feature of them, are not available; the message says why."""


class Network:
    """`count` namespaces, each with an interface `net0`, and a hub in one more. One thread.

    Addresses are in 10.99.0.0/24. Namespaces see each other only over the bridge, so any number of
    networks may exist at once. A process in a namespace keeps it in existence: end it first.
    """

    def __init__(self, count: int) -> None:
        """Make all of it. Raises NoNetworkError, and leaves nothing then."""
        prefix = f"tckpt{os.getpid()}-{id(self):x}"
        self.hub = f"{prefix}-hub"
        self.nodes = [f"{prefix}-{number}" for number in range(count)]
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def _make(self) -> None:
        for space in (self.hub, *self.nodes):
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", self.hub, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", self.hub, "address", "add", f"{HUB_ADDRESS}/24", "dev", "bridge0")
        _run("ip", "-n", self.hub, "link", "set", "bridge0", "up")
        for number, space in enumerate(self.nodes):
            port = _port(number)
            pair = ("peer", "name", "net0", "netns", space)
            _run("ip", "-n", self.hub, "link", "add", port, "type", "veth", *pair)
            _run("ip", "-n", self.hub, "link", "set", port, "master", "bridge0", "up")
            address = f"{self.address(number)}/24"
            _run("ip", "-n", space, "address", "add", address, "dev", "net0")
            _run("ip", "-n", space, "link", "set", "net0", "up")

    def address(self, number: int) -> str:
        """Address of a node, for the others."""
        return f"10.99.0.{number + 1}"

    def inside(self, number: int | None) -> list[str]:
        """Prefix for a command to run on a node; None: at the hub."""
        return ["ip", "netns", "exec", self.hub if number is None else self.nodes[number]]

    def cut(self, number: int) -> None:
        """Cut the node's cable; neither side is notified."""
        _run("ip", "-n", self.hub, "link", "set", _port(number), "down")

    def mend(self, number: int) -> None:
        """Undo `cut`."""
        _run("ip", "-n", self.hub, "link", "set", _port(number), "up")

    def narrow(self, number: int, bytes_per_second: float) -> None:
        """Limit the node's traffic to this rate from now on, in both directions."""
        shape = ["root", "tbf", "rate", f"{int(8 * bytes_per_second)}bit"]
        shape += [
            "burst",
            str(burst_bytes(bytes_per_second)),
            "latency",
            f"{1e3 * QUEUE_SECONDS:g}ms",
        ]
        for space, device in ((self.hub, _port(number)), (self.nodes[number], "net0")):
            _run("tc", "-n", space, "qdisc", "replace", "dev", device, *shape)

    def carried_bytes(self, number: int) -> tuple[int, int]:
        """Bytes that the node has sent and received, as counted by its interface."""
        counters = _run("ip", "-n", self.nodes[number], "-s", "-j", "link", "show", "dev", "net0")
        counted = json.loads(counters)[0]["stats64"]
        return counted["tx"]["bytes"], counted["rx"]["bytes"]

    def remove(self) -> None:
        """Delete all that exists of it."""
        for space in (*self.nodes, self.hub):
            with contextlib.suppress(NoNetworkError):
                _run("ip", "netns", "delete", space)


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """A network inside `with`. Raises NoNetworkError."""
    made = Network(count)
    try:
        yield made
    finally:
        made.remove()


def burst_bytes(bytes_per_second: float) -> int:
    """Bytes that pass a narrowed cable at once after a pause. At least the largest packet of TCP
    with all headers: for a smaller burst the kernel splits it into 45 packets, one for each
    segment. That takes twice the CPU time, unlike a real cable."""
    return max(128 << 10, int(bytes_per_second / 100))


def _port(number: int) -> str:
    """The node's end at the bridge."""
    return f"port{number}"


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NoNetworkError(f"no network namespaces here: {error}") from error
    if done.returncode:
        raise NoNetworkError(
            f"no network namespaces here: {' '.join(command)}: {done.stderr.strip()}"
        )
    return done.stdout


PORTS_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT, LAST_PORT = 10_000, 65_535
FEW_PORTS = 1000
"""Fewer ports than these are no choice: then those that the kernel gives are taken, too."""


def free_ports(count: int) -> list[int]:
    """Return so many different ports on which no process listens now. Raises OSError if there are
    no more."""
    candidates = _candidates()
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(found) == count:
            return found
        if _is_free(port):
            found.append(port)
    raise OSError(
        f"{len(found)} ports of {candidates[0]} to {candidates[-1]} are free, not {count}"
    )


def _candidates() -> Sequence[int]:
    low, high = map(int, PORTS_GIVEN.read_text().split())
    outside = [port for port in range(FIRST_PORT, LAST_PORT + 1) if not low <= port <= high]
    return outside if len(outside) >= FEW_PORTS else range(FIRST_PORT, LAST_PORT + 1)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
