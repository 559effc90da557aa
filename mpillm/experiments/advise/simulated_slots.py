"""A simulated instance of a core that does not tell its steps: slots that each request holds for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mpillm.experiments.advise.simulated_instances import Listener, Request
from mpillm.experiments.advise.step_times import Line


@dataclass(frozen=True)
class SlotTimes:
    """How long a core that does not tell its steps takes for a request, whatever else it does."""

    first: Line  # to the first token, by the prompt's tokens
    per_token: float  # seconds for each further token


class SlotInstance:
    """`max_batch_size` slots; a request holds one for a time of its own."""

    def __init__(
        self,
        slots: int,
        times: SlotTimes,
        ranks: int,
        hands_over: bool,
        listener: Listener,
        at: Callable[[float, Callable[[float], None]], None],
    ) -> None:
        """`at(time, call)` calls `call(time)` then."""
        self.ranks = ranks
        self._slots = slots
        self._times = times
        self._hands_over = hands_over
        self._listener = listener
        self._at = at
        self._waiting: deque[Request] = deque()
        self._running = 0
        self._reserved = 0

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def poll(self, now: float) -> None:
        while self._waiting and self._running < self._slots:
            request = self._waiting.popleft()
            self._running += 1
            if request.first >= 0:
                self._end_later(request, now)
                continue
            if self._hands_over:
                self._listener.started(request)
            self._at(now + self._times.first.seconds(request.n_prompt), self._first_token_of(request))

    def _first_token_of(self, request: Request) -> Callable[[float], None]:
        def there(now: float) -> None:
            self._listener.computed(request, now)
            if not self._hands_over:
                self._end_later(request, now)

        return there

    def _end_later(self, request: Request, now: float) -> None:
        def end(now: float) -> None:
            self._running -= 1
            self._listener.ended(request, now)

        self._at(now + (request.n_output - 1) * self._times.per_token, end)

    def work(self) -> float | None:
        return None

    def advance(self, seconds: float, now: float) -> None:
        raise AssertionError("its requests end by the clock")

    def reserve(self, request: Request) -> bool:
        room = self._running + len(self._waiting) + self._reserved < self._slots
        self._reserved += room
        return room

    def admit(self, request: Request) -> None:
        self._reserved -= 1
        self._waiting.append(request)

    def release(self, request: Request) -> None:
        self._running -= 1
