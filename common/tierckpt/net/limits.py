"""Limits of connections between machines: of sizes, of numbers, and of time.

How long a step of its work may take is each user's own; here is what any connection has.
"""

from __future__ import annotations

import contextlib
import socket
from typing import NamedTuple

__all__ = [
    "HELLO_SECONDS",
    "JOB",
    "LEADERS",
    "LOOK_SECONDS",
    "MAX_HEAD_BYTES",
    "MAX_RECORD_BYTES",
    "MAX_TEXT",
    "MAX_UNVERIFIED",
    "PEERS",
    "RETRY_SECONDS",
    "Silence",
    "tend",
]


HELLO_SECONDS = 10.0
"""Limit of each step of a handshake."""
RETRY_SECONDS = 0.2
"""Pause of a listener that is out of descriptors: it may pass."""
LOOK_SECONDS = 1.0
"""Interval at which a waiting receiver checks its progress: on a link this slow, a few bytes are
progress as well."""
MAX_UNVERIFIED = 64
"""Limit of connections that have not yet proved that they know the secret; more are closed."""
MAX_HEAD_BYTES = 64 << 10
"""Limit of a JSON object."""
MAX_TEXT = 800
"""Characters of an error text that fit well into a JSON object, whichever they are."""
MAX_RECORD_BYTES = 64 << 20
"""Limit of a manifest that a peer sends: about the length for a shard of 3 TB."""


class Silence(NamedTuple):
    """When a silent machine counts as gone: seconds until the kernel sends a probe, seconds between
    probes, and probes that may fail; seconds that bytes sent may stay unacknowledged."""

    idle_seconds: int
    probe_seconds: int
    probes: int
    unacknowledged_seconds: int | None = None


PEERS = Silence(60, 20, 3)
"""Agents: after two minutes. A wait for a peer has a limit of its own."""
LEADERS = Silence(60, 30, 20)
"""Node leaders: a firewall forgets connections that are silent for some minutes, as in an
evaluation; a machine that stands still for some minutes is not gone."""
JOB = Silence(5, 2, 5, 15)
"""`tierckpt run`: after 15 s, as by torchrun."""


def tend(sock: socket.socket, silence: Silence) -> None:
    """Send small messages at once, and notice a silent machine. Nothing for a Unix socket, or one
    that the other side has closed already."""
    options = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: silence.idle_seconds,
        socket.TCP_KEEPINTVL: silence.probe_seconds,
        socket.TCP_KEEPCNT: silence.probes,
    }
    if silence.unacknowledged_seconds is not None:
        options[socket.TCP_USER_TIMEOUT] = 1000 * silence.unacknowledged_seconds
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
