"""The examination: every rank tells its facts, then does what rank 0 orders; rank 0 judges.

Nobody waits without a deadline: a rank that does not answer is a finding, and is asked nothing more.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from launch.siblings import describe_rank
from mpillm.comms.messages import Message, object_message
from mpillm.comms.start import node_name
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Transport
from mpillm.doctor import disk, gpus, installed, launch_checks, limits, network
from mpillm.doctor.findings import Line, Status, World, judge
from mpillm.doctor.gpu_links import nccl_link
from mpillm.doctor.gpus import GpuFacts
from mpillm.doctor.installed import PackageFacts
from mpillm.doctor.launch_checks import LaunchFacts
from mpillm.doctor.limits import LimitFacts
from mpillm.doctor.links import Link, NoAnswer
from mpillm.doctor.network import HostFacts

if TYPE_CHECKING:
    from mpi4py import MPI


class RankFacts(NamedTuple):
    """What a rank finds out by itself."""

    node: str
    pid: int
    launch: LaunchFacts
    limits: LimitFacts
    host: HostFacts
    gpus: GpuFacts
    packages: PackageFacts


class Kind(enum.Enum):
    """What a rank is to do."""

    REACH = "connect to rank 0"
    LEAD = "measure the link to a partner"
    FOLLOW = "answer the partner that measures"
    GPUS = "ask nvidia-smi"
    SEES = "look for a file of rank 0's"
    LEAD_NCCL = "measure NCCL to a partner"
    FOLLOW_NCCL = "answer the partner that measures NCCL"
    END = "there is nothing more"


class Order(NamedTuple):
    """From rank 0."""

    kind: Kind
    number: int = 0  # names it in `Found`
    partner: int = -1
    host: HostFacts | None = None  # REACH
    path: str = ""  # SEES
    seconds: float = 0.0  # that it may take
    finalize: bool = True  # END: every rank has answered, so MPI can be finalized


class Found(NamedTuple):
    """To rank 0: what an order has found. Who follows tells nothing."""

    number: int
    value: Any  # REACH: Reached; LEAD, LEAD_NCCL: LinkFound; GPUS: GpuFacts; SEES: bool, None: in vain


FACTS: Message[RankFacts] = object_message(Tag.FACTS)
ORDER: Message[Order] = object_message(Tag.ORDER)
FOUND: Message[Found] = object_message(Tag.FOUND)


_FACTS_S = 8.0  # hosts that share cores start slowly
_STEP_S = 4.0
_NCCL_S = 12.0
_DISK_S = 5.0
_LEAST_LOCAL_RATE = 500e6  # bytes per second between ranks of one node

T = TypeVar("T")


def own_facts(listener: network.Listener) -> RankFacts:
    """Return what this rank knows of itself; MPI must have been started."""
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
    """Return what can be judged from facts alone."""
    return [
        *judge(launch_checks.CHECKS, {rank: own.launch for rank, own in facts.items()}, world),
        *judge(network.CHECKS, {rank: own.host for rank, own in facts.items()}, world),
        *judge(limits.CHECKS, {rank: own.limits for rank, own in facts.items()}, world),
        *judge(installed.CHECKS, {rank: own.packages for rank, own in facts.items()}, world),
    ]


def disk_line(log_dir: Path) -> Line:
    """Return the line of the run directory's disk, which may hang."""
    return disk.run_directory(within(_DISK_S, lambda: disk.disk_facts(log_dir)))


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return what `work` returns; None if it does not in time: then its thread is left behind."""
    done: list[T] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else None


class RankExam:
    """Every rank's part but rank 0's."""

    def __init__(self, comm: MPI.Intracomm, links: MPI.Intracomm, deadline_s: float) -> None:
        """`comm`: for messages; `links`: of the same ranks, for measurements."""
        self._transport = Transport(comm)
        self._links = links
        self._end = time.monotonic() + deadline_s
        self._facts: RankFacts | None = None
        self._ended: Order | None = None
        ORDER.handle(self._transport, lambda _, order: self._obey(order))

    def live(self) -> bool:
        """Tell the facts, do what is ordered; return whether MPI can be finalized."""
        self._facts = own_facts(network.Listener())
        FACTS.send(self._transport, 0, self._facts)
        while self._ended is None and time.monotonic() < self._end:
            self._transport.dispatch_whoever_is_lost()
        self._transport.flush(1.0)
        return self._ended is not None and self._ended.finalize

    def _obey(self, order: Order) -> None:
        assert self._facts is not None
        if order.kind is Kind.END:
            self._ended = order
        elif (value := carry_out(order, self._links, self._facts)) is not None:
            FOUND.send(self._transport, 0, Found(order.number, value))


def carry_out(order: Order, links: MPI.Intracomm, facts: RankFacts) -> Any:
    """Do what rank 0 orders; return what was found, None from those who only answer a partner."""
    if order.kind is Kind.REACH:
        assert order.host is not None
        return network.reach(order.host)
    if order.kind is Kind.GPUS:
        return gpus.node_gpus(facts.gpus)
    if order.kind is Kind.SEES:
        return within(_STEP_S, lambda: Path(order.path).exists())
    if order.kind in (Kind.LEAD_NCCL, Kind.FOLLOW_NCCL):
        leads = order.kind is Kind.LEAD_NCCL
        device = 0 if len(facts.gpus.visible) == 1 or leads else 1
        found = nccl_link(links, order.partner, device, leads, order.seconds)
        return found if leads else None
    link = Link(links, order.partner, order.seconds)
    if order.kind is Kind.LEAD:
        return link.lead()
    try:
        link.follow()
    except NoAnswer:  # the leader says so
        return None
    return None


class Rank0Exam:
    """Rank 0's part: gathers, orders, judges."""

    def __init__(self, comm: MPI.Intracomm, links: MPI.Intracomm, deadline_s: float) -> None:
        """As `RankExam`."""
        self._transport = Transport(comm)
        self._links = links
        self._size = comm.size
        self._end = time.monotonic() + deadline_s
        self._facts: dict[int, RankFacts] = {}
        self._found: dict[int, Any] = {}
        self._numbers = 0
        self.silent: set[int] = set()
        FACTS.handle(self._transport, self._facts.__setitem__)
        FOUND.handle(self._transport, lambda _, found: self._found.__setitem__(found.number, found.value))

    def examine(self, log_dir: Path) -> tuple[World, list[Line]]:
        """Return the ranks that answered, and the lines."""
        self._facts[0] = own_facts(network.Listener())
        self._wait(lambda: len(self._facts) == self._size, _FACTS_S)
        world = World({rank: self._facts[rank].node for rank in sorted(self._facts)})
        lines = self._missing_lines()
        self.silent |= set(range(self._size)) - set(self._facts)
        lines += local_lines(self._facts, world)
        lines += self._gpu_lines(world)
        lines += self._between_nodes(world)
        lines += self._between_ranks(world)
        lines += self._nccl_lines(world)
        lines.append(disk_line(log_dir))
        return world, lines + self._shared_lines(world, log_dir)

    def end(self) -> bool:
        """Let the other ranks go; return whether MPI can be finalized."""
        for rank in set(range(1, self._size)) - self.silent:
            ORDER.send(self._transport, rank, Order(Kind.END, finalize=not self.silent))
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
        told = self._ask({rank: Order(Kind.GPUS) for rank in firsts}, 3 * _STEP_S)
        facts = {rank: own.gpus for rank, own in self._facts.items()}
        for rank in firsts:
            lacking = facts[rank]._replace(unanswered="nvidia-smi did not answer in time")
            facts[rank] = told.get(rank, lacking)
        return judge(gpus.CHECKS, facts, world)

    def _between_nodes(self, world: World) -> list[Line]:
        firsts = list(world.first_ranks().values())
        if len(firsts) < 2:
            return [Line("between nodes", Status.SKIPPED, "one node")]
        reach = Order(Kind.REACH, host=self._facts[0].host)
        reached = self._ask(dict.fromkeys(firsts[1:], reach), 2 * _STEP_S)
        lines = network.reached_line({rank: reached.get(rank) for rank in firsts[1:]}, world)
        clocks: dict[tuple[int, int], network.LinkFound] = {}
        for rank in firsts[1:]:
            if rank not in self.silent and time.monotonic() < self._end:
                clocks |= self._measure([(0, rank)])
        lines += network.clock_lines({rank: link for (_, rank), link in clocks.items()}, world)
        found: dict[tuple[int, int], network.LinkFound] = {}
        left_out = 0
        for pairs in network.rounds(firsts):
            sound = [pair for pair in pairs if not self.silent.intersection(pair)]
            if time.monotonic() > self._end:
                left_out += len(sound)
                continue
            known = {pair: clocks[pair] for pair in sound if pair in clocks}
            found |= known | self._measure([pair for pair in sound if pair not in known])
        if left_out:
            lines.append(Line("MPI between nodes", Status.SKIPPED, f"{left_out} pairs: the time was up"))
        return lines + network.link_lines("MPI between nodes", found, world)

    def _shared_lines(self, world: World, log_dir: Path) -> list[Line]:
        """Return whether the other nodes see what rank 0 writes in its run directory."""
        others = [rank for rank in world.first_ranks().values() if rank and rank not in self.silent]
        if not others:
            return []
        made = within(_DISK_S, lambda: disk.Beacon.light(log_dir))
        if made is None:
            return []  # the line of the disk says why
        try:
            look = Order(Kind.SEES, path=str(made.path))
            return disk.shared_lines(made.path.parent, self._ask(dict.fromkeys(others, look), _STEP_S), world)
        finally:
            within(_DISK_S, made.put_out)

    def _between_ranks(self, world: World) -> list[Line]:
        pairs = [pair for pair in neighbours(world) if not self.silent.intersection(pair)]
        if not pairs:
            return [Line("MPI within nodes", Status.SKIPPED, "no node has two ranks")]
        return network.link_lines("MPI within nodes", self._measure(pairs), world, _LEAST_LOCAL_RATE)

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
                if len(self._facts[b].gpus.visible) > 1 or _own(self._facts, a, b)
            ],
            *network.rounds(firsts),
        ]
        lines: list[Line] = []
        for check, some in (("NCCL within nodes", rounds[:1]), ("NCCL between nodes", rounds[1:])):
            found: dict[tuple[int, int], network.LinkFound] = {}
            for pairs in some:
                sound = [pair for pair in pairs if not self.silent.intersection(pair)]
                if time.monotonic() + _NCCL_S < self._end:
                    found |= self._measure(sound, Kind.LEAD_NCCL, _NCCL_S)
                elif sound:
                    lines.append(Line(check, Status.SKIPPED, f"{len(sound)} pairs: the time was up"))
            lines += network.link_lines(check, found, world)
        return lines

    # --- orders ---

    def _measure(
        self, pairs: Sequence[tuple[int, int]], kind: Kind = Kind.LEAD, seconds: float = _STEP_S
    ) -> dict[tuple[int, int], network.LinkFound]:
        """Return what pairs of different ranks measure at the same time; the first of a pair leads.

        A rank that does not answer is asked nothing more.
        """
        follow = Kind.FOLLOW if kind is Kind.LEAD else Kind.FOLLOW_NCCL
        orders = {}
        for leader, follower in pairs:
            self._order(follower, Order(follow, partner=leader, seconds=seconds))
            orders[leader] = Order(kind, partner=follower, seconds=seconds)
        told = self._ask(orders, seconds)
        found = {}
        for leader, follower in pairs:
            lost = network.LinkFound(0, 0, 0, f"rank {leader} did not answer in time{self._pid(leader)}")
            link = found[leader, follower] = told.get(leader, lost)
            if link.problem:
                self.silent.add(follower if leader in told else leader)
                if leader in told:
                    found[leader, follower] = link._replace(problem=f"{link.problem}{self._pid(follower)}")
        return found

    def _pid(self, rank: int) -> str:
        facts = self._facts[rank]
        return f" ({facts.node}, pid {facts.pid})"

    def _ask(self, orders: Mapping[int, Order], seconds: float) -> dict[int, Any]:
        """Give each rank its order; return what those found that answered in time."""
        numbered: dict[int, int] = {}
        own: Order | None = None
        for rank, order in orders.items():
            self._numbers += 1
            numbered[self._numbers] = rank
            order = order._replace(number=self._numbers)
            if rank == 0:
                own = order  # last: the others work meanwhile
            elif rank not in self.silent:
                self._order(rank, order)
        if own is not None:
            self._found[own.number] = carry_out(own, self._links, self._facts[0])
        awaited = {number for number, rank in numbered.items() if rank not in self.silent}
        self._wait(lambda: awaited <= set(self._found), seconds + 1.0)
        return {rank: self._found[number] for number, rank in numbered.items() if number in self._found}

    def _order(self, rank: int, order: Order) -> None:
        ORDER.send(self._transport, rank, order)

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            self._transport.dispatch_whoever_is_lost()


def neighbours(world: World) -> list[tuple[int, int]]:
    """Return the first two ranks of each node that has two."""
    by_node: dict[str, list[int]] = {}
    for rank, node in sorted(world.nodes.items()):
        by_node.setdefault(node, []).append(rank)
    return [(ranks[0], ranks[1]) for ranks in by_node.values() if len(ranks) > 1]


def _own(facts: Mapping[int, RankFacts], a: int, b: int) -> bool:
    """Whether the launcher gave each of two ranks a GPU of its own."""
    one, other = facts[a].gpus.visible, facts[b].gpus.visible
    return len(one) == len(other) == 1 and one[0].uuid != other[0].uuid
