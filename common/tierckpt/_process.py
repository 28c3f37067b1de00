"""This process: its machine, and pauses of its garbage collector.

Light: standard library only, as agents use it, too. Any thread.

Python's collector runs after so many new objects, and looks at all that there are each time. While
a list of 80,000 tensors is made, that takes longer than the list; `collector_paused` stops it
meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import re
import socket
from collections.abc import Iterator
from pathlib import Path

__all__ = ["boot_id", "collector_paused", "host_id", "host_name", "process_stat"]


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


def process_stat(process: str | int) -> list[str]:
    """The fields of /proc/PID/stat after the process's name, see proc(5): state, parent, group, ...
    `process` is a number or `self`. Raises OSError if the process is gone."""
    # The name, in brackets, may contain any character.
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Context without automatic collections, for code that makes no garbage in cycles. Any thread;
    contexts may be nested."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
