"""Names of machines. Light: agents need them, too."""

from __future__ import annotations

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


__all__ = ["boot_id", "host_id"]
