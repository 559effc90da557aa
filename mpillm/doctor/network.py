"""Between nodes: names, addresses and ports, clocks, latency and bandwidth of MPI."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch.interfaces import own_addresses
from mpillm.doctor.findings import Line, Place, Status, Verdict, World, by_verdict, check

ALL_PAIRS = 8  # nodes; more are measured in a ring
_CONNECT_S = 1.5
_CLOCK_S = 0.5
_SLOW = 0.5  # of the median of all pairs
_LEAST_RATE = 100e6  # bytes per second between nodes
_KEY_BYTES = 16
_PAUSE_S = 0.1

Hosts = Mapping[int, "HostFacts"]


class HostFacts(NamedTuple):
    """A rank's host, as others may reach it."""

    name: str
    unresolved: str  # why its own name has no address; "" if it has one
    addresses: tuple[str, ...]
    port: int  # where this rank listens; 0: nowhere
    problem: str  # why not
    key: bytes  # who connects there is sent this
    namespace: str  # of its network


class Reached(NamedTuple):
    """Who tried to connect to a host found this."""

    good: tuple[str, ...]  # addresses
    bad: tuple[str, ...]  # addresses, with the reason


class LinkFound(NamedTuple):
    """What two ranks measured. `problem`: why not, then the rest means nothing."""

    latency_s: float  # of one way
    bytes_per_s: float
    offset_s: float  # their clock less ours
    problem: str = ""


class Listener:
    """Sends its key to whoever connects, until the process ends."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(_KEY_BYTES)
        self.port, self.problem = 0, ""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            self._socket = socket.create_server(
                ("", 0), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
            )
        except OSError as error:
            self.problem = error.strerror or str(error)
            return
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="mpillm-doctor-port", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                with self._socket.accept()[0] as connection:
                    connection.sendall(self.key)
            except OSError:  # the caller has gone by now, or no file descriptor is left
                time.sleep(_PAUSE_S)


def host_facts(listener: Listener) -> HostFacts:
    """Resolve this host's name, list its addresses."""
    name, unresolved = socket.gethostname(), ""
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        unresolved = error.strerror or str(error)
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.fspath(Path("/proc/self/ns/net").readlink())
    addresses = own_addresses()
    return HostFacts(name, unresolved, addresses, listener.port, listener.problem, listener.key, namespace)


def reach(there: HostFacts) -> Reached:
    """Try to connect to each address of a host, all at the same time; takes at most a few seconds."""
    found: dict[str, str] = {}

    def attempt(address: str) -> None:
        try:
            with socket.create_connection((address, there.port), _CONNECT_S) as connection:
                connection.settimeout(_CONNECT_S)
                received = connection.recv(_KEY_BYTES, socket.MSG_WAITALL)
            found[address] = "" if received == there.key else "somebody else answers there"
        except OSError as error:
            found[address] = error.strerror or str(error)

    threads = [threading.Thread(target=attempt, args=(address,), daemon=True) for address in there.addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _CONNECT_S)
    told = {address: found.get(address, "no answer") for address in there.addresses}
    return Reached(
        tuple(address for address, problem in told.items() if not problem),
        tuple(f"{address} ({problem})" for address, problem in told.items() if problem),
    )


def rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return which ranks measure at the same time, the lower one first; `nodes`: one rank of each, ascending.

    Every pair of up to ALL_PAIRS (the circle method: one stays, the others turn), of more each with the next.
    """
    n = len(nodes)
    if n < 2:
        return []
    if n > ALL_PAIRS:
        ring = [(nodes[i], nodes[i + 1]) for i in range(n - 1)] + [(nodes[0], nodes[-1])]
        last = [[ring[-1]]] if n % 2 else []
        even = ring[: n - n % 2]
        return [even[0::2], even[1::2], *last]
    seats: list[int | None] = [*nodes, *([None] if n % 2 else [])]
    half, made = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        made.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return made


# --- checks ---


@check("host names", of_nodes=True)
def names(facts: HostFacts, _: Place) -> Verdict:
    """Each host must find its own name: MPI libraries and Gloo ask for it."""
    if facts.unresolved:
        return Verdict(
            Status.WARNING,
            f"{facts.name} has no address: {facts.unresolved}",
            "add it to DNS or /etc/hosts",
        )
    return Verdict(Status.OK, "each host finds its own name")


@check("ports")
def ports(facts: HostFacts, _: Place) -> Verdict:
    """Ranks open ports that the system chooses."""
    if not facts.port:
        return Verdict(Status.FAILURE, f"none could be opened: {facts.problem}", "ask who forbids it")
    return Verdict(Status.OK, "can be opened")


def namespaces(hosts: Hosts, world: World) -> list[Line]:
    """Ranks of a node wake each other over its network namespace."""
    apart = [
        node
        for node, first in world.first_ranks().items()
        if any(
            hosts[r].namespace != hosts[first].namespace for r, other in world.nodes.items() if other == node
        )
    ]
    if not apart:
        return []
    return [
        Line(
            "doorbells",
            Status.WARNING,
            f"ranks of {', '.join(apart)} are in different network namespaces: they poll when idle",
            "run the ranks of a node in one container, or with the host's network",
        )
    ]


CHECKS = (names, ports, namespaces)


def reached_line(reached: Mapping[int, Reached | None], world: World) -> list[Line]:
    """`reached`: of rank 0, by the first ranks of the other nodes; None: no answer."""

    def verdict(found: Reached | None) -> Verdict:
        if found is None:
            return Verdict(Status.FAILURE, "no answer", "look at that rank")
        if not found.good:
            return Verdict(
                Status.WARNING,
                f"rank 0 can't be reached over TCP at {', '.join(found.bad) or 'any address'}",
                "open the firewall between the nodes, or name the interfaces (OMPI_MCA_btl_tcp_if_include);"
                " otherwise lost ranks are found by missing heartbeats only",
            )
        ignored = f"; not at {', '.join(found.bad)}" if found.bad else ""
        return Verdict(Status.OK, f"rank 0 is reached at {', '.join(found.good)}{ignored}")

    return by_verdict("addresses", {rank: verdict(found) for rank, found in reached.items()})


def clock_lines(found: Mapping[int, LinkFound], world: World) -> list[Line]:
    """`found`: rank 0's clock against that of each other node's first rank."""
    good = {rank: link for rank, link in found.items() if not link.problem}
    if not good:
        return []
    figures = {"offsets_s": {world.nodes[rank]: round(link.offset_s, 6) for rank, link in good.items()}}
    rank = max(good, key=lambda rank: abs(good[rank].offset_s))
    offset, trip = good[rank].offset_s, 2 * good[rank].latency_s
    told = f"at most {abs(offset) * 1e3:.3g} ms apart ({world.nodes[rank]}, round trip {trip * 1e3:.2g} ms)"
    if abs(offset) < _CLOCK_S:
        return [Line("clocks", Status.OK, told, "", (), figures)]
    return [
        Line("clocks", Status.WARNING, told, "times in logs don't agree: start NTP or chrony", (), figures)
    ]


def link_lines(
    check: str, found: Mapping[tuple[int, int], LinkFound], world: World, least_rate: float = _LEAST_RATE
) -> list[Line]:
    """One line for all pairs that answered, with the slowest, and one for each that did not."""
    lines = []
    good = {pair: link for pair, link in found.items() if not link.problem}

    def title(pair: tuple[int, int]) -> str:
        a, b = (world.nodes[rank] for rank in pair)
        return f"{a}-{b}" if a != b else f"ranks {pair[0]} and {pair[1]} of {a}"

    if good:
        rates = [link.bytes_per_s for link in good.values()]
        latencies = [link.latency_s * 1e6 for link in good.values()]
        slow = [pair for pair, link in good.items() if link.bytes_per_s < _SLOW * statistics.median(rates)]
        told = f"{span(latencies, '.3g')} us, {span([rate / 1e9 for rate in rates], '.2g')} GB/s"
        told += f" ({len(good)} pair{'s' if len(good) > 1 else ''})"
        status, advice = Status.OK, ""
        if slow:
            status = Status.WARNING
            told += f"; far slower than the others: {', '.join(map(title, slow[:8]))}"
            advice = "look at those nodes' network cards, cables and drivers"
        elif min(rates) < least_rate:
            status = Status.WARNING
            advice = "is it the right network? Open MPI: --mca btl_tcp_if_include, UCX: UCX_NET_DEVICES"
        lines.append(Line(check, status, told, advice, (), _figures(good, world)))
    for pair, link in found.items():
        if link.problem:
            lines.append(
                Line(check, Status.FAILURE, f"{title(pair)}: {link.problem}", "look at that node", pair)
            )
    return lines


def span(values: Sequence[float], form: str) -> str:
    """``3``, ``3 to 5``"""
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def _figures(found: Mapping[tuple[int, int], LinkFound], world: World) -> dict[str, Any]:
    return {
        "pairs": [
            {
                "ranks": list(pair),
                "nodes": [world.nodes[rank] for rank in pair],
                "latency_s": round(link.latency_s, 9),
                "bytes_per_s": round(link.bytes_per_s),
            }
            for pair, link in found.items()
        ]
    }
