"""Pinned host memory for copies by a GPU, allocated in one piece at the start.

Pinning takes 0.4 s per GB, and longer while kernels run. That is too slow for each KV cache.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNED = 4096


class PinnedMemory:
    """Allocator of pinned memory. If too few bytes are free, it returns plain memory, with slower copies."""

    def __init__(self, n_bytes: int, *, pin: bool = True) -> None:
        """`pin`: False: plain memory, without a GPU."""
        self._memory = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pin)
        self._lock = threading.Lock()
        self._free = [(0, n_bytes)]  # offsets and sizes, sorted, never adjacent
        self._returned: deque[tuple[int, int]] = deque()  # from finalizers, which may run in any thread

    def new(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return memory, which is freed with its last reference. Thread-safe."""
        size = -(-n_bytes // _ALIGNED) * _ALIGNED
        at = self._take(size) if n_bytes else None
        if at is None:
            return np.empty(n_bytes, np.uint8)
        part = (ctypes.c_uint8 * n_bytes).from_address(self._memory.data_ptr() + at)
        weakref.finalize(part, self._returned.append, (at, size))
        return np.frombuffer(memoryview(part), np.uint8)  # the array and its views reference `part`

    def n_free(self) -> int:
        with self._lock:
            self._merge()
            return sum(size for _, size in self._free)

    def _take(self, size: int) -> int | None:
        with self._lock:
            self._merge()
            for i, (at, n) in enumerate(self._free):
                if n >= size:
                    self._free[i : i + 1] = [(at + size, n - size)] if n > size else []
                    return at
        return None

    def _merge(self) -> None:
        """Merge returned memory with adjacent free memory."""
        if not self._returned:
            return
        free = self._free
        while self._returned:
            free.append(self._returned.popleft())
        self._free = []
        for at, size in sorted(free):
            if self._free and sum(self._free[-1]) == at:
                before, size_before = self._free.pop()
                at, size = before, size_before + size
            self._free.append((at, size))
