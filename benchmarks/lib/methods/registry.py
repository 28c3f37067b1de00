"""All methods by launcher and name, in the order of the table."""

from __future__ import annotations

from lib.methods.alternatives import PEERS
from lib.methods.checkfreq import CheckFreq
from lib.methods.method import Method
from lib.methods.ours import OURS

METHODS: dict[str, dict[str, type[Method]]] = {
    launcher: {
        each.name: each for each in (Method, *PEERS, CheckFreq, *OURS) if launcher in each.launchers
    }
    for launcher in ("torchrun", "horovod")
}
