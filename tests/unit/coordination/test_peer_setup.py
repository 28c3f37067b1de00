"""Peer setup: the introduction of the nodes' agents to each other, on the side of a trainer."""

from __future__ import annotations

from typing import Any

import pytest

from tierckpt.agent import ListenSettings
from tierckpt.coordination import PeerSetup, out_of_reach
from tierckpt.net import Address


@pytest.mark.parametrize("error", [TimeoutError("late"), ConnectionError(), KeyError("a bug")])
def test_an_agent_that_does_not_answer_is_a_problem_returned_and_not_raised(
    error: Exception,
) -> None:
    """The first rank of a node asks alone, and all others wait for its answer."""

    class Agent:
        def listen(self, *_: Any) -> Any:
            raise error

    peers = PeerSetup.__new__(PeerSetup)
    peers._agent = Agent()  # type: ignore[assignment]
    address, problem = peers._listen(ListenSettings("secret", "lo", 0, "localhost"))
    assert address is None
    assert problem


LOOPBACK, OTHER_LOOPBACK = Address("127.0.1.1", 7001), Address("::1", 7002)
FIRST, SECOND = Address("10.0.0.1", 7001), Address("10.0.0.2", 7001)


@pytest.mark.parametrize(
    ("addresses", "networks", "blamed"),
    [
        ([FIRST, None, SECOND], "aab", {}),
        ([LOOPBACK, OTHER_LOOPBACK], "aa", {}),
        ([FIRST, OTHER_LOOPBACK], "ab", {1: "::1, where other machines cannot reach it"}),
        ([LOOPBACK, LOOPBACK], "ab", {0: "127.0.1.1, where", 1: "127.0.1.1, where"}),
        ([FIRST, None, FIRST], "aab", {2: "10.0.0.1:7001, and rank 0's agent would, too"}),
        ([LOOPBACK, LOOPBACK], "aa", {1: "127.0.1.1:7001, and rank 0's agent would, too"}),
    ],
)
def test_addresses_useless_to_others(
    addresses: list[Address | None], networks: str, blamed: dict[int, str]
) -> None:
    """Nodes on one machine may meet at its loopback."""
    said = out_of_reach(addresses, list(networks))
    assert len(said) == len(blamed)
    for text, (rank, why) in zip(said, blamed.items(), strict=True):
        assert f"rank {rank}'s agent would listen on {why}" in text
        assert "set peer_interface" in text
