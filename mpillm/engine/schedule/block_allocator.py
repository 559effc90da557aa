"""Which blocks of a KV cache are free."""

from __future__ import annotations

import heapq

NULL_BLOCK = 0  # never allocated: pads short rows of a block table


class BlockAllocator:
    """Gives out block numbers 1 to n, the lowest free one first, so that used blocks stay close together."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(1, n_blocks + 1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """Return `n` blocks; the caller has checked `n_free`."""
        return [heapq.heappop(self._free) for _ in range(n)]

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)
