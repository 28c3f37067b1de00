"""Where an agent listens for its peers."""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass

from ..errors import ConfigError

_SIOCGIFADDR = 0x8915
_SOME_PORT = 9
"""For a datagram socket that sends nothing; any would do."""


@dataclass(frozen=True, order=True)
class Address:
    """Host (a name or a numeric address, IPv4 or IPv6) and TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def own_host(interface: str = "", towards: str = "localhost") -> str:
    """The numeric address to listen at.

    `interface` is what the user set: the name of a network interface (its IPv4 address is taken),
    or an address or host name of this machine. Empty: the address from which this machine reaches
    the host `towards`, where the job's ranks meet. Nothing is sent.

    Raises ConfigError when there is no such interface, or no way to that host.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface in names:
        return _address_of(interface)
    family, kind, protocol, _, where = _look_up(interface or towards, names if interface else [])
    with socket.socket(family, kind, protocol) as probe:
        try:
            if interface:
                probe.bind((*where[:1], 0, *where[2:]))
            else:
                probe.connect(where)
        except OSError as error:
            what = f"{interface!r} is no address of this machine" if interface else towards
            raise ConfigError(
                f"cannot find an address for the agents to meet at: {what}: {error}; "
                f"set the interface, one of {', '.join(names)}, or an address"
            ) from error
        return str(probe.getsockname()[0])


def _look_up(host: str, names: list[str]) -> tuple[int, int, int, str, tuple]:  # type: ignore[type-arg]
    try:
        return socket.getaddrinfo(host, _SOME_PORT, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        valid = f"; the interfaces here are {', '.join(names)}" if names else ""
        raise ConfigError(f"{host!r} is no interface and no known host: {error}{valid}") from error


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError as error:
            raise ConfigError(
                f"the interface {interface!r} has no IPv4 address ({error}); set an address instead"
            ) from error
    return socket.inet_ntoa(answer[20:24])
