"""All methods by name, in the order in which they are run and listed."""

from __future__ import annotations

from methods import Method
from ours import OURS
from peers import PEERS

METHODS: dict[str, type[Method]] = {each.name: each for each in (Method, *PEERS, *OURS)}
TUNED_PEER = "dcp-tuned"  # the one that the slowdown target is measured against
