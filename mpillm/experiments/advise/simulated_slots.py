"""Simulated instance of a core that does not report its steps: slots that requests hold for a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mpillm.experiments.advise.simulated_instances import InstanceListener, SimulatedRequest
from mpillm.experiments.advise.step_times import LinearTime


@dataclass(frozen=True)
class SlotTimes:
    """Times of a request, independent of other requests."""

    first: LinearTime  # to the first token, by the prompt's tokens
    per_token: float  # seconds for each further token


class SlotInstance:
    """`max_batch_size` slots; each request holds a slot for its time."""

    def __init__(
        self,
        slots: int,
        times: SlotTimes,
        ranks: int,
        hands_over: bool,
        listener: InstanceListener,
        at: Callable[[float, Callable[[float], None]], None],
    ) -> None:
        """`at(time, call)`: schedules `call(time)`."""
        self.ranks = ranks
        self._slots = slots
        self._times = times
        self._hands_off = hands_over
        self._listener = listener
        self._at = at
        self._waiting: deque[SimulatedRequest] = deque()
        self._running = 0
        self._reserved = 0

    def add(self, request: SimulatedRequest) -> None:
        self._waiting.append(request)

    def poll(self, now: float) -> None:
        while self._waiting and self._running < self._slots:
            request = self._waiting.popleft()
            self._running += 1
            if request.first >= 0:
                self._end_later(request, now)
                continue
            if self._hands_off:
                self._listener.started(request)
            self._at(now + self._times.first.seconds(request.n_prompt), self._first_token_of(request))

    def _first_token_of(self, request: SimulatedRequest) -> Callable[[float], None]:
        def on_first_token(now: float) -> None:
            self._listener.computed(request, now)
            if not self._hands_off:
                self._end_later(request, now)

        return on_first_token

    def _end_later(self, request: SimulatedRequest, now: float) -> None:
        def end(now: float) -> None:
            self._running -= 1
            self._listener.ended(request, now)

        self._at(now + (request.n_output - 1) * self._times.per_token, end)

    def work(self) -> float | None:
        return None

    def advance(self, seconds: float, now: float) -> None:
        raise AssertionError("its requests end by the clock")

    def reserve(self, request: SimulatedRequest) -> bool:
        has_capacity = self._running + len(self._waiting) + self._reserved < self._slots
        self._reserved += has_capacity
        return has_capacity

    def admit(self, request: SimulatedRequest) -> None:
        self._reserved -= 1
        self._waiting.append(request)

    def release(self, request: SimulatedRequest) -> None:
        self._running -= 1
