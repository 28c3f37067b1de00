"""Names of machines. Light: agents need them, too."""

from __future__ import annotations

import re
import socket


def boot_id() -> str:
    """Of this machine since it was last switched on; empty where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def host_id(node: str = "") -> str:
    """This node: its name (the host's if none is given), and the boot: a reboot is another one."""
    return f"{node or socket.gethostname()}/{boot_id()}"


def host_name(host: str) -> str:
    """For people: what `host_id` made without the boot; anything else as it is."""
    return re.sub(r"/([0-9a-f]{8}-[0-9a-f-]{27})?$", "", host)


__all__ = ["boot_id", "host_id", "host_name"]
