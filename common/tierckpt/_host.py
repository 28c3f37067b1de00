"""Names of machines. Light, as agents use them, too."""

from __future__ import annotations

import re
import socket


def boot_id() -> str:
    """The id of this machine's last boot; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def host_id(node: str = "") -> str:
    """The id of this node: its name (default: the host's) and its boot; a reboot makes another
    node."""
    return f"{node or socket.gethostname()}/{boot_id()}"


def host_name(host: str) -> str:
    """The name for people: a `host_id` without the boot; any other text unchanged."""
    return re.sub(r"/([0-9a-f]{8}-[0-9a-f-]{27})?$", "", host)


__all__ = ["boot_id", "host_id", "host_name"]
