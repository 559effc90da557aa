"""CPU time of a call at growing sizes of its input: more than linear growth fails."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

_LIMIT_S = 1.0  # CPU time of one call; linear ones need a hundredth
_FAST_S = 0.02  # CPU time below which growth is noise
_TRIES = 3
_MAX_RATIO = 8.0  # for 4 times the input: linear gives 4, quadratic 16


class _OverLimit(BaseException):
    """Raised in the main thread, past whatever catches exceptions."""


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def stop(_: int, __: FrameType | None) -> None:
        raise _OverLimit

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def cpu_s(call: Callable[[], object], tries: int = 1) -> float:
    """Return the smallest CPU time of `tries` calls, seconds; infinite beyond the limit.

    Without garbage collection: a call of many objects would collect those of all earlier tests.
    """
    best = float("inf")
    gc.disable()
    try:
        for _ in range(tries):
            start = time.thread_time()
            with _limit():
                call()
            best = min(best, time.thread_time() - start)
    except _OverLimit:
        return float("inf")
    finally:
        gc.enable()
    return best


def grows_faster(call: Callable[[int], object], sizes: tuple[int, ...]) -> str:
    """Return how the CPU time of `call(n)` grows; "" if it is linear in n, or too small to measure.

    `sizes`: ascending, so that an exponential call ends at the first of them.
    """
    for n in sizes:
        if cpu_s(partial(call, n)) < _FAST_S:
            continue
        took = {size: cpu_s(partial(call, size), _TRIES) for size in (n // 4, n // 2, n)}
        quarter, _, whole = took.values()
        if whole == float("inf") or whole > max(_FAST_S, _MAX_RATIO * quarter):
            return ", ".join(f"{seconds:.2g} s at {size}" for size, seconds in took.items())
    return ""
