"""Ranks that halt, without a checkpointer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tierckpt.config import load_config
from tierckpt.group import Node
from tierckpt.halt import HaltController


class Rank:
    """The only rank of a node."""

    def __init__(
        self, directory: Path, number: int, nodes: int, environment: dict[str, str], **settings: Any
    ) -> None:
        self.said: list[tuple[str, int]] = []
        config = load_config({"path": directory, "halt_signals": "", **settings}, {})
        node = Node(number, nodes, (number,))
        self.halting = HaltController(
            config, number, node, lambda *said: self.said.append(said), environment
        )

    def texts(self) -> str:
        return "\n".join(text for text, _ in self.said)

    def warnings(self) -> list[str]:
        return [text for text, severity in self.said if severity == logging.WARNING]


@pytest.fixture
def make_rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    made = []

    def make(
        directory: Path = tmp_path,
        number: int = 0,
        nodes: int = 1,
        environment: Any = None,
        **settings: Any,
    ) -> Rank:
        made.append(Rank(directory, number, nodes, environment or {}, **settings))
        return made[-1]

    yield make
    for rank in made:
        rank.halting.close()
