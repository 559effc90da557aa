"""Blocks of the layers with a window, where other layers see all tokens (gpt-oss, Gemma 3).

These layers have their own KV cache, and sequences have a second table of blocks, only for the tokens inside
the window. A step frees the blocks that no window reaches any more, and then takes the blocks that it fills.
So there are always enough blocks (`memory.cache_bytes`). Only the other layers' cache limits the sequences
that may start.
"""

from __future__ import annotations

from mpillm.engine.schedule.block_allocator import NULL_BLOCK, BlockAllocator
from mpillm.engine.schedule.prefix_cache import PrefixCache
from mpillm.engine.schedule.sequence import Sequence


def n_unseen(n_cached: int, window: int, tokens_per_block: int) -> int:
    """Return how many of a sequence's first blocks no token after the cached ones sees."""
    return max(0, n_cached + 1 - window) // tokens_per_block


class WindowBlocks:
    """The window blocks of all sequences."""

    def __init__(self, blocks: BlockAllocator, window: int, tokens_per_block: int) -> None:
        """`blocks`: a `PrefixCache` if blocks are reused."""
        self.blocks = blocks
        self.known = blocks if isinstance(blocks, PrefixCache) else None
        self._window = window
        self._size = tokens_per_block
        self._last: list[Sequence] = []  # of the last step

    def cover(self, plan: list[tuple[Sequence, int]]) -> None:
        """Free the blocks that no step sees from now on, then take the blocks that this step fills.

        Steps in flight may still read freed blocks. These steps end before a step starts that writes to the
        blocks.
        """
        for sequence in self._last:  # draft tokens of a step in flight may be rejected
            self._free_unseen(sequence, sequence.n_cached - len(sequence.draft))
        self._last = [sequence for sequence, _ in plan]
        for sequence, n_new in plan:
            self._free_unseen(sequence, sequence.n_cached)
            n = -(-(sequence.n_cached + n_new) // self._size) - len(sequence.window_blocks)
            sequence.window_blocks += self.blocks.take(n)

    def reserve(self, n_tokens: int) -> list[int]:
        """Take the blocks of a sequence that arrives with so many tokens cached."""
        n_freed = n_unseen(n_tokens, self._window, self._size)
        return [NULL_BLOCK] * n_freed + self.blocks.take(-(-n_tokens // self._size) - n_freed)

    def admit(self, sequence: Sequence, reserved: list[int]) -> None:
        """Give a sequence its reserved blocks."""
        sequence.window_blocks, sequence.n_window_blocks_freed = reserved, reserved.count(NULL_BLOCK)

    def give_up(self, reserved: list[int]) -> None:
        self.blocks.give_back(reserved[reserved.count(NULL_BLOCK) :])

    def free(self, sequence: Sequence) -> None:
        self.blocks.give_back(sequence.window_blocks[sequence.n_window_blocks_freed :])
        sequence.window_blocks, sequence.n_window_blocks_freed = [], 0

    def reuse(self, sequence: Sequence, n_known: int) -> int:
        """Take known blocks after a sequence's cached tokens; return their number, at most `n_known`.

        Blocks that the next token does not see need not be known.
        """
        assert self.known is not None
        first = sequence.n_cached // self._size
        blocks = [self.known.find(hash_) for hash_ in sequence.hashes[first : first + n_known]]
        for n in range(len(blocks), 0, -1):
            begin = n_unseen((first + n) * self._size, self._window, self._size)
            seen = blocks[max(0, begin - first) : n]
            if all(seen):
                break
        else:
            return 0
        if begin > first:
            self.free(sequence)
            sequence.window_blocks, sequence.n_window_blocks_freed = [NULL_BLOCK] * begin, begin
        self.known.hold(seen)
        sequence.window_blocks += seen
        sequence.n_window_blocks_sent = 0
        return n

    def _free_unseen(self, sequence: Sequence, n_cached: int) -> None:
        first, end = sequence.n_window_blocks_freed, n_unseen(n_cached, self._window, self._size)
        if end > first:
            self.blocks.give_back(sequence.window_blocks[first:end])
            sequence.window_blocks[first:end] = [NULL_BLOCK] * (end - first)  # may lengthen the list
            sequence.n_window_blocks_freed = end
