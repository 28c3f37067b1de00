"""All methods of each launcher by name, in the order in which they are run and listed."""

from __future__ import annotations

from horovods import HOROVODS
from methods import Method
from ours import OURS
from peers import PEERS

METHODS: dict[str, dict[str, type[Method]]] = {
    "torchrun": {each.name: each for each in (Method, *PEERS, *OURS)},
    "horovod": {each.name: each for each in (Method, *HOROVODS)},
}
TUNED_PEER = "dcp-tuned"  # the one that the slowdown target is measured against
