"""The address where a process listens for others, and this machine's own towards another."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

from tierckpt._process import boot_id
from tierckpt.errors import ConfigError
from tierckpt.format.ids import Name

__all__ = ["Address", "address_of", "own_host", "own_network"]

_SIOCGIFADDR = 0x8915
_NOT_IN_USE = 0x68
"""Flags of an IPv6 address: tentative, deprecated, or a duplicate of another machine's."""
_SOME_PORT = 9
"""Port of a datagram socket that sends nothing; any port would do."""


class Address(Name, frozen=True):
    """Host (a name or a numeric address, IPv4 or IPv6) and TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True when only this machine can reach the address. The host must be numeric."""
        return ipaddress.ip_address(self.host).is_loopback


def own_network() -> str:
    """Name of the network namespace of this process. A loopback address reaches the processes of
    the same namespace and no others: each container on a machine has its own loopback."""
    try:
        place = os.readlink("/proc/self/ns/net")
    except OSError:
        place = socket.gethostname()
    return f"{boot_id() or socket.gethostname()}/{place}"


def own_host(interface: str = "", towards: str = "localhost") -> str:
    """Numeric address for the agent to listen at.

    `interface` is the user's setting: the name of a network interface (its IPv4 address is taken,
    or else its global IPv6 address), or an address or host name of this machine. Empty: the address
    from which this machine reaches the host `towards`, where the job's ranks meet. Nothing is sent.

    Raises ConfigError when there is no such interface, no route to that host, or when other nodes
    could not use the address.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface in names:
        return address_of(interface)
    advice = f"set peer_interface to one of {', '.join(names)}, or an address"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            interface or towards, _SOME_PORT, type=socket.SOCK_DGRAM
        )[0]
    except OSError as error:
        subject = (
            f"peer_interface={interface!r} is no interface and" if interface else f"{towards!r} is"
        )
        raise ConfigError(f"{subject} no known host: {error}; {advice}") from error
    if interface:
        _refuse_unusable(str(where[0]), advice)
    with socket.socket(family, kind, protocol) as probe:
        try:
            if interface:
                probe.bind((*where[:1], 0, *where[2:]))
            else:
                probe.connect(where)
        except OSError as error:
            subject = f"{interface!r} is no address of this machine" if interface else towards
            raise ConfigError(
                f"cannot find an address for the agents to meet at: {subject}: {error}; {advice}"
            ) from error
        found = str(probe.getsockname()[0])
    _refuse_unusable(found, advice)
    return found


def _refuse_unusable(host: str, advice: str) -> None:
    """Raise ConfigError for an address at which other machines could not find this one."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        raise ConfigError(
            f"{host} stands for all addresses; other nodes need a single one; {advice}"
        )
    if address.version == 6 and address.is_link_local:
        raise ConfigError(
            f"{host} is a link-local address, which means nothing to other machines; {advice}"
        )


def address_of(interface: str) -> str:
    """The interface's IPv4 address, or else its global IPv6 address. Raises ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError as error:
            if found := _global_ipv6(interface):
                return found
            raise ConfigError(
                f"peer_interface={interface!r} has neither an IPv4 nor a global IPv6 address "
                f"({error}); set another one, or an address"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _global_ipv6(interface: str) -> str:
    """The interface's first usable global IPv6 address; empty without one."""
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, scope, flags, name = line.split()
            if name == interface and scope == "00" and not int(flags, 16) & _NOT_IN_USE:
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return ""
