"""Messages about former nodes that do not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tierckpt.agent import AgentAddress, KnownNodes
from tierckpt.coordination import FormerNodes
from tierckpt.group import SingleGroup
from tierckpt.peer import Transport


@pytest.fixture
def closed_port() -> Iterator[int]:
    """An address where no process can listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


def look(*nodes: AgentAddress) -> FormerNodes:
    agent: Any = None
    former_nodes = FormerNodes(agent, ("here/boot",), asks=True)
    known_nodes = KnownNodes(1, nodes)
    former_nodes.look(SingleGroup(), known_nodes, [known_nodes.mark])
    return former_nodes


def test_each_is_named_with_all_reasons(closed_port: int) -> None:
    """One is down; another has met others since, as one of two lists of nodes shows."""
    with Transport(b"of a later run", "127.0.0.1") as agent:
        host, port = agent.address.host, agent.address.port
        down = AgentAddress("a/boot", "127.0.0.1", closed_port, "of this")
        refuses = AgentAddress("b/boot", host, port, "of this")
        first, second = look(down, refuses).silent
        assert first.startswith("node a, ")
        assert "cannot be reached" in first
        assert second.startswith("node b, ")
        assert "of another run of this one" in second
        former_nodes = look(down, refuses, AgentAddress("b/boot", host, port, "of a later run"))
        assert former_nodes.silent == [first]
        assert [known.node for known in former_nodes.alive] == ["b"]


def test_of_many_the_first_few_and_how_many_more(closed_port: int) -> None:
    nodes = [AgentAddress(f"n{i}/boot", "127.0.0.1", closed_port, "of this") for i in range(9)]
    *named, rest = look(*nodes).silent
    assert len(named) == 4
    assert rest == "5 more nodes did not answer either: n4, n5, n6 and 2 more"


def test_those_that_could_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container allows no more threads."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    (why,) = look(AgentAddress("a/boot", "127.0.0.1", 1, "of this")).silent
    assert "was not asked" in why
