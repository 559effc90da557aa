"""Discrete-event simulation of a test: LoadGen's arrivals, the leader, the instances, the handoff.

The leader's pools and the engine's scheduler are the real ones. Only time is simulated.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mpillm.errors import StageError
from mpillm.experiments.advise.simulated_instances import Instance, InstanceListener, SimulatedRequest
from mpillm.experiments.advise.step_times import ALONE, NO_TIME, CoreSharing, LinearTime
from mpillm.roles.pool import InstancePool

_MAX_IN_MESSAGE = 2048  # requests; the leader's limit


@dataclass(frozen=True)
class System:
    """Parameters of a run except its instances."""

    entries: int  # aggregated or context instances
    generations: int  # generation instances; 0: aggregated
    requests: int  # credits of an instance
    tokens: int  # KV-token credits of an aggregated or context instance
    generation_tokens: int  # KV-token credits of a generation instance
    policy: str  # --traffic_distribution_policy
    sharing: CoreSharing = ALONE
    handoff: LinearTime = NO_TIME  # from the first token, with capacity at the receiver, to the arrival


At = Callable[[float, Callable[[float], None]], None]
"""Schedules a call at a time, with this time as argument."""

Make = Callable[[bool, InstanceListener, At], Instance]
"""Creates an instance. Arguments: is it a generation instance; its listener; schedules calls."""


class Simulation:
    """Simulation of one test, and the listener of its instances; `run` sets the times of its requests."""

    def __init__(self, system: System, make: Make) -> None:
        self._system = system
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._n_events = 0
        self._now = 0.0
        n, m = system.entries, system.generations
        self._entries = [make(False, self, self._at) for _ in range(n)]
        self._generations = [make(True, self, self._at) for _ in range(m)]
        self._entry_pool = _pool(n, system.policy, system.requests, system.tokens)
        self._generation_pool = _pool(m, system.policy, system.requests, system.generation_tokens)
        self._at_leader: deque[list[SimulatedRequest]] = deque()
        self._offers: list[deque[SimulatedRequest]] = [deque() for _ in range(m)]
        self._accepted: set[int] = set()  # requests, by identity
        self._open = 0

    def run(self, requests: Sequence[SimulatedRequest]) -> None:
        """Simulate all requests, in order of issue. Raises StageError if some would never end."""
        self._open = len(requests)
        by_time: dict[float, list[SimulatedRequest]] = {}
        for request in requests:
            by_time.setdefault(request.issued, []).append(request)
        for at, issued in by_time.items():
            self._at(at, partial(self._issue, issued))
        while self._open:
            self._advance()
            self._settle()

    # --- time ---

    def _at(self, when: float, call: Callable[[float], None]) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (when, self._n_events, call))

    def _advance(self) -> None:
        """Advance to the next event."""
        busy = [(one, work) for one in self._all() if (work := one.work()) is not None]
        ranks = sum(one.ranks for one, _ in busy)
        slow = [self._system.sharing.slowdown(ranks, one.ranks) for one, _ in busy]
        ends = [self._now + work * factor for (_, work), factor in zip(busy, slow, strict=True)]
        then = min([*ends, self._events[0][0]] if self._events else ends, default=-1.0)
        if then < 0:
            raise StageError(f"{self._open} requests would never be answered: no instance has capacity")
        passed, self._now = then - self._now, then
        for (one, work), factor, end in zip(busy, slow, ends, strict=True):
            one.advance(work if end == then else min(work, passed / factor), then)
        while self._events and self._events[0][0] <= then:
            heapq.heappop(self._events)[2](then)

    def _settle(self) -> None:
        """Do all work of leader and instances that is possible now."""
        self._dispatch()
        for one in self._all():
            one.poll(self._now)
        for position, offers in enumerate(self._offers):
            while offers and self._generations[position].reserve(offers[0]):
                request = offers.popleft()
                self._accepted.add(id(request))
                if request.first >= 0:
                    self._hand_off(request)

    def _all(self) -> list[Instance]:
        return [*self._entries, *self._generations]

    # --- the leader ---

    def _issue(self, requests: list[SimulatedRequest], now: float) -> None:
        self._at_leader.append(requests)

    def _dispatch(self) -> None:
        while self._at_leader and (n := self._send(self._at_leader[0][:_MAX_IN_MESSAGE])):
            del self._at_leader[0][:n]
            if not self._at_leader[0]:
                self._at_leader.popleft()

    def _send(self, waiting: list[SimulatedRequest]) -> int:
        """Send the first requests of `waiting`; return their number. Mirrors `Leader._send_next`."""
        needs = np.array([request.needs for request in waiting], np.int64)
        generation, n = -1, len(waiting)
        if self._generations:
            generation, n = self._generation_pool.pick(needs)
            if not n:
                return 0
        entry, n = self._entry_pool.pick(needs[:n])
        if not n:
            return 0
        self._entry_pool.take(entry, needs[:n])
        if self._generations:
            self._generation_pool.take(generation, needs[:n])
        for request in waiting[:n]:
            request.entry, request.generation = entry, generation
            self._entries[entry].add(request)
        return n

    def _return(self, pool: InstancePool, position: int, request: SimulatedRequest) -> None:
        pool.return_credits(np.array([position]), np.array([request.needs]))

    # --- events of the instances; generation instances start no contexts and compute no first tokens ---

    def started(self, request: SimulatedRequest) -> None:
        """Offer a request, whose context has memory, to its generation instance."""
        if request.max_output > 1 and self._generations:
            self._offers[request.generation].append(request)

    def computed(self, request: SimulatedRequest, now: float) -> None:
        """Note the first token, and start the handoff."""
        request.first = now
        if not self._generations:
            return
        if request.n_output == 1:
            self._entries[request.entry].release(request)
            if id(request) in self._accepted:
                self._generations[request.generation].release(request)
            elif request in self._offers[request.generation]:
                self._offers[request.generation].remove(request)
            self.ended(request, now)
        elif id(request) in self._accepted:
            self._hand_off(request)

    def _hand_off(self, request: SimulatedRequest) -> None:
        def arrived(now: float) -> None:
            self._entries[request.entry].release(request)
            self._return(self._entry_pool, request.entry, request)
            self._generations[request.generation].admit(request)

        self._at(self._now + self._system.handoff.seconds(request.n_prompt), arrived)

    def ended(self, request: SimulatedRequest, now: float) -> None:
        """Note the last token."""
        request.ended = now
        self._open -= 1
        self._accepted.discard(id(request))
        if self._generations:
            self._return(self._generation_pool, request.generation, request)
        if not self._generations or request.n_output == 1:
            self._return(self._entry_pool, request.entry, request)


def _pool(n: int, policy: str, requests: int, tokens: int) -> InstancePool:
    pool = InstancePool(list(range(n)), policy)
    for position in range(n):
        pool.grant(position, requests, tokens)
    return pool


def latencies(requests: Sequence[SimulatedRequest]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds to each first token, and per token after it (NaN for answers of one token)."""
    first = np.array([request.first - request.issued for request in requests])
    after = np.array([request.ended - request.first for request in requests])
    n = np.array([request.n_output for request in requests])
    return first, np.where(n > 1, after / np.maximum(n - 1, 1), np.nan)
