"""Halt texts: the signals and notices that end a job, from their settings."""

from __future__ import annotations

import re
import signal
from urllib.parse import urlsplit

from tierckpt.errors import ConfigError

CLOUDS = ("aws", "gcp", "azure")
"""Clouds with notices that they take a machine away; see `halt.preemption`."""


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Signals from their names, `SIGTERM,SIGUSR1`. Raises ConfigError."""
    found = []
    for name in filter(None, (part.strip().upper() for part in text.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(
                f"halt_signals: {name!r} is not a signal that can be handled; give names, for "
                "example SIGTERM,SIGUSR1, or nothing"
            )
        found.append(number)
    return tuple(found)


def parse_notices(text: str) -> tuple[str, str]:
    """Cloud and address of its metadata service from `halt_notices`; each is empty if not given.
    Raises ConfigError."""
    name, _, endpoint = text.strip().partition(" ")
    endpoint = endpoint.strip()
    if name and name not in CLOUDS:
        raise ConfigError(
            f"halt_notices is {text!r}; valid is one of {', '.join(CLOUDS)}, perhaps with the "
            "address of its metadata service ('aws http://127.0.0.1:1338'); or nothing"
        )
    if endpoint and not _is_address(endpoint):
        raise ConfigError(
            f"halt_notices is {text!r}; the address of the metadata service must be like "
            "http://127.0.0.1:1338"
        )
    return name, endpoint


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        more = parts.query or parts.fragment or parts.username or re.search(r"\s", text)
        return parts.scheme == "http" and bool(parts.hostname) and parts.port != 0 and not more
    except ValueError:  # no port
        return False


__all__ = ["CLOUDS", "parse_notices", "parse_signals"]
