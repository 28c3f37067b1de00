"""The levels below memory as orders to nodes: the work of a level, and a bare transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lib.levels.nodes import Done, Nodes
from tierckpt.erasure.codes import Code

Orders = list[dict[str, Any]]


@dataclass(frozen=True)
class Level:
    """A level, one line of the table."""

    name: str
    order: str
    """The method of `node.Node` that does the work of the level."""
    bare_order: str
    bare_title: str
    nodes: int = 1
    target: float | None = 0.9
    """Fraction of the bare throughput."""

    @property
    def linked(self) -> bool:
        """Whether the work goes over the cables between nodes."""
        return False

    def orders(self, nodes: Nodes, repeat: int) -> Orders:
        """Orders for the work of the level."""
        return [{"name": self.order, "repeat": repeat}]

    def bare(self, nodes: Nodes, repeat: int, alone: Done) -> Orders:
        """Orders for a bare transfer of as many bytes as `alone` moved."""
        return [{"name": self.bare_order, "repeat": repeat}]


@dataclass(frozen=True)
class PeerLevel(Level):
    """A redundancy scheme in one group of `nodes` nodes."""

    k: int = 1
    m: int = 1

    @property
    def linked(self) -> bool:
        return True

    def orders(self, nodes: Nodes, repeat: int) -> Orders:
        code = Code(self.nodes, self.k, self.m)
        order = {"name": self.order, "repeat": repeat, "code": [code.n, code.k, code.m]}
        return [{**order, "addresses": nodes.agents[: self.nodes]}] * self.nodes

    def bare(self, nodes: Nodes, repeat: int, alone: Done) -> Orders:
        each_bytes = alone.sent_bytes // (self.nodes * len(alone.seconds))
        return nodes.ring(self.nodes, each_bytes, repeat)


def _peer(name: str, n: int, k: int, m: int) -> PeerLevel:
    return PeerLevel(name, "protect", "bare_send", "socket", n, None, k, m)


LEVELS: tuple[Level, ...] = (
    Level("local", "commit_local", "bare_write", "write, file reused"),
    Level("local, in place", "commit_in_place", "commit_copy", "copy to tmpfs", target=1.0),
    _peer("partner, 2 nodes", 2, 1, 1),
    _peer("xor, 4 nodes", 4, 3, 1),
    _peer("rs 4+2, 6 nodes", 6, 4, 2),
    Level("persistent", "flush", "bare_copy", "read, write new file"),
)
