"""TCP ports for servers that start later, in another process.

The kernel may give the port that it has given to `bind` with port 0, and got back, to anybody's
connection before the server has it. These ports are outside of the range from which it gives any.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, LAST = 10_000, 65_535
FEW = 1000
"""Fewer ports than these are no choice: then those that the kernel gives are taken, too."""


def free_ports(count: int) -> list[int]:
    """Return so many different ports on which no process listens now. Raises OSError if there are
    no more."""
    candidates = _candidates()
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(found) == count:
            return found
        if _is_free(port):
            found.append(port)
    raise OSError(
        f"{len(found)} ports of {candidates[0]} to {candidates[-1]} are free, not {count}"
    )


def _candidates() -> Sequence[int]:
    low, high = map(int, GIVEN.read_text().split())
    outside = [port for port in range(FIRST, LAST + 1) if not low <= port <= high]
    return outside if len(outside) >= FEW else range(FIRST, LAST + 1)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


__all__ = ["free_ports"]
