"""For how many rows CUDA graphs are captured; fewer rows are padded to the next size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

_SLOWER = 1.02  # less than that is noise


def ladder(most: int) -> list[int]:
    """Return sizes up to `most`: doubling while reading weights dominates, then four per doubling."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 64 else (1 << size.bit_length() - 1) // 4
    return [*sizes, most]


def too_slow(times: Mapping[int, float]) -> list[int]:
    """Return the sizes that take longer than a larger one, which then serves their rows.

    For some numbers of rows cuBLAS chooses kernels half as fast as those for more rows.
    """
    found, fastest = [], math.inf
    for size in sorted(times, reverse=True):
        if times[size] > _SLOWER * fastest:
            found.append(size)
        fastest = min(fastest, times[size])
    return found


def gpu_ms(work: Callable[[], object]) -> float:
    """Run `work` twice on the current stream and return the shorter time that the GPU took."""
    times = []
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return min(times)
