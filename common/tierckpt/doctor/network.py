"""Network: the interface that agents of other nodes would reach, its speed, and faster ones."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierckpt.errors import ConfigError
from tierckpt.peer.address import address_of, own_host

from .finding import Finding, Subject, absent, cross, good, warning

ELSEWHERE = ("203.0.113.1", "2001:db8::1")
"""Addresses of no machine (RFC 5737, RFC 3849): the route there is the default route. Nothing is
sent."""
_LOOPBACK_TYPE, _INFINIBAND_TYPE = "772", "32"
"""Values of `type`, from <linux/if_arp.h>."""
FAST_MBITS = 25_000
"""An interface that is faster than most whose speed is unknown (a virtual machine's)."""


@dataclass(frozen=True)
class Interface:
    """One network interface, as /sys/class/net shows it."""

    name: str
    address: str
    """Empty if it has none that peers could use."""
    mbits: int | None
    """Speed in Mbit/s; None: unknown."""
    is_up: bool
    is_real: bool
    """A device, a bond or a VLAN; not a bridge or a container's end of a cable."""
    is_infiniband: bool

    @property
    def speed(self) -> str:
        """Speed in words."""
        if self.mbits is None:
            return "speed unknown"
        gbits = self.mbits / 1000
        return f"{gbits:g} Gbit/s" if gbits >= 1 else f"{self.mbits} Mbit/s"


def interfaces(root: Path = Path("/")) -> list[Interface]:
    """All interfaces of this network namespace, except loopback. `root` is the root of /sys."""
    names = [name for _, name in socket.if_nameindex()]
    found = [_interface(name, root / "sys/class/net" / name) for name in names]
    return [each for each in found if each is not None]


def _interface(name: str, folder: Path) -> Interface | None:
    kind = _read(folder / "type")
    if kind == _LOOPBACK_TYPE or name == "lo":
        return None
    speed = _read(folder / "speed")
    device_type = re.search(r"^DEVTYPE=(\w+)", _read(folder / "uevent"), re.MULTILINE)
    is_virtual = "virtual" in folder.resolve().parts
    return Interface(
        name,
        _address(name),
        int(speed) if speed.isdigit() and speed != "0" else None,  # -1: unknown
        _read(folder / "operstate") == "up",
        not is_virtual or (device_type is not None and device_type[1] in ("bond", "vlan")),
        kind == _INFINIBAND_TYPE,
    )


def _address(name: str) -> str:
    try:
        return address_of(name)
    except (ConfigError, OSError):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def interface(subject: Subject) -> Iterator[Finding]:
    """The interface of the peer level, as its agents choose it, and a faster one."""
    try:
        host = _own_host(subject)
    except ConfigError as error:
        needed = subject.config.uses("peer") or subject.nodes > 1
        kind = cross if needed else absent
        yield kind("interface", str(error).partition(";")[0], "connect this node to a network")
        return
    found = interfaces(subject.root)
    ours = next((each for each in found if each.address == host), None)
    if ours is None and _is_loopback(host):
        yield _loopback(subject, host, found)
        return
    text = f"peers use {host}" + (f" on {ours.name}, {ours.speed}" if ours else "")
    faster = [each for each in found if ours is not None and _is_faster(each, ours)]
    if faster and not subject.config.peer.interface:
        best = max(faster, key=lambda each: each.mbits or 0)
        kind_name = "Infiniband" if best.is_infiniband else "an interface"
        text = f"{text}; {best.name} is up, {kind_name} of {best.speed}"
        cure = f"if it leads to all nodes: TIERCKPT_PEER_INTERFACE={best.name}"
        yield warning("interface", text, cure)
    else:
        chosen = " (peer_interface)" if subject.config.peer.interface else ""
        yield good("interface", f"{text}{chosen}")


def _own_host(subject: Subject) -> str:
    """The address that this node's agent would listen at. Raises ConfigError."""
    chosen = subject.config.peer.interface
    if chosen or subject.towards:
        return own_host(chosen, subject.towards or "localhost")
    try:
        return own_host("", ELSEWHERE[0])
    except ConfigError as error:
        try:
            return own_host("", ELSEWHERE[1])
        except ConfigError:
            raise error from None


def _loopback(subject: Subject, host: str, found: list[Interface]) -> Finding:
    usable = [each for each in found if each.is_up and each.address]
    text = f"other nodes cannot reach {host}"
    if not usable:
        return cross("interface", text, "connect this node to a network")
    best = max(usable, key=lambda each: (each.is_real, each.mbits or 0))
    return cross("interface", text, f"set TIERCKPT_PEER_INTERFACE={best.name}")


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _is_faster(other: Interface, ours: Interface) -> bool:
    if not (other.is_up and other.is_real and other.address) or other.name == ours.name:
        return False
    if ours.mbits is None:
        return (other.mbits or 0) >= FAST_MBITS
    return (other.mbits or 0) > ours.mbits


def infiniband(subject: Subject) -> Iterator[Finding]:
    """Infiniband ports that are active but have no network interface with an address: the peer
    level speaks TCP."""
    names = {each.name for each in interfaces(subject.root) if each.is_up and each.address}
    for port in sorted((subject.root / "sys/class/infiniband").glob("*/ports/*")):
        if "ACTIVE" not in _read(port / "state") or "thernet" in _read(port / "link_layer"):
            continue
        device = port.parents[1]
        if not names & {each.name for each in (device / "device/net").glob("*")}:
            text = f"{device.name} is active ({_read(port / 'rate')}), without an IP address"
            cure = "give its interface an address (IPoIB): modprobe ib_ipoib"
            yield warning("infiniband", text, cure)
