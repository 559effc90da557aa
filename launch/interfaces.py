"""IPv4 interfaces of this host, and detection of interfaces that reach no other host.

A bridge of Docker (docker0, 172.17.0.1/16) or libvirt connects containers and virtual machines of one
host, and has the same address on every host.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_SYSFS = Path("/sys/class/net")
_LINK_LOCAL = "169.254."  # not routed; on many servers, the interface to the BMC has such an address


class Interface(NamedTuple):
    """An address of an interface."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Return the IPv4 addresses of this host, without loopback."""
    import psutil

    return [
        Interface(name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]


def is_local(interface: Interface, sysfs: Path = _SYSFS) -> bool:
    """Return whether no other host is behind an interface."""
    if interface.address.startswith(_LINK_LOCAL):
        return True
    folder = sysfs / interface.name
    if not (folder / "bridge").is_dir():
        return False
    with contextlib.suppress(OSError):
        return all(_is_inner(sysfs / port.name) for port in (folder / "brif").iterdir())
    return False


def _is_inner(port: Path) -> bool:
    """Return whether a bridge's port leads to a container (veth) or to a virtual machine (tap)."""
    if (port / "tun_flags").exists():
        return True
    lower = [*port.glob("lower_*"), *port.glob("device")]
    # Only a veth has no lower device and another index at its other end, unlike a VLAN, a bond or a tunnel.
    return not lower and _number(port / "iflink") != _number(port / "ifindex")


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


def own_addresses(own: Sequence[Interface] | None = None) -> tuple[str, ...]:
    """Return this host's addresses that other hosts may reach. The address of its name is the first."""
    named = ""
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
    own = sorted(interfaces() if own is None else own, key=lambda one: (one.address != named, is_local(one)))
    return tuple(one.address for one in own)
