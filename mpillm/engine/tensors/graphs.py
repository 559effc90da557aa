"""CUDA graphs: sizes in rows (fewer rows are padded to the next size), capture and timing."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_SLOWER = 1.02  # a smaller ratio is noise


def ladder(max_size: int) -> list[int]:
    """Return sizes up to `max_size`: doubling while reading weights dominates, then four per doubling."""
    sizes, size = [], 1
    while size < max_size:
        sizes.append(size)
        size += size if size < 64 else (1 << size.bit_length() - 1) // 4
    return [*sizes, max_size]


def too_slow(times: Mapping[int, float]) -> list[int]:
    """Return the sizes that take longer than a larger size, which replaces them.

    For some numbers of rows, cuBLAS chooses kernels half as fast as its kernels for more rows.
    """
    slow_sizes, fastest = [], math.inf
    for size in sorted(times, reverse=True):
        if times[size] > _SLOWER * fastest:
            slow_sizes.append(size)
        fastest = min(fastest, times[size])
    return slow_sizes


def capture(work: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of the kernels that `work` launches on the current device, and the result of `work`.

    `pool`: the memory pool of another graph, which never runs simultaneously. Run `work` once before, so that
    kernels are compiled and libraries have their workspaces.
    """
    graph = torch.cuda.CUDAGraph()
    # If the garbage collector frees an older graph during the capture, the capture fails.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        # Capture only this thread's calls, not calls of NCCL's and the heartbeat's threads.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
    finally:
        if was_enabled:
            gc.enable()
    return graph, result


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
