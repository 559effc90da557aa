"""Check whether the hosts of started ranks can reach each other at ports like MPI's.

If a firewall separates ranks, MPI_Init waits, or fails without the name of a host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from disagg import rank_list
from launch.interfaces import Interface, interfaces
from launch.liveness_server import unreachable
from launch.openmpi_tcp import explain_disconnection
from launch.safe_text import whole_number

_MAX_TRIES = 256  # ports


class Port(NamedTuple):
    """Port at which a rank listens while MPI starts. If it cannot be reached, MPI's ports cannot either."""

    rank: int
    host: str
    address: str
    port: int
    interfaces: str = ""  # of the rank's host, such as docker0=172.17.0.1,eth0=10.0.0.1


FIREWALL = "is there a firewall between the nodes?"
_NOT_CONNECTED = "all ranks have started, and this host reaches the others, but MPI does not connect them"
_MAY_BE_STOPPED = (
    "a rank or a daemon of mpirun may be stopped or hang on another host (state T of `ps -eo pid,stat,args`"
    " there), or two other hosts may not reach each other"
)


def unreachable_ranks(ports: Sequence[Port], host: str) -> str:
    """Try to reach the first rank of each other host; return the hosts that this `host` cannot reach, or "".

    If a host does not answer, this takes some seconds.
    """
    firsts = {one.host: one for one in reversed(ports) if one.host != host and one.port}
    problems = unreachable({one.rank: (one.address, one.port) for one in firsts.values()})
    bad = [one for one in firsts.values() if one.rank in problems]
    if not bad:
        return ""
    hosts = {one.rank: one.host for one in ports}
    ranks = [rank for rank, name in hosts.items() if name in {one.host for one in bad}]
    first = min(bad)
    why = f"{first.address} port {first.port}: {problems[first.rank]}"
    return f"{rank_list(ranks, hosts)} can't be reached from {host} ({why})"


def explain_separation(
    unreachable_hosts: str, ports: Sequence[Port], env: Mapping[str, str] = os.environ
) -> str:
    """Return why started ranks are not connected.

    `unreachable_hosts`: result of `unreachable_ranks` in the launcher.
    """
    return find_separation(unreachable_hosts, ports, env) or f"{_NOT_CONNECTED}: {_MAY_BE_STOPPED}"


def find_separation(
    unreachable_hosts: str, ports: Sequence[Port], env: Mapping[str, str] = os.environ
) -> str:
    """Do as `explain_separation`, but return "" if no reason is known. `ports`: empty if unknown."""
    problems = [*filter(None, [unreachable_hosts, unreachable_ranks(ports, socket.gethostname())])]
    if problems:
        return f"all ranks have started, but {'; '.join(problems)}: {FIREWALL} {_ports_needed(env)}"
    of_hosts = {one.host: _parse_interfaces(one.interfaces) for one in ports}
    why = explain_disconnection(interfaces(), of_hosts, env) if _openmpi(env) else ""
    head = _NOT_CONNECTED if ports else "MPI does not connect this host and others"
    return f"{head}: {why}" if why else ""


def _parse_interfaces(text: str) -> list[Interface]:
    """Parse `Port.interfaces`, whose end may be cut off."""
    pairs = (entry.partition("=") for entry in text.split(","))
    return [Interface(name, address) for name, _, address in pairs if _is_address(address)]


def _is_address(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv4Address(text))
    return False


def explain_missing_ranks(
    here: Sequence[int], n_here: int | None, size: int | None, env: Mapping[str, str] = os.environ
) -> str:
    """Return which ranks may be missing, without the launcher's list of started ranks.

    Args:
        here: the ranks that run on this host.
        n_here: the number of ranks that should run on this host; None if unknown.
        size: the number of ranks in the world; None if unknown.
        env: environment of this rank.
    """
    missing = "a rank has not started, or can't be reached"
    if size is not None and len(here) == n_here:
        others = sorted(set(range(size)) - {*here})
        if not others:
            return missing
        if separation := find_separation("", [], env):
            return separation
        has = "has" if len(others) == 1 else "have"
        missing = f"{rank_list(others)}, on other hosts, {has} not started, or can't be reached"
    return f"{missing}: {FIREWALL} {_ports_needed(env)}; `python -m mpillm mpirun` reports details"


def _ports_needed(env: Mapping[str, str]) -> str:
    """Describe the ports that MPI listens at."""
    if _openmpi(env):
        first, last = _openmpi_ports(env)
        return (
            f"Open MPI's TCP listens at {first}-{last} (OMPI_MCA_btl_tcp_port_min_v4 and"
            " OMPI_MCA_btl_tcp_port_range_v4 change them)"
        )
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return "MPI listens at ports that the system chooses"
    return (
        f"MPI listens at {first}-{last}, of which the system chooses (UCX: UCX_TCP_PORT_RANGE changes them)"
    )


def _openmpi(env: Mapping[str, str]) -> bool:
    return "OMPI_COMM_WORLD_RANK" in env


def _openmpi_ports(env: Mapping[str, str]) -> tuple[int, int]:
    """Return the first and the last port at which Open MPI's TCP transport may listen."""
    first, n = (
        other if (port := whole_number(env.get(f"OMPI_MCA_btl_tcp_port_{name}_v4", ""))) is None else port
        for name, other in (("min", 1024), ("range", 65535))
    )
    return first, min(first + n - 1, 65535)


def listen_as_mpi(env: Mapping[str, str]) -> socket.socket | None:
    """Listen as MPI does; return None if that is not possible.

    The kernel accepts connections even while the process is in MPI_Init.
    """
    first, last = _openmpi_ports(env) if _openmpi(env) else (0, 0)
    for port in range(first, min(last, first + _MAX_TRIES) + 1):
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=128)
    return None
