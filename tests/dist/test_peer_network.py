"""Three nodes with networks of their own, one of which is cut off, or slowed, in mid-exchange.

Real network namespaces on a bridge. Making them takes root; without it, the tests are skipped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.peershards import Members, nothing_of, wait_until
from tierckpt.redundancy.codes import Code

CODE = Code(3, 2, 1)
LENGTHS = [6 << 20] * 3
VICTIM = 1


class Network:
    """Namespaces `<name>0` to `<name>2`, whose `net0` meet on a bridge in `<name>hub`."""

    def __init__(self) -> None:
        self.name = f"tckpt{os.getpid()}-"
        self.spaces = [f"{self.name}{end}" for end in ("hub", *range(3))]
        hub, *nodes = self.spaces
        for space in self.spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge0", "up")
        for number, space in enumerate(nodes):
            pair = ("peer", "name", "net0", "netns", space)
            ip("-n", hub, "link", "add", f"port{number}", "type", "veth", *pair)
            ip("-n", hub, "link", "set", f"port{number}", "master", "bridge0", "up")
            ip("-n", space, "address", "add", f"{self.address(number)}/24", "dev", "net0")
            ip("-n", space, "link", "set", "net0", "up")

    def address(self, number: int) -> str:
        return f"10.99.0.{number + 1}"

    def cut(self, number: int, state: str = "down") -> None:
        """Pull the cable: neither side is told."""
        ip("-n", self.spaces[0], "link", "set", f"port{number}", state)

    def slow(self, number: int) -> None:
        """What the node sends, and what is sent to it, passes at 20 Mbit a second."""
        shape = ("root", "tbf", "rate", "20mbit", "burst", "32kb", "latency", "400ms")
        for space, device in ((self.spaces[0], f"port{number}"), (self.spaces[1 + number], "net0")):
            run(["tc", "-n", space, "qdisc", "add", "dev", device, *shape])

    def remove(self) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def ip(*arguments: str) -> None:
    run(["ip", *arguments])


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network.__new__(Network)
    try:
        made.__init__()  # type: ignore[misc]
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
    yield made
    made.remove()


class Node:
    """A member in its namespace."""

    def __init__(self, network: Network, number: int, folder: Path, rule: str, stall: float):
        plan = {"lengths": LENGTHS, "k": CODE.k, "m": CODE.m}
        plan |= {"join_seconds": 60.0, "stall_seconds": stall}
        command = ["ip", "netns", "exec", network.spaces[1 + number]]
        command += [sys.executable, "-m", "tests.peerprocesses", str(folder), json.dumps(plan)]
        self.process = subprocess.Popen(
            [*command, str(number), network.address(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TIERCKPT_FAULTS": rule, "TIERCKPT_FAULTS_DIR": str(folder)},
        )

    def heard(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, version: int, addresses: list[Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps([version, addresses]), file=self.process.stdin, flush=True)

    def stopped(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "nodes"
    made.mkdir()
    return made


def start(network: Network, folder: Path, stall: float) -> list[Node]:
    """All nodes; the victim will stop when it has sent some of v1."""
    rule = f"stop@peer:op=send,member={VICTIM},version=1,hit=4"
    return [Node(network, i, folder, rule, stall) for i in range(3)]


def begin_and_stop(nodes: list[Node]) -> list[Any]:
    """Begin v1, and return the addresses once the victim stands still in the middle of it."""
    addresses = [node.heard() for node in nodes]
    for node in nodes:
        node.tell(1, addresses)
    wait_until(nodes[VICTIM].stopped)
    return addresses


def check(folder: Path, version: int) -> None:
    members = Members(folder, CODE, LENGTHS)
    assert sorted(members.parities(version)) == [0, 1, 2]
    for lost in range(3):
        assert members.rebuilt({lost}, version) == {lost: members.image(lost, version)}


def test_a_node_that_is_cut_off_is_named_and_comes_back(network: Network, folder: Path) -> None:
    nodes = start(network, folder, stall=4.0)
    try:
        addresses = begin_and_stop(nodes)
        network.cut(VICTIM)
        nodes[VICTIM].process.send_signal(signal.SIGCONT)
        errors = [node.heard() for node in nodes]
        for number in (0, 2):
            assert ":".join(map(str, addresses[VICTIM])) in errors[number], errors
        assert "for 4 s" in errors[VICTIM]
        assert nothing_of(folder, 1)
        network.cut(VICTIM, "up")
        for node in nodes:
            node.tell(2, addresses)
        assert [node.heard() for node in nodes] == [None] * 3
        check(folder, 2)
    finally:
        for node in nodes:
            node.end()


def test_a_node_that_is_slow_makes_it_late_and_nothing_else(network: Network, folder: Path) -> None:
    nodes = start(network, folder, stall=20.0)
    try:
        begin_and_stop(nodes)
        network.slow(VICTIM)
        nodes[VICTIM].process.send_signal(signal.SIGCONT)
        assert [node.heard() for node in nodes] == [None] * 3
        check(folder, 1)
    finally:
        for node in nodes:
            node.end()
