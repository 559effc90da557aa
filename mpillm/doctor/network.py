"""Checks between nodes: names, addresses and ports, clocks, latency and bandwidth of MPI."""

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
from mpillm.doctor.findings import Line, RankCounts, Status, Verdict, World, by_verdict, check

ALL_PAIRS = 8  # nodes; a larger cluster is measured in a ring
_CONNECT_S = 1.5
_CLOCK_S = 0.5
_SLOW = 0.5  # of the median of all pairs
_MIN_RATE = 100e6  # bytes per second between nodes
_KEY_BYTES = 16
_PAUSE_S = 0.1

Hosts = Mapping[int, "HostFacts"]


class HostFacts(NamedTuple):
    """Names and addresses of a rank's host."""

    name: str
    unresolved: str  # why the host cannot resolve its own name; "" if it can
    addresses: tuple[str, ...]
    port: int  # where this rank listens; 0: it does not
    problem: str  # why it does not listen
    key: bytes  # sent to each connection to `port`
    namespace: str  # of its network


class Reachability(NamedTuple):
    """Addresses of a host at which another rank can, or cannot, connect to it."""

    good: tuple[str, ...]  # addresses
    bad: tuple[str, ...]  # addresses, with the reason


class LinkMeasurement(NamedTuple):
    """Measurement of a link between two ranks; invalid if there is a `problem`."""

    latency_s: float  # one way
    bytes_per_s: float
    offset_s: float  # partner's clock minus own clock
    problem: str = ""


class KeyServer:
    """Sends its key to each connection, until the process exits."""

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
            except OSError:  # the peer has disconnected, or no file descriptor is left
                time.sleep(_PAUSE_S)


def host_facts(listener: KeyServer) -> HostFacts:
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


def reach(host: HostFacts) -> Reachability:
    """Connect to all addresses of a host simultaneously; takes at most a few seconds."""
    problems: dict[str, str] = {}

    def attempt(address: str) -> None:
        try:
            with socket.create_connection((address, host.port), _CONNECT_S) as connection:
                connection.settimeout(_CONNECT_S)
                received = connection.recv(_KEY_BYTES, socket.MSG_WAITALL)
            problems[address] = "" if received == host.key else "somebody else answers there"
        except OSError as error:
            problems[address] = error.strerror or str(error)

    threads = [threading.Thread(target=attempt, args=(address,), daemon=True) for address in host.addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _CONNECT_S)
    outcomes = {address: problems.get(address, "no answer") for address in host.addresses}
    return Reachability(
        tuple(address for address, problem in outcomes.items() if not problem),
        tuple(f"{address} ({problem})" for address, problem in outcomes.items() if problem),
    )


def rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs that measure simultaneously, the lower rank first.

    Up to ALL_PAIRS nodes: every pair (circle method for round-robin). More nodes: a ring of neighbors.

    `nodes`: one rank per node, ascending.
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
    n_pairs, schedule = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:n_pairs], reversed(seats[n_pairs:]), strict=True)
        schedule.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return schedule


# --- checks ---


@check("host names", of_nodes=True)
def names(facts: HostFacts, _: RankCounts) -> Verdict:
    """Check that each host resolves its own name, which MPI libraries and Gloo need."""
    if facts.unresolved:
        return Verdict(
            Status.WARNING,
            f"{facts.name} has no address: {facts.unresolved}",
            "add it to DNS or /etc/hosts",
        )
    return Verdict(Status.OK, "each host finds its own name")


@check("ports")
def ports(facts: HostFacts, _: RankCounts) -> Verdict:
    """Check that a rank can open a port that the system chooses."""
    if not facts.port:
        return Verdict(Status.FAILURE, f"none could be opened: {facts.problem}", "ask who forbids it")
    return Verdict(Status.OK, "can be opened")


def namespaces(hosts: Hosts, world: World) -> list[Line]:
    """Check that ranks of a node share a network namespace, through which they wake each other."""
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


