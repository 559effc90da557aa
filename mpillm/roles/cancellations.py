"""Requests that the harness cancels a fixed time after it has sent them."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence


class Cancellations:
    """The open requests to cancel, by slot."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._due_at: dict[int, float] = {}  # by slot of a request without a complete response
        self._order: list[tuple[float, int]] = []  # a heap of times and slots; may have ended requests
        self._unconfirmed: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        """Return whether the request in a slot is to be cancelled, and has not ended."""
        return slot in self._due_at

    @property
    def unconfirmed(self) -> bool:
        """Whether a row with CANCEL_DONE is outstanding."""
        return bool(self._unconfirmed)

    def add(self, slots: Sequence[int], after_s: Sequence[float]) -> None:
        """Add requests that have just been sent; `after_s`: seconds, or NaN for one that is not cancelled."""
        now = self._clock()
        for slot, seconds in zip(slots, after_s, strict=True):
            if not math.isnan(seconds):
                self._due_at[slot] = now + seconds
                heapq.heappush(self._order, (now + seconds, slot))

    def due(self) -> list[int]:
        """Return the slots of the requests to cancel now."""
        slots, now = [], self._clock()
        while self._order and self._order[0][0] <= now:
            at, slot = heapq.heappop(self._order)
            if self._due_at.get(slot) == at:
                slots.append(slot)
        self._unconfirmed.update(slots)
        return slots

    def quiet_s(self) -> float:
        """Return the seconds until a request is due."""
        return max(0.0, self._order[0][0] - self._clock()) if self._order else math.inf

    def ended(self, slot: int) -> None:
        """Forget a request whose response is complete, or that was cancelled."""
        self._due_at.pop(slot, None)

    def confirmed(self, slot: int) -> None:
        """Note that the row with CANCEL_DONE has arrived."""
        self._unconfirmed.discard(slot)
