"""Blocks of the layers with a window, where other layers see all tokens (gpt-oss, Gemma 3).

These layers have a KV cache of their own, and sequences a second table of blocks, only for the tokens that a
window still reaches. Blocks are taken with the step that fills them and given back with the next one, so
there are always enough (`memory.cache_bytes`): who may start depends on the other layers' cache only.
"""

from __future__ import annotations

from mpillm.engine.schedule.block_allocator import NULL_BLOCK, BlockAllocator
from mpillm.engine.schedule.prefix_cache import PrefixCache
from mpillm.engine.schedule.sequence import Sequence


def n_unseen(n_cached: int, window: int, tokens_per_block: int) -> int:
    """Return how many of a sequence's first blocks no token after the cached ones sees."""
    return max(0, n_cached + 1 - window) // tokens_per_block


class WindowBlocks:
    """Who holds which of the blocks."""

    def __init__(self, blocks: BlockAllocator, window: int, tokens_per_block: int) -> None:
        """`blocks`: a `PrefixCache` if blocks are reused."""
        self.blocks = blocks
        self.known = blocks if isinstance(blocks, PrefixCache) else None
        self._window = window
        self._size = tokens_per_block
        self._last: list[Sequence] = []  # of the last step

    def cover(self, plan: list[tuple[Sequence, int]]) -> None:
        """Take the blocks that a step fills, after those back that the steps before it were the last to see.

        Steps in flight may still read these, but none that writes to them starts before those have ended.
        """
        for sequence in self._last:  # its guesses may turn out to be wrong, if it is in flight still
            self._let_go(sequence, sequence.n_cached - len(sequence.draft))
        self._last = [sequence for sequence, _ in plan]
        for sequence, n_new in plan:
            self._let_go(sequence, sequence.n_cached)
            n = -(-(sequence.n_cached + n_new) // self._size) - len(sequence.window_blocks)
            sequence.window_blocks += self.blocks.take(n)

    def reserve(self, n_tokens: int) -> list[int]:
        """Take the blocks of a sequence that arrives with so many tokens cached."""
        n_gone = n_unseen(n_tokens, self._window, self._size)
        return [NULL_BLOCK] * n_gone + self.blocks.take(-(-n_tokens // self._size) - n_gone)

    def admit(self, sequence: Sequence, reserved: list[int]) -> None:
        """Give a sequence what was reserved for it."""
        sequence.window_blocks, sequence.n_window_blocks_freed = reserved, reserved.count(NULL_BLOCK)

    def give_up(self, reserved: list[int]) -> None:
        self.blocks.give_back(reserved[reserved.count(NULL_BLOCK) :])

    def free(self, sequence: Sequence) -> None:
        self.blocks.give_back(sequence.window_blocks[sequence.n_window_blocks_freed :])
        sequence.window_blocks, sequence.n_window_blocks_freed = [], 0

    def reuse(self, sequence: Sequence, n_known: int) -> int:
        """Take what is known behind its cached tokens, of at most `n_known` blocks; return for how many.

        Of these only those that the next token sees must be there.
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

    def _let_go(self, sequence: Sequence, n_cached: int) -> None:
        first, end = sequence.n_window_blocks_freed, n_unseen(n_cached, self._window, self._size)
        if end > first:
            self.blocks.give_back(sequence.window_blocks[first:end])
            sequence.window_blocks[first:end] = [NULL_BLOCK] * (end - first)  # maybe more than it had
            sequence.n_window_blocks_freed = end
