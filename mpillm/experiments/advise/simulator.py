"""A discrete-event simulation of a test: LoadGen's arrivals, the leader, the instances, the handoff.

The leader's pools and the engine's scheduler are the program's own; only the time is simulated.
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
from mpillm.experiments.advise.simulated_instances import Instance, Listener, Request
from mpillm.experiments.advise.step_times import ALONE, NO_TIME, Line, Sharing
from mpillm.roles.pool import InstancePool

_MOST_IN_MESSAGE = 2048  # requests, as the leader's


@dataclass(frozen=True)
class System:
    """What answers a test, but for its instances."""

    entries: int  # instances where requests start
    generations: int  # that continue them; 0: aggregated
    requests: int  # that an instance is granted at once
    tokens: int  # of KV cache, likewise, of an instance where requests start
    generation_tokens: int  # and of a generation instance
    policy: str  # --traffic_distribution_policy
    sharing: Sharing = ALONE
    handoff: Line = NO_TIME  # from the first token, and room at the receiver, to the KV cache's arrival


At = Callable[[float, Callable[[float], None]], None]
"""Asks to be called at a time, with it."""

Make = Callable[[bool, Listener, At], Instance]
"""Makes an instance: whether it is a generation instance, who hears of it, and a way to ask for a time."""


class Simulation:
    """One test; `run` fills in the times of its requests."""

    def __init__(self, system: System, make: Make) -> None:
        self._system = system
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._n_events = 0
        self._now = 0.0
        n, m = system.entries, system.generations
        self._entries = [make(False, _Entry(self), self._at) for _ in range(n)]
        self._generations = [make(True, _Generation(self), self._at) for _ in range(m)]
        self._entry_pool = _pool(n, system.policy, system.requests, system.tokens)
        self._generation_pool = _pool(m, system.policy, system.requests, system.generation_tokens)
        self._at_leader: deque[list[Request]] = deque()
        self._offers: list[deque[Request]] = [deque() for _ in range(m)]
        self._accepted: set[int] = set()  # requests, by identity
        self._open = 0

    def run(self, requests: Sequence[Request]) -> None:
        """Answer all requests, in the order in which they are issued. Raises StageError if some never end."""
        self._open = len(requests)
        by_time: dict[float, list[Request]] = {}
        for request in requests:
            by_time.setdefault(request.issued, []).append(request)
        for at, together in by_time.items():
            self._at(at, partial(self._issue, together))
        while self._open:
            self._advance()
            self._settle()

    # --- time ---

    def _at(self, when: float, call: Callable[[float], None]) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (when, self._n_events, call))

    def _advance(self) -> None:
        """Go to the next thing that happens."""
        busy = [(one, work) for one in self._all() if (work := one.work()) is not None]
        ranks = sum(one.ranks for one, _ in busy)
        slow = [self._system.sharing.slowdown(ranks, one.ranks) for one, _ in busy]
        ends = [self._now + work * factor for (_, work), factor in zip(busy, slow, strict=True)]
        then = min([*ends, self._events[0][0]] if self._events else ends, default=-1.0)
        if then < 0:
            raise StageError(f"{self._open} requests would never be answered: no instance has room for them")
        passed, self._now = then - self._now, then
        for (one, work), factor, end in zip(busy, slow, ends, strict=True):
            one.advance(work if end == then else min(work, passed / factor), then)
        while self._events and self._events[0][0] <= then:
            heapq.heappop(self._events)[2](then)

    def _settle(self) -> None:
        """Let leader and instances do what they can do now."""
        self._dispatch()
        for one in self._all():
            one.poll(self._now)
        for position, offers in enumerate(self._offers):
            while offers and self._generations[position].reserve(offers[0]):
                request = offers.popleft()
                self._accepted.add(id(request))
                if request.first >= 0:
                    self._hand_over(request)

    def _all(self) -> list[Instance]:
        return [*self._entries, *self._generations]

    # --- the leader ---

    def _issue(self, together: list[Request], now: float) -> None:
        self._at_leader.append(together)

    def _dispatch(self) -> None:
        while self._at_leader and (n := self._send(self._at_leader[0][:_MOST_IN_MESSAGE])):
            del self._at_leader[0][:n]
            if not self._at_leader[0]:
                self._at_leader.popleft()

    def _send(self, waiting: list[Request]) -> int:
        """Send the first of `waiting`; return how many: as `Leader._send_next`."""
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

    def _return(self, pool: InstancePool, position: int, request: Request) -> None:
        pool.give_back(np.array([position]), np.array([request.needs]))

    # --- requests ---

    def offer(self, request: Request) -> None:
        """Ask the generation instance for room: the context has its own."""
        if request.max_output > 1 and self._generations:
            self._offers[request.generation].append(request)

    def computed(self, request: Request, now: float) -> None:
        """Note the first token, and hand over."""
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
            self._hand_over(request)

    def _hand_over(self, request: Request) -> None:
        def arrived(now: float) -> None:
            self._entries[request.entry].release(request)
            self._return(self._entry_pool, request.entry, request)
            self._generations[request.generation].admit(request)

        self._at(self._now + self._system.handoff.seconds(request.n_prompt), arrived)

    def ended(self, request: Request, now: float) -> None:
        """Note the last token."""
        request.ended = now
        self._open -= 1
        self._accepted.discard(id(request))
        if self._generations:
            self._return(self._generation_pool, request.generation, request)
        if not self._generations or request.n_output == 1:
            self._return(self._entry_pool, request.entry, request)


class _Entry:
    """Hears of executors and context instances."""

    def __init__(self, simulation: Simulation) -> None:
        self.started = simulation.offer
        self.computed = simulation.computed
        self.ended = simulation.ended


class _Generation:
    """Hears of generation instances, which compute no first tokens."""

    def __init__(self, simulation: Simulation) -> None:
        self.ended = simulation.ended

    def started(self, request: Request) -> None:
        """Do nothing: it is here already."""

    def computed(self, request: Request, now: float) -> None:
        """Do nothing: the context instance did."""


def _pool(n: int, policy: str, requests: int, tokens: int) -> InstancePool:
    pool = InstancePool(list(range(n)), policy)
    for position in range(n):
        pool.grant(position, requests, tokens)
    return pool


def latencies(requests: Sequence[Request]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds to each first token, and per token after it (NaN for answers of one token)."""
    first = np.array([request.first - request.issued for request in requests])
    after = np.array([request.ended - request.first for request in requests])
    n = np.array([request.n_output for request in requests])
    return first, np.where(n > 1, after / np.maximum(n - 1, 1), np.nan)