def reached_line(reached: Mapping[int, Reachability | None], world: World) -> list[Line]:
    """Return lines on rank 0's addresses. `reached`: by first rank of each other node; None: no answer."""

    def verdict(addresses: Reachability | None) -> Verdict:
        if addresses is None:
            return Verdict(Status.FAILURE, "no answer", "look at that rank")
        if not addresses.good:
            return Verdict(
                Status.WARNING,
                f"rank 0 can't be reached over TCP at {', '.join(addresses.bad) or 'any address'}",
                "open the firewall between the nodes, or name the interfaces (OMPI_MCA_btl_tcp_if_include);"
                " otherwise lost ranks are found by missing heartbeats only",
            )
        ignored = f"; not at {', '.join(addresses.bad)}" if addresses.bad else ""
        return Verdict(Status.OK, f"rank 0 is reached at {', '.join(addresses.good)}{ignored}")

    return by_verdict("addresses", {rank: verdict(addresses) for rank, addresses in reached.items()})


def clock_lines(links: Mapping[int, LinkMeasurement], world: World) -> list[Line]:
    """Return the line on clock offsets. `links`: from rank 0 to the first rank of each other node."""
    good = {rank: link for rank, link in links.items() if not link.problem}
    if not good:
        return []
    figures = {"offsets_s": {world.nodes[rank]: round(link.offset_s, 6) for rank, link in good.items()}}
    rank = max(good, key=lambda rank: abs(good[rank].offset_s))
    offset, trip = good[rank].offset_s, 2 * good[rank].latency_s
    text = f"at most {abs(offset) * 1e3:.3g} ms apart ({world.nodes[rank]}, round trip {trip * 1e3:.2g} ms)"
    if abs(offset) < _CLOCK_S:
        return [Line("clocks", Status.OK, text, "", (), figures)]
    return [
        Line("clocks", Status.WARNING, text, "times in logs don't agree: start NTP or chrony", (), figures)
    ]


def link_lines(
    check: str, links: Mapping[tuple[int, int], LinkMeasurement], world: World, min_rate: float = _MIN_RATE
) -> list[Line]:
    """Return one line for all pairs that answered, with the slowest, and one for each that did not."""
    lines = []
    good = {pair: link for pair, link in links.items() if not link.problem}

    def title(pair: tuple[int, int]) -> str:
        a, b = (world.nodes[rank] for rank in pair)
        return f"{a}-{b}" if a != b else f"ranks {pair[0]} and {pair[1]} of {a}"

    if good:
        rates = [link.bytes_per_s for link in good.values()]
        latencies = [link.latency_s * 1e6 for link in good.values()]
        slow = [pair for pair, link in good.items() if link.bytes_per_s < _SLOW * statistics.median(rates)]
        text = f"{span(latencies, '.3g')} us, {span([rate / 1e9 for rate in rates], '.2g')} GB/s"
        text += f" ({len(good)} pair{'s' if len(good) > 1 else ''})"
        status, advice = Status.OK, ""
        if slow:
            status = Status.WARNING
            text += f"; far slower than the others: {', '.join(map(title, slow[:8]))}"
            advice = "look at those nodes' network cards, cables and drivers"
        elif min(rates) < min_rate:
            status = Status.WARNING
            advice = "is it the right network? Open MPI: --mca btl_tcp_if_include, UCX: UCX_NET_DEVICES"
        lines.append(Line(check, status, text, advice, (), _figures(good, world)))
    for pair, link in links.items():
        if link.problem:
            lines.append(
                Line(check, Status.FAILURE, f"{title(pair)}: {link.problem}", "look at that node", pair)
            )
    return lines


def span(values: Sequence[float], form: str) -> str:
    """Format a range: ``3``, ``3 to 5``."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _figures(links: Mapping[tuple[int, int], LinkMeasurement], world: World) -> dict[str, Any]:
    return {
        "pairs": [
            {
                "ranks": list(pair),
                "nodes": [world.nodes[rank] for rank in pair],
                "latency_s": round(link.latency_s, 9),
                "bytes_per_s": round(link.bytes_per_s),
            }
            for pair, link in links.items()
        ]
    }
