"""A cluster of any size in one process: the real leader, and the real control of rank 0.

What they send is noted, and what the other ranks would send is made up; time passes as the caller says.
"""

from __future__ import annotations

import os
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

import disagg
from disagg import WorldPlan
from launch.default_paths import RUNS
from mpillm.comms import rank0_control
from mpillm.comms.control import RankControl, Timeouts
from mpillm.comms.messages import (
    ARRIVED,
    BEAT,
    DONE,
    FAILED,
    GRANT,
    QUERY,
    REQUEST,
    RESPONSE,
    WORK,
    Arrival,
    Batch,
    Beat,
    Grant,
    JoinReport,
    Rank0At,
    ResponseFlag,
    Setup,
)
from mpillm.comms.rank0_control import Rank0Control
from mpillm.comms.rank_connections import RankConnections
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Buffer, Envelope, Transport
from mpillm.errors import Failure, RunError
from mpillm.phases import PHASES, Phase
from mpillm.roles.leader import Leader

_RANKS_PER_INSTANCE = 2
_CONTROL_RANKS = 2
_RANKS_PER_NODE = 8
_PROMPT, _ANSWER = 128, 16  # tokens
_OPEN = 8  # requests that each instance has from the start, of the _ROOM that it can hold
_ROOM = 64
_POLL_S = 0.1  # between looks of rank 0's control
_LAST = int(ResponseFlag.FIRST | ResponseFlag.FINAL)


def _no_stall(failure: Failure) -> None:
    raise RunError(failure)


