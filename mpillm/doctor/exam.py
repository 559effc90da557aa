"""Checks on all ranks. Every rank sends its facts, then runs the probes that rank 0 requests; rank 0 judges.

Every wait has a deadline. A rank that does not answer is reported, and gets no further request.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from launch.siblings import describe_rank
from mpillm.comms.messages import Message, object_message
from mpillm.comms.start import node_name
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Transport
from mpillm.doctor import disk, gpus, installed, launch_checks, limits, network
from mpillm.doctor.disk import within
from mpillm.doctor.findings import Line, Status, World, judge
from mpillm.doctor.gpu_links import nccl_link
from mpillm.doctor.gpus import GpuFacts
from mpillm.doctor.installed import PackageFacts
from mpillm.doctor.launch_checks import LaunchFacts
from mpillm.doctor.limits import LimitFacts
from mpillm.doctor.links import LinkProbe, LinkTimeout
from mpillm.doctor.network import HostFacts

if TYPE_CHECKING:
    from mpi4py import MPI


class RankFacts(NamedTuple):
    """Facts that a rank collects without the others."""

    node: str
    pid: int
    launch: LaunchFacts
    limits: LimitFacts
    host: HostFacts
    gpus: GpuFacts
    packages: PackageFacts


class ProbeKind(enum.Enum):
    """A measurement that rank 0 requests."""

    REACH = "connect to rank 0"
    LEAD = "measure the link to a partner"
    FOLLOW = "answer the partner that measures"
    GPUS = "ask nvidia-smi"
    SEES = "look for a file of rank 0's"
    LEAD_NCCL = "measure NCCL to a partner"
    FOLLOW_NCCL = "answer the partner that measures NCCL"
    END = "there is nothing more"


class ProbeRequest(NamedTuple):
    """Request of rank 0 to another rank."""

    kind: ProbeKind
    number: int = 0  # identifies the request in `ProbeResult`
    partner: int = -1
    host: HostFacts | None = None  # REACH
    path: str = ""  # SEES
    seconds: float = 0.0  # deadline of the probe
    finalize: bool = True  # END: every rank has answered, so MPI can be finalized


class ProbeResult(NamedTuple):
    """Result of a probe, sent to rank 0. FOLLOW and FOLLOW_NCCL send none."""

    number: int
    # REACH: Reachability. LEAD, LEAD_NCCL: LinkMeasurement. GPUS: GpuFacts. SEES: bool.
    value: Any


FACTS: Message[RankFacts] = object_message(Tag.FACTS)
PROBE_REQUEST: Message[ProbeRequest] = object_message(Tag.ORDER)
PROBE_RESULT: Message[ProbeResult] = object_message(Tag.RESULTS)


_FACTS_S = 8.0  # hosts that share cores start slowly
_STEP_S = 4.0
_NCCL_S = 12.0
_MIN_LOCAL_RATE = 500e6  # bytes per second between ranks of one node


def own_facts(listener: network.KeyServer) -> RankFacts:
    """Return the facts of this rank; MPI must have been started."""
    return RankFacts(
        node_name(),
        os.getpid(),
        launch_checks.launch_facts(),
        limits.limit_facts(),
        network.host_facts(listener),
        gpus.gpu_facts(),
        installed.package_facts(),
    )


def local_lines(facts: Mapping[int, RankFacts], world: World) -> list[Line]:
    """Return the lines that need no probe."""
    return [
        *judge(launch_checks.CHECKS, {rank: own.launch for rank, own in facts.items()}, world),
        *judge(network.CHECKS, {rank: own.host for rank, own in facts.items()}, world),
        *judge(limits.CHECKS, {rank: own.limits for rank, own in facts.items()}, world),
        *judge(installed.CHECKS, {rank: own.packages for rank, own in facts.items()}, world),
    ]


class RankExam:
    """Part of every rank except rank 0: sends facts, runs probes."""

    def __init__(self, comm: MPI.Intracomm, links: MPI.Intracomm, deadline_s: float) -> None:
        """`comm`: for messages; `links`: of the same ranks, for measurements."""
        self._transport = Transport(comm)
        self._links = links
        self._end = time.monotonic() + deadline_s
        self._facts: RankFacts | None = None
        self._end_request: ProbeRequest | None = None
        PROBE_REQUEST.handle(self._transport, lambda _, request: self._execute(request))

    def run(self) -> bool:
        """Send the facts, run the requested probes; return whether MPI can be finalized."""
        self._facts = own_facts(network.KeyServer())
        FACTS.send(self._transport, 0, self._facts)
        while self._end_request is None and time.monotonic() < self._end:
            self._transport.dispatch_despite_losses()
        self._transport.flush(1.0)
        return self._end_request is not None and self._end_request.finalize

    def _execute(self, request: ProbeRequest) -> None:
        assert self._facts is not None
        if request.kind is ProbeKind.END:
            self._end_request = request
        elif (value := run_probe(request, self._links, self._facts)) is not None:
            PROBE_RESULT.send(self._transport, 0, ProbeResult(request.number, value))


def run_probe(request: ProbeRequest, links: MPI.Intracomm, facts: RankFacts) -> Any:
    """Run a probe of rank 0; return its result, or None on a rank that only answers its partner."""
    if request.kind is ProbeKind.REACH:
        assert request.host is not None
        return network.reach(request.host)
    if request.kind is ProbeKind.GPUS:
        return gpus.node_gpus(facts.gpus)
    if request.kind is ProbeKind.SEES:
        return within(_STEP_S, lambda: Path(request.path).exists())
    if request.kind in (ProbeKind.LEAD_NCCL, ProbeKind.FOLLOW_NCCL):
        is_leader = request.kind is ProbeKind.LEAD_NCCL
        device = 0 if len(facts.gpus.visible) == 1 or is_leader else 1
        result = nccl_link(links, request.partner, device, is_leader, request.seconds)
        return result if is_leader else None
    link = LinkProbe(links, request.partner, request.seconds)
    if request.kind is ProbeKind.LEAD:
        return link.lead()
    try:
        link.follow()
    except LinkTimeout:  # the partner that measures reports it
        return None
    return None


class Rank0Exam:
    """Part of rank 0: collects facts, requests probes, judges."""

    def __init__(self, comm: MPI.Intracomm, links: MPI.Intracomm, deadline_s: float) -> None:
        """See `RankExam`."""
        self._transport = Transport(comm)
        self._links = links
        self._size = comm.size
        self._end = time.monotonic() + deadline_s
        self._facts: dict[int, RankFacts] = {}
        self._results: dict[int, Any] = {}
        self._numbers = 0
        self.silent: set[int] = set()
        FACTS.handle(self._transport, self._facts.__setitem__)
        PROBE_RESULT.handle(self._transport, lambda _, one: self._results.__setitem__(one.number, one.value))

    def examine(self, log_dir: Path) -> tuple[World, list[Line]]:
        """Return the ranks that answered, and the lines."""
        self._facts[0] = own_facts(network.KeyServer())
        self._wait(lambda: len(self._facts) == self._size, _FACTS_S)
        world = World({rank: self._facts[rank].node for rank in sorted(self._facts)})
        lines = self._missing_lines()
        self.silent |= set(range(self._size)) - set(self._facts)
        lines += local_lines(self._facts, world)
        lines += self._gpu_lines(world)
        lines += self._between_nodes(world)
        lines += self._between_ranks(world)
        lines += self._nccl_lines(world)
        lines.append(disk.disk_line(log_dir))
        return world, lines + self._shared_lines(world, log_dir)

    def end(self) -> bool:
        """Release the other ranks; return whether MPI can be finalized."""
        for rank in set(range(1, self._size)) - self.silent:
            PROBE_REQUEST.send(self._transport, rank, ProbeRequest(ProbeKind.END, finalize=not self.silent))
        self._transport.flush(1.0)
        return not self.silent

    # --- steps ---

    def _missing_lines(self) -> list[Line]:
        missing = sorted(set(range(self._size)) - set(self._facts))
        return [
            Line(
                "ranks",
                Status.FAILURE,
                f"no answer within {_FACTS_S:g} s{describe_rank(rank)}",
                "look at that process and its host",
                (rank,),
            )
            for rank in missing
        ]

    def _gpu_lines(self, world: World) -> list[Line]:
        firsts = [rank for rank in world.first_ranks().values() if self._facts[rank].gpus.visible]
        results = self._request_all({rank: ProbeRequest(ProbeKind.GPUS) for rank in firsts}, 3 * _STEP_S)
        facts = {rank: own.gpus for rank, own in self._facts.items()}
        for rank in firsts:
            lacking = facts[rank]._replace(unanswered="nvidia-smi did not answer in time")
            facts[rank] = results.get(rank, lacking)
        return judge(gpus.CHECKS, facts, world)

    def _between_nodes(self, world: World) -> list[Line]:
        firsts = list(world.first_ranks().values())
        if len(firsts) < 2:
            return [Line("between nodes", Status.SKIPPED, "one node")]
        reach = ProbeRequest(ProbeKind.REACH, host=self._facts[0].host)
        reached = self._request_all(dict.fromkeys(firsts[1:], reach), 2 * _STEP_S)
        lines = network.reached_line({rank: reached.get(rank) for rank in firsts[1:]}, world)
        clocks: dict[tuple[int, int], network.LinkMeasurement] = {}
        for rank in firsts[1:]:
            if rank not in self.silent and time.monotonic() < self._end:
                clocks |= self._measure([(0, rank)])
        lines += network.clock_lines({rank: link for (_, rank), link in clocks.items()}, world)
        measured: dict[tuple[int, int], network.LinkMeasurement] = {}
        left_out = 0
        for pairs in network.rounds(firsts):
            sound = [pair for pair in pairs if not self.silent.intersection(pair)]
            if time.monotonic() > self._end:
                left_out += len(sound)
                continue
            known = {pair: clocks[pair] for pair in sound if pair in clocks}
            measured |= known | self._measure([pair for pair in sound if pair not in known])
        if left_out:
            lines.append(Line("MPI between nodes", Status.SKIPPED, f"{left_out} pairs: the time was up"))
        return lines + network.link_lines("MPI between nodes", measured, world)

    def _shared_lines(self, world: World, log_dir: Path) -> list[Line]:
        """Return lines on which other nodes see rank 0's run directory."""
        others = [rank for rank in world.first_ranks().values() if rank and rank not in self.silent]
        if not others:
            return []
        beacon = within(disk.DISK_S, lambda: disk.Beacon.light(log_dir))
        if beacon is None:
            return []  # the line of the disk has the reason
        try:
            look = ProbeRequest(ProbeKind.SEES, path=str(beacon.path))
            seen = self._request_all(dict.fromkeys(others, look), _STEP_S)
            return disk.shared_lines(beacon.path.parent, seen, world)
        finally:
            within(disk.DISK_S, beacon.put_out)

    def _between_ranks(self, world: World) -> list[Line]:
        pairs = [pair for pair in neighbours(world) if not self.silent.intersection(pair)]
        if not pairs:
            return [Line("MPI within nodes", Status.SKIPPED, "no node has two ranks")]
        return network.link_lines("MPI within nodes", self._measure(pairs), world, _MIN_LOCAL_RATE)

    def _nccl_lines(self, world: World) -> list[Line]:
        visible = [rank for rank, own in self._facts.items() if own.gpus.visible]
        if not visible:
            return [Line("NCCL", Status.SKIPPED, "no GPU")]
        if any(
            "+cpu" in self._facts[rank].gpus.pytorch or not self._facts[rank].gpus.pytorch for rank in visible
        ):
            return [Line("NCCL", Status.SKIPPED, "no PyTorch with CUDA")]
        firsts = [rank for rank in world.first_ranks().values() if rank in visible]
        rounds = [
            [
                (a, b)
                for a, b in neighbours(world)
                if len(self._facts[b].gpus.visible) > 1 or _have_own_gpus(self._facts, a, b)
            ],
            *network.rounds(firsts),
        ]
        lines: list[Line] = []
        for check, some in (("NCCL within nodes", rounds[:1]), ("NCCL between nodes", rounds[1:])):
            measured: dict[tuple[int, int], network.LinkMeasurement] = {}
            for pairs in some:
                sound = [pair for pair in pairs if not self.silent.intersection(pair)]
                if time.monotonic() + _NCCL_S < self._end:
                    measured |= self._measure(sound, ProbeKind.LEAD_NCCL, _NCCL_S)
                elif sound:
                    lines.append(Line(check, Status.SKIPPED, f"{len(sound)} pairs: the time was up"))
            lines += network.link_lines(check, measured, world)
        return lines

    # --- requests ---

    def _measure(
        self, pairs: Sequence[tuple[int, int]], kind: ProbeKind = ProbeKind.LEAD, seconds: float = _STEP_S
    ) -> dict[tuple[int, int], network.LinkMeasurement]:
        """Measure the links of disjoint pairs simultaneously; the first rank of a pair leads.

        A rank that does not answer gets no further request.
        """
        follow = ProbeKind.FOLLOW if kind is ProbeKind.LEAD else ProbeKind.FOLLOW_NCCL
        requests = {}
        for leader, follower in pairs:
            self._send_request(follower, ProbeRequest(follow, partner=leader, seconds=seconds))
            requests[leader] = ProbeRequest(kind, partner=follower, seconds=seconds)
        results = self._request_all(requests, seconds)
        measured = {}
        for leader, follower in pairs:
            problem = f"rank {leader} did not answer in time{self._pid(leader)}"
            lost = network.LinkMeasurement(0, 0, 0, problem)
            link = measured[leader, follower] = results.get(leader, lost)
            if link.problem:
                self.silent.add(follower if leader in results else leader)
                if leader in results:
                    measured[leader, follower] = link._replace(problem=f"{link.problem}{self._pid(follower)}")
        return measured

    def _pid(self, rank: int) -> str:
        facts = self._facts[rank]
        return f" ({facts.node}, pid {facts.pid})"

    def _request_all(self, requests: Mapping[int, ProbeRequest], seconds: float) -> dict[int, Any]:
        """Send each rank its request; return the results that arrive in time, by rank."""
        numbered: dict[int, int] = {}
        own: ProbeRequest | None = None
        for rank, request in requests.items():
            self._numbers += 1
            numbered[self._numbers] = rank
            request = request._replace(number=self._numbers)
            if rank == 0:
                own = request  # runs last, while the others work
            elif rank not in self.silent:
                self._send_request(rank, request)
        if own is not None:
            self._results[own.number] = run_probe(own, self._links, self._facts[0])
        awaited = {number for number, rank in numbered.items() if rank not in self.silent}
        self._wait(lambda: awaited <= set(self._results), seconds + 1.0)
        return {rank: self._results[number] for number, rank in numbered.items() if number in self._results}

    def _send_request(self, rank: int, request: ProbeRequest) -> None:
        PROBE_REQUEST.send(self._transport, rank, request)

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            self._transport.dispatch_despite_losses()


def neighbours(world: World) -> list[tuple[int, int]]:
    """Return the first two ranks of each node that has two."""
    by_node: dict[str, list[int]] = {}
    for rank, node in sorted(world.nodes.items()):
        by_node.setdefault(node, []).append(rank)
    return [(ranks[0], ranks[1]) for ranks in by_node.values() if len(ranks) > 1]


def _have_own_gpus(facts: Mapping[int, RankFacts], a: int, b: int) -> bool:
    """Return whether the launcher assigned a different single GPU to each of two ranks."""
    one, other = facts[a].gpus.visible, facts[b].gpus.visible
    return len(one) == len(other) == 1 and one[0].uuid != other[0].uuid
