"""Reuse blocks by their content: sequences with a common prefix compute it once.

A full block is found by the hash of its tokens and of all tokens before them (the hash of the block before
seeds its own), as in vLLM's and TensorRT-LLM's block reuse. Several sequences may hold a block, because no
sequence writes to a full block. A block without a holder keeps its content until its memory is needed. The
least recently released block is reused first.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict

import numpy as np

from mpillm.engine.schedule.block_allocator import NULL_BLOCK, BlockAllocator
from mpillm.engine.schedule.host_blocks import HostBlocks
from mpillm.engine.schedule.sequence import Sequence


class PrefixCache(BlockAllocator):
    """An allocator whose blocks outlive their sequences."""

    def __init__(self, n_blocks: int, tokens_per_block: int, host: HostBlocks | None = None) -> None:
        """`host`: for the content of blocks whose memory is needed; None: it is lost."""
        super().__init__(n_blocks)
        self.host = host
        self._tokens_per_block = tokens_per_block
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}  # the inverse
        self._n_holders = [0] * (n_blocks + 1)
        # Blocks with a hash and no holder, the longest unused first. A dict would look for its first key
        # among all those that were deleted.
        self._left: OrderedDict[int, None] = OrderedDict()
        self.reused_blocks = 0  # since the start

    @property
    def n_free(self) -> int:
        return len(self._free) + len(self._left)

    def take(self, n: int) -> list[int]:
        forgotten: list[int] = []
        while len(self._free) + len(forgotten) < n:
            block, _ = self._left.popitem(last=False)
            del self._block_of[hash_ := self._hash_of.pop(block)]
            if self.host is not None:
                self.host.save(hash_, block)
            forgotten.append(block)
        super().give_back(forgotten)
        blocks = super().take(n)
        for block in blocks:
            self._n_holders[block] = 1
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):  # a block is useless without the blocks before it: keep these longer
            self._n_holders[block] -= 1
            if self._n_holders[block]:
                continue
            if block in self._hash_of:
                self._left[block] = None
            else:
                super().give_back([block])

    def forget_all(self) -> None:
        """Let no sequence find the blocks that are known now."""
        self._block_of.clear()
        self._hash_of.clear()
        unheld = list(self._left)
        self._left.clear()
        super().give_back(unheld)
        if self.host is not None:
            self.host.forget_all()

    def known(self, sequence: Sequence) -> list[int]:
        """Return known blocks after a sequence's cached tokens, but never all: the last must be computed.

        `NULL_BLOCK` stands for content in host memory.
        """
        if sequence.n_cached % self._tokens_per_block:
            return []
        hashes = self._hashes(sequence, (sequence.n_context - 1) // self._tokens_per_block)
        known = itertools.takewhile(self._is_known, hashes[sequence.n_cached // self._tokens_per_block :])
        return [self.find(hash_) for hash_ in known]

    def _is_known(self, hash_: bytes) -> bool:
        return hash_ in self._block_of or (self.host is not None and hash_ in self.host)

    def find(self, hash_: bytes) -> int:
        """Return the block with a hash, or `NULL_BLOCK`."""
        return self._block_of.get(hash_, NULL_BLOCK)

    def hold(self, blocks: list[int]) -> None:
        """Take blocks that `find` has returned."""
        for block in blocks:
            self._left.pop(block, None)
            self._n_holders[block] += 1
        self.reused_blocks += len(blocks)

    def hold_known(self, sequence: Sequence, known: list[int]) -> list[int]:
        """Take what `known` has returned, and return its blocks.

        Content in host memory is loaded into the sequence's own blocks, or into free ones if it has none.
        """
        first = sequence.n_cached // self._tokens_per_block
        self.hold([block for block in known if block != NULL_BLOCK])
        absent = [i for i, block in enumerate(known, first) if block == NULL_BLOCK]
        if not absent:
            return known
        assert self.host is not None
        hashes = [sequence.hashes[i] for i in absent]
        host_blocks = self.host.hold(hashes)
        own = [sequence.blocks[i] for i in absent if i < len(sequence.blocks)]
        loaded = own + self.take(len(absent) - len(own))
        self.host.load(hashes, host_blocks, loaded)
        self._note(hashes, loaded)
        self.reused_blocks += len(loaded)
        targets = iter(loaded)
        return [next(targets) if block == NULL_BLOCK else block for block in known]

    def publish(self, plan: list[tuple[Sequence, int]], window_blocks: PrefixCache | None = None) -> None:
        """Let later steps find the blocks that the step `plan` fills.

        `window_blocks`: the allocator of the sequences' window blocks.
        """
        size = self._tokens_per_block
        for sequence, _ in plan:
            n_known = len(sequence.prompt) + len(sequence.output)  # without unread and draft tokens
            if sequence.extras is not None and sequence.extras.n_slots > 1:  # each slot has its own output
                n_known = len(sequence.prompt)
            first, end = sequence.n_published, min(sequence.n_cached, n_known) // size
            hashes = self._hashes(sequence, end) if end > first else []
            self._note(hashes[first:], sequence.blocks[first:end])
            if window_blocks is not None:
                window_blocks._note(hashes[first:], sequence.window_blocks[first:end])
            sequence.n_published = max(first, end)

    def _note(self, hashes: list[bytes], blocks: list[int]) -> None:
        for hash_, block in zip(hashes, blocks, strict=True):
            # If two sequences compute the same tokens simultaneously, one block is enough.
            if block != NULL_BLOCK and hash_ not in self._block_of:
                self._block_of[hash_], self._hash_of[block] = block, hash_

    def _hashes(self, sequence: Sequence, n: int) -> list[bytes]:
        """Return the hashes of the sequence's first `n` blocks, all of them full."""
        hashes, size = sequence.hashes, self._tokens_per_block
        while len(hashes) < n:
            start = len(hashes) * size
            tokens = np.array(sequence.tokens(start, start + size), np.int32)
            parent = hashes[-1] if hashes else sequence.salt
            hashes.append(hashlib.blake2b(tokens.tobytes(), key=parent, digest_size=16).digest())
        return hashes[:n]
