"""All methods by launcher and name, in the order of the table."""

from __future__ import annotations

from lib.methods.alternatives import PEERS
from lib.methods.checkfreq import CheckFreq
from lib.methods.horovod import HOROVODS
from lib.methods.method import Method
from lib.methods.ours import OURS
from lib.methods.shared_store import HOROVOD_SHARED, SHARED

METHODS: dict[str, dict[str, type[Method]]] = {
    "torchrun": {each.name: each for each in (Method, *PEERS, CheckFreq, *OURS, *SHARED)},
    "horovod": {each.name: each for each in (Method, *HOROVODS, *HOROVOD_SHARED)},
}
TUNED_PEER = "dcp-tuned"  # the reference of the slowdown target
