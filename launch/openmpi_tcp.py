"""The interfaces of Open MPI's TCP transport, and diagnosis of failed connections between hosts.

All hosts with Docker have one address in common. If ranks use this address, they connect to processes of
their own host, and MPI_Init does not return.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.interfaces import Interface, is_local

_INCLUDE, _EXCLUDE, _BTL = "btl_tcp_if_include", "btl_tcp_if_exclude", "btl"
_DEFAULT_EXCLUDE = "127.0.0.1/8,sppp"  # Open MPI's default, which a set value replaces
_LOOPBACK = Interface("lo", "127.0.0.1")
_MAX_HOSTS = 4  # in a message
_FILES = ("~/.openmpi/mca-params.conf", "/etc/openmpi/openmpi-mca-params.conf")


def parameter(name: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the user's value of one of Open MPI's parameters, from the environment or a file; "" if unset.

    mpirun passes its option --mca in the environment.
    """
    if f"OMPI_MCA_{name}" in env:
        return env[f"OMPI_MCA_{name}"].strip()
    prefix = env.get("OPAL_PREFIX", "")
    files = [*_FILES, *([f"{prefix}/etc/openmpi-mca-params.conf"] if prefix else [])]
    for file in files:
        try:
            lines = Path(file).expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
        except (OSError, RuntimeError):  # no such file, or no home directory
            continue
        for line in lines:
            key, equals, value = line.partition("=")
            if equals and key.strip() == name:
                return value.strip()
    return ""


def exclusion(own: Sequence[Interface], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable that excludes interfaces without a route to other hosts from Open MPI's TCP.

    Empty if the user has chosen interfaces, and if no interface or every interface would be excluded.
    """
    local = list(dict.fromkeys(one.name for one in own if is_local(one)))
    others = [one for one in own if one.name not in local]
    if not local or not others or parameter(_INCLUDE, env) or parameter(_EXCLUDE, env):
        return {}
    return {f"OMPI_MCA_{_EXCLUDE}": ",".join([_DEFAULT_EXCLUDE, *local])}


def explain_disconnection(
    own: Sequence[Interface], of_hosts: Mapping[str, Sequence[Interface]], env: Mapping[str, str] = os.environ
) -> str:
    """Return why Open MPI's TCP does not connect hosts that reach each other; "" if no reason is known.

    `of_hosts`: the known addresses of each host. This host's settings are assumed for all hosts.
    """
    if problem := _wrong_setting(own, env):
        return problem
    env = {**env, **exclusion(own, env)}
    for address, hosts in _shared(of_hosts).items():
        used = [one for host in hosts for one in of_hosts[host] if one.address == address and _uses(one, env)]
        if len(used) > 1:
            names = list(dict.fromkeys(one.name for one in used))
            where = f"{address} ({', '.join(names)}) is an address of {' and of '.join(hosts[:_MAX_HOSTS])}"
            return f"{where}, and Open MPI's TCP uses it; {_remedy(names, own, env)}"
    return ""


def _wrong_setting(own: Sequence[Interface], env: Mapping[str, str]) -> str:
    transports = parameter(_BTL, env)
    if transports and ("tcp" in transports.removeprefix("^").split(",")) == transports.startswith("^"):
        return f"OMPI_MCA_{_BTL}={transports} leaves out tcp, which connects hosts; add tcp, or unset it"
    included, excluded = parameter(_INCLUDE, env), parameter(_EXCLUDE, env)
    if included and not any(_matches(one, included) for one in own):
        available = ", ".join(f"{one.name} ({one.address})" for one in own) or "none"
        return (
            f"OMPI_MCA_{_INCLUDE}={included} names no interface that leads to other hosts; there are:"
            f" {available}"
        )
    if excluded and not _matches(_LOOPBACK, excluded):
        return (
            f"OMPI_MCA_{_EXCLUDE}={excluded} replaces Open MPI's default {_DEFAULT_EXCLUDE}, so TCP uses the"
            f" loopback interface; set OMPI_MCA_{_EXCLUDE}={_DEFAULT_EXCLUDE},{excluded}"
        )
    return ""


def _remedy(names: Sequence[str], own: Sequence[Interface], env: Mapping[str, str]) -> str:
    """Return the setting that excludes the interfaces `names` from Open MPI's TCP."""
    if not parameter(_INCLUDE, env):
        return f"set OMPI_MCA_{_EXCLUDE}={','.join([parameter(_EXCLUDE, env) or _DEFAULT_EXCLUDE, *names])}"
    others = list(dict.fromkeys(one.name for one in own if one.name not in names and not is_local(one)))
    return f"set OMPI_MCA_{_INCLUDE} to one that leads to other hosts: {', '.join(others) or 'none'}"


def _shared(of_hosts: Mapping[str, Sequence[Interface]]) -> dict[str, list[str]]:
    """Return the addresses that several hosts have, with the names of these hosts."""
    hosts: dict[str, list[str]] = {}
    for host, own in of_hosts.items():
        for address in {one.address for one in own}:
            hosts.setdefault(address, []).append(host)
    return {address: names for address, names in sorted(hosts.items()) if len(names) > 1}


def _uses(one: Interface, env: Mapping[str, str]) -> bool:
    if included := parameter(_INCLUDE, env):
        return _matches(one, included)
    return not _matches(one, parameter(_EXCLUDE, env))


def _matches(one: Interface, pattern: str) -> bool:
    """Return whether Open MPI's list of names and networks names an interface."""
    for entry in filter(None, (entry.strip() for entry in pattern.split(","))):
        if entry == one.name:
            return True
        try:
            network = ipaddress.ip_network(entry, strict=False)
        except ValueError:  # `entry` is a name
            continue
        if ipaddress.ip_address(one.address) in network:
            return True
    return False