class Wire:
    """Is to the leader and to rank 0's control what a `Transport` is."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.handlers: dict[Tag, Callable[[Envelope], None]] = {}
        self.sent: deque[tuple[int, Tag, Buffer]] = deque()

    def send(self, dest: int, tag: Tag, buffer: Buffer) -> None:
        """Note a message."""
        self.sent.append((dest, tag, buffer))

    def dispatch_despite_losses(self) -> None:
        """Receive nothing for a moment."""
        time.sleep(0.01)

    def known_losses(self) -> frozenset[int]:
        """Return no rank: this MPI detects no loss."""
        return frozenset()

    def deliver(self, source: int, tag: Tag, buffer: Buffer) -> None:
        """Hand a message to its handler."""
        self.handlers[tag](Envelope(source, tag, buffer))


class Clock:
    """Clock that advances only when a test sets it.

    It starts at the machine's time, because the control reads the machine's clock outside `simulated`.
    """

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        """Return the time."""
        return self.now


@contextmanager
def simulated(clock: Clock, module: types.ModuleType) -> Iterator[None]:
    """Let `module` read this clock meanwhile."""
    real = vars(module)["time"]
    vars(module)["time"] = clock
    try:
        yield
    finally:
        vars(module)["time"] = real


def plan_of(n_instances: int) -> WorldPlan:
    """Return the plan of a cluster with this many instances of two ranks, on nodes of eight."""
    size = _CONTROL_RANKS + _RANKS_PER_INSTANCE * n_instances
    config = disagg.generate(
        "aggregated", size, control_ranks=_CONTROL_RANKS, tensor_parallelism=_RANKS_PER_INSTANCE
    )
    return disagg.plan(config, size, [f"node{rank // _RANKS_PER_NODE:04d}" for rank in range(size)])


class RoutedCluster:
    """The leader, and instances that answer their oldest request when they are told to."""

    def __init__(self, plan: WorldPlan, policy: str) -> None:
        """`policy`: of --traffic_distribution_policy."""
        self._wire = Wire(plan.leader_rank)
        self.leader = Leader(cast(Transport, self._wire), plan, policy, policy, 1e9, _no_stall)
        self._harness = plan.harness_rank
        self._free_ids = deque(range(_OPEN * len(plan.instances) + 4096))
        self._owed: deque[tuple[int, int]] = deque()  # rank and request, the oldest first
        for instance in plan.instances:
            room = Grant(_ROOM, _ROOM * (_PROMPT + _ANSWER))
            self._wire.deliver(instance.root_rank, Tag.GRANT, GRANT.write(room))
        for _ in range(_OPEN):
            self.ask(len(plan.instances))

    def ask(self, n: int) -> None:
        """Let `n` requests come in one message, and the leader send them on."""
        rows = np.zeros(n, REQUEST)
        rows["id"] = [self._free_ids.popleft() for _ in range(n)]
        rows["n_tokens"], rows["max_output"] = _PROMPT, _ANSWER
        tokens = (np.arange(n * _PROMPT) * 2654435761 % 32000).astype(np.int32)
        self._wire.deliver(self._harness, Tag.QUERY, QUERY.write(Batch(rows, tokens)))
        self.leader.poll()
        while self._wire.sent:
            dest, tag, buffer = self._wire.sent.popleft()
            if tag is Tag.WORK:
                self._owed += [(dest, id_) for id_ in WORK.read(buffer).rows["id"].tolist()]

    def answer(self, n: int) -> None:
        """Let the oldest `n` requests be answered, each in a message of its own."""
        for _ in range(n):
            rank, id_ = self._owed.popleft()
            rows = np.array([(id_, 1, _LAST)], RESPONSE)
            self._wire.deliver(rank, Tag.DONE, DONE.write(Batch(rows, np.zeros(1, np.int32))))
            self._free_ids.append(id_)
        self._wire.sent.clear()


class ControlledCluster:
    """Rank 0's control, and ranks that arrive at phases, beat, and are lost."""

    def __init__(self, plan: WorldPlan, values: dict[str, Any], heartbeat_s: float) -> None:
        """`values`: the options, as each rank reports them when it joins."""
        self.clock = Clock()
        self.n_written = 0  # messages of rank 0; several ranks may get the same one
        self._plan, self._values = plan, values
        self._wire = Wire(0)
        timeouts = Timeouts(dict.fromkeys(PHASES, 1e9), heartbeat=heartbeat_s)
        mine = cast(RankControl, types.SimpleNamespace(transport=self._wire, timeouts=timeouts, outcome=None))
        with simulated(self.clock, rank0_control):
            self.control = Rank0Control(mine, len(plan.ranks), self.clock.now, self._released)
        self._rank_connections = types.SimpleNamespace(exited=frozenset())
        self.control.connections = cast(RankConnections, self._rank_connections)
        self._beat = BEAT.write(Beat("test", 0.0, ""))

    def _released(self, phase: Phase, seconds: float, reports: dict[int, Any]) -> Setup | int | None:
        if phase != PHASES[0]:
            return 0 if phase == PHASES[-1] else None
        self.control.label(self._plan)
        at = Rank0At("node0000", 1, "pids of node0000", None)
        return Setup(self._plan, f"{RUNS}/it", at, {}, "token", False, {}, {}, "", False)

    def arrive(self, phase: Phase) -> int:
        """Let all ranks arrive at a phase; return the bytes that rank 0 has sent to release them."""
        with simulated(self.clock, rank0_control):
            for rank in self._plan.ranks:
                report: JoinReport | None = None
                if phase == PHASES[0]:
                    pids = f"pids of {rank.node}"
                    report = JoinReport(rank.node, os.getpid(), 0.0, {}, "", "", self._values, (), pids)
                self._wire.deliver(rank.rank, Tag.ARRIVED, ARRIVED.write(Arrival(phase, report)))
        self.n_written += len({id(buffer) for _, _, buffer in self._wire.sent})
        n_bytes: int = sum(buffer.nbytes for _, _, buffer in self._wire.sent)
        self._wire.sent.clear()
        return n_bytes

    def live(self, seconds: float, beats_every_s: float, without: int = -1) -> None:
        """Let time pass, with beats of all ranks but `without`. Raises RunError if a rank is lost."""
        end = self.clock.now + seconds
        beat_at = self.clock.now
        with simulated(self.clock, rank0_control):
            while self.clock.now < end:
                self.clock.now += _POLL_S
                if self.clock.now >= beat_at:
                    beat_at += beats_every_s
                    for rank in range(1, len(self._plan.ranks)):
                        if rank != without:
                            self._wire.deliver(rank, Tag.BEAT, self._beat)
                self.control.poll()

    def tell(self, source: int, failure: Failure) -> None:
        """Let a rank tell of a failure, its own or another's."""
        with simulated(self.clock, rank0_control):
            self._wire.deliver(source, Tag.FAILED, FAILED.write(failure))

    def end(self, rank: int) -> None:
        """Let a rank's process end."""
        self._rank_connections.exited |= {rank}

    def notices(self, rank: int, beats_every_s: float, ended: bool) -> float:
        """Return how many seconds pass until the loss of a rank is known.

        `ended`: its process has exited, which its liveness connection reports; otherwise it falls silent.
        """
        lost_at = self.clock.now
        if ended:
            self.end(rank)
        try:
            self.live(1000.0, beats_every_s, rank)
        except RunError:
            return self.clock.now - lost_at
        raise AssertionError(f"the loss of rank {rank} was never noticed")
