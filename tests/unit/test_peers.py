"""How the nodes' agents are introduced to each other, seen from a trainer."""

from __future__ import annotations

from typing import Any

import pytest

from tierckpt.peers import Peers


@pytest.mark.parametrize(
    "answer",
    [{}, {"error": None}, {"error": "", "host": "h"}, {"error": "", "host": "h", "port": "x"}],
)
def test_an_agent_that_answers_nonsense_is_a_problem_told_and_not_raised(
    answer: dict[str, Any],
) -> None:
    """The first rank of a node asks alone, and all others wait for what it heard."""

    class Agent:
        def ask(self, *args: Any, **values: Any) -> dict[str, Any]:
            return answer

    peers = Peers.__new__(Peers)
    peers._agent = Agent()  # type: ignore[assignment]
    address, problem = peers._listen({})
    assert address is None
    assert problem
